"""What sets of CUDA graphs hold, where launches are noted and launched again on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_prefix.features.graphs import cuda
from megatron_prefix.features.graphs.pieces import Piece
from megatron_prefix.features.graphs.placed import SPARE
from megatron_prefix.features.graphs.segment_graphs import GraphForm, SegmentGraphs
from megatron_prefix.features.host.segment import addresses
from megatron_prefix.lab.models.build import unwrap
from tests.core.features.graphs.test_graphs import config, made, steps
from tests.harness.hybrid import GDN, MAMBA, mamba
from tests.harness.one_rank import one_rank, small_model

pytestmark = pytest.mark.turns

LAYERS = 3
PLAIN = {"qk_layernorm": False}
"""Without torch's norms of queries and keys, whose few numbers a head no prediction has."""
OWN = {"hidden", "made", "mixed", "residual", "normed"}
"""Places that no other layer of a segment writes to."""


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


class Held:
    """What sets save, or have places for, by its address.

    Attributes:
        saved: by pieces.
        rehearsed: by layers, while nothing is captured.
        places: of a layer's own.
    """

    def __init__(self, model: Any) -> None:
        self.resident = addresses(*model.parameters(), *model.buffers())
        self.saved, self.rehearsed, self.places = ({} for _ in range(3))  # type: ignore[var-annotated]

    def take(self, where: dict[int, Tensor], one: Tensor) -> Tensor:
        address = one.untyped_storage().data_ptr()
        if address not in self.resident:
            where[address] = one.detach()
        return one

    def forget(self) -> None:
        for one in (self.saved, self.rehearsed, self.places):
            one.clear()


def size(*several: dict[int, Tensor]) -> int:
    together = {address: one for held in several for address, one in held.items()}
    return sum(one.untyped_storage().nbytes() for one in together.values())


def holding(held: Held, patch: pytest.MonkeyPatch) -> None:
    """Notes what pieces save, and where they write."""
    place = SegmentGraphs.place

    class Holding(cuda.Graph):  # type: ignore[misc, valid-type]
        def begin(self) -> None:
            super().begin()
            self._hooks = saving(held, held.saved)
            self._hooks.__enter__()

        def end(self) -> None:
            self._hooks.__exit__(None, None, None)
            super().end()

    def placed(sets: Any, name: Any, *args: Any, **kwargs: Any) -> Tensor:
        there: Tensor = place(sets, name, *args, **kwargs)
        return held.take(held.places, there) if name[0] in OWN else there

    patch.setattr(cuda, "Graph", Holding)
    patch.setattr(SegmentGraphs, "place", placed)


def saving(held: Held, where: dict[int, Tensor]) -> contextlib.AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(
        lambda one: held.take(where, one), lambda one: one
    )


def new_sets(
    model: Any, patch: pytest.MonkeyPatch, memory: str = "retain"
) -> list[tuple[int, int, int, int]]:
    """Of every new set of some steps its positions, and the bytes that it has for its layers, that
    its pieces save, and that these layers save without graphs; between forward and backward."""
    found, held, capture = [], Held(unwrap(model)), SegmentGraphs.capture
    backward, between = Piece.capture_backward, list[tuple[int, int, int]]()

    def captured(sets: Any, form: GraphForm, hidden: Tensor, given: Any) -> None:
        is_first = not sets.made
        held.forget()
        between.clear()
        with saving(held, held.rehearsed):
            capture(sets, form, hidden, given)
        if is_first:
            assert form[:2] == (len(hidden), memory == "recompute_act")
            found.append((len(hidden), *between[0]))

    def capturing_backward(*arguments: Any) -> None:
        both = size(held.saved, held.places), size(held.saved), size(held.rehearsed)
        between.append(both)
        backward(*arguments)

    holding(held, patch)
    patch.setattr(SegmentGraphs, "capture", captured)
    patch.setattr(Piece, "capture_backward", capturing_backward)
    steps(model, config(memory=memory))
    assert found
    return found


@pytest.mark.parametrize(
    "name", ["tiny-qwen3", "tiny-gpt-oss", "tiny-moe", "tiny-deepseek", GDN, MAMBA]
)
@pytest.mark.usefixtures("recorded_graphs")
def test_pieces_save_what_their_layers_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Places are not copies of what they save as well."""
    fields = mamba("M*-") if name == MAMBA else {"num_layers": LAYERS}
    model = small_model(name, spec=fields)
    for _, _, saved, without in new_sets(model, monkeypatch):
        assert saved == without > 0


@pytest.mark.parametrize("name", ["tiny-gpt-oss", "tiny-deepseek"])
@pytest.mark.usefixtures("recorded_graphs")
def test_attention_writes_where_the_next_piece_reads(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it saves of its output is there, and nowhere else; hidden states are there already."""
    there: list[bool] = []
    run = Piece.run_forward

    def noted(piece: Piece, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if len(given) > 1:
            both = zip(given, piece.inputs, strict=True)
            there.append(all(one.data_ptr() == place.data_ptr() for one, place in both))
        return run(piece, given)

    monkeypatch.setattr(Piece, "run_forward", noted)
    steps(small_model(name, spec={"num_layers": LAYERS}), config())
    assert there and all(there)


@pytest.mark.parametrize("name", ["tiny-deepseek"])
@pytest.mark.usefixtures("recorded_graphs")
def test_pieces_of_the_longest_segment_copy_one_thing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they compute is its own place, but for values that are cut from a projection, and for
    latents, which have one place for all layers."""
    copies: list[tuple[bool, int]] = []
    capture = SegmentGraphs.capture

    def captured(sets: Any, form: GraphForm, hidden: Tensor, given: Any) -> None:
        is_first = not sets.made
        capture(sets, form, hidden, given)
        for sides in sets.made[form].values():
            launched = [one for piece in sides.pieces for one in piece.forward.launched]
            copies.append((is_first, launched.count("aten.copy_.default")))

    monkeypatch.setattr(SegmentGraphs, "capture", captured)
    steps(small_model(name, spec={"num_layers": LAYERS}), config())
    assert max(num for is_first, num in copies if is_first) == 1
    assert all(num > 1 for is_first, num in copies if not is_first)


def test_captures_have_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's allocator gives what one of them has freed to others on the same stream only. It
    waits for the current one first, which waits for it in the end."""
    used: list[Any] = []
    waited: list[tuple[Any, Any]] = []

    class Stream:
        def __init__(self, *_: Any) -> None:
            pass

        def wait_stream(self, other: Any) -> None:
            waited.append((self, other))

    def on(stream: Any) -> contextlib.AbstractContextManager[None]:
        used.append(stream)
        return contextlib.nullcontext()

    fakes = {"Stream": Stream, "current_stream": Stream, "stream": on}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # none that there is
    for _ in range(2):
        with cuda.apart():
            pass
    assert used[0] is used[1]
    for first, last in (waited[:2], waited[2:]):
        assert first[0] is used[0] and last == first[::-1]


@pytest.mark.usefixtures("recorded_graphs")
def test_places_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some lie in what others have computed."""
    place, sizes = SegmentGraphs.place, dict[int, dict[int, int]]()

    def placed(sets: Any, *args: Any, **kwargs: Any) -> Tensor:
        there: Tensor = place(sets, *args, **kwargs)
        storage = there.untyped_storage()
        sizes.setdefault(id(sets), {})[storage.data_ptr()] = storage.nbytes()
        return there

    monkeypatch.setattr(SegmentGraphs, "place", placed)
    model = small_model(spec={"num_layers": LAYERS})
    steps(model, config(), 3)
    here = [sizes[id(one)] for one in made(model).sets]
    of_arenas = made(model).arenas.device_bytes
    assert made(model).device_bytes - of_arenas == sum(sum(one.values()) for one in here) > 0
    rows = made(model).arenas.capacity + SPARE
    assert of_arenas == rows * LAYERS * 2 * 2 * 2 * 16 * 8  # K, V and gradients, fp64


def test_what_only_graphs_use_is_what_torch_reserves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of their pools, without what is allocated there."""
    segments = [
        {"segment_pool_id": (0, number), "total_size": 10**number, "allocated_size": number}
        for number in (1, 2, 3)
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert cuda.uncounted_bytes([(0, 1), (0, 3), (0, 4)]) == 10 - 1 + 1000 - 3
    assert cuda.uncounted_bytes([]) == 0
