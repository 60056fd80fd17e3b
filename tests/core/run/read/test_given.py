"""Embeddings and positions as tokens, as inputs of segments, and their gradients, on one rank."""

from __future__ import annotations

import gc
import inspect
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_prefix.errors import CannotShare
from megatron_prefix.features.vision.call_rows import DEEPSTACK, MASK, CallRows
from megatron_prefix.features.vision.chunk_rows import ChunkRows, chunk_rows
from megatron_prefix.run.calls import BLOCK, EMBEDDINGS, Callbacks, ModelCall, bound
from megatron_prefix.run.read.read_calls import read_tokens

ONE = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
WIDTH = 3


def rank(mrope: bool = True, ahead: bool = False) -> Any:
    model = nn.Module()
    model.config = SimpleNamespace()
    model.position_embedding_type = "mrope" if mrope else "rope"
    return SimpleNamespace(
        language_models=[model], groups=SimpleNamespace(cp=ONE, tp=ONE), device=torch.device("cpu"),
        model=SimpleNamespace(sequence_ranks=1, looks_ahead=ahead),
    )  # fmt: skip


def call(
    number: int, seed: int = 0, num: int = 6, images: tuple[int, ...] = (2, 3), **changed: Any
) -> ModelCall:
    """A call of one sample; its rows are those of every call of the same seed."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(num, 1, WIDTH, generator=draw, requires_grad=True)
    deep = [torch.randn(len(images), WIDTH, generator=draw, requires_grad=True) for _ in range(2)]
    mask = torch.zeros(1, num, dtype=torch.bool)
    mask[0, list(images)] = True
    ids = torch.arange(num).expand(3, 1, num).clone()
    known = {EMBEDDINGS: rows, MASK: mask, DEEPSTACK: deep, "position_ids": ids}
    return ModelCall(number, known | changed)


def codes(*calls: ModelCall, num: int = 6) -> list[list[int]]:
    found = ChunkRows(calls, rank(), 0).codes([num] * len(calls), None)
    assert found.dtype == np.int64 and (found >= 0).all()
    return found.reshape(len(calls), num).tolist()


def test_equal_rows_have_equal_codes() -> None:
    one, other, third = codes(call(0), call(1), call(2, seed=1))
    assert one == other and len({*one}) == 6
    assert not {*one} & {*third}


@pytest.mark.parametrize("what", ["row", "position", "deep", "mask", "none"])
def test_what_tells_rows_apart(what: str) -> None:
    """One row of the second call, the one of the first image, and no other."""
    changed = call(1)
    with torch.no_grad():
        if what == "row":
            changed[EMBEDDINGS][2, 0, 1] = torch.nextafter(
                changed[EMBEDDINGS][2, 0, 1], torch.tensor(9.0)
            )
        elif what == "position":
            changed["position_ids"][2, 0, 2] += 1
        elif what == "deep":
            changed[DEEPSTACK][1][0, 2] += 1e-6
        elif what == "mask":  # another row is the image, with the same deepstack row
            changed = call(1, images=(2, 4))
    one, other = codes(call(0), changed)
    different = [place for place in range(6) if one[place] != other[place]]
    assert different == {"none": [], "mask": [3, 4]}.get(what, [2])


def test_text_is_the_same_beside_images_and_without_any() -> None:
    text = call(1, **{MASK: None, DEEPSTACK: None})
    one, other = codes(call(0), text)
    assert [a == b for a, b in zip(one, other, strict=True)] == [
        True,
        True,
        False,
        False,
        True,
        True,
    ]


def test_codes_do_not_depend_on_what_else_is_there() -> None:
    assert codes(call(0))[0] == codes(call(0, seed=3), call(1))[1]


def test_tokens_with_positions_of_their_own() -> None:
    ids = torch.arange(4).expand(3, 1, 4)
    calls = [ModelCall(n, {"position_ids": one}) for n, one in enumerate([ids, ids, ids + 1])]
    tokens = np.array([7, 8, 7, 9] * 3)
    made = chunk_rows(calls, rank(), 0)
    assert made is not None
    found = made.codes([4, 4, 4], tokens).reshape(3, 4)
    assert (found[0] == found[1]).all() and (found[0] != found[2]).all()
    assert len({*found[0].tolist()}) == 4  # the same token at two places
    made.prepare(forest([(0, 0, 4, 4)], [4, 4, 4]))
    arguments = made.arguments(0)
    assert arguments["input_ids"].tolist() == [[7, 8, 7, 9]]
    assert arguments["position_ids"].tolist() == [[[0, 1, 2, 3]]] * 3


def test_text_has_one_row_of_positions() -> None:
    plain = call(0)
    flat = call(1, position_ids=torch.arange(6)[None])
    one, other = codes(plain, flat)
    assert one == other


def test_what_has_nothing_to_give() -> None:
    assert chunk_rows([], rank(), 0) is None
    text = [ModelCall(0, {"input_ids": torch.zeros(1, 4)})]
    assert chunk_rows(text, rank(mrope=False), 0) is None
    with pytest.raises(CannotShare, match="the model looks at positions"):
        chunk_rows(text, rank(), 0)
    with pytest.raises(CannotShare, match="multi-token prediction in a vision-language model"):
        chunk_rows([call(0)], rank(ahead=True), 0)


def forest(spans: list[tuple[int, int, int, int]], lengths: list[int]) -> Any:
    """One segment of spans (rollout, start, length, padded)."""
    made = [
        SimpleNamespace(rollouts=(r,) if r >= 0 else (), start=s, length=n, padded=p)
        for r, s, n, p in spans
    ]
    return SimpleNamespace(num_positions=lengths, segments=[SimpleNamespace(spans=made)])


def segment_of(
    calls: list[ModelCall], spans: list[tuple[int, int, int, int]]
) -> tuple[ChunkRows, Any]:
    made = ChunkRows(calls, rank(), 0)
    made.codes([6] * len(calls), None)
    made.prepare(forest(spans, [6] * len(calls)))
    return made, made.arguments(0)


def test_a_segment_has_rows_of_its_spans() -> None:
    calls = [call(0), call(1, seed=1)]
    _, found = segment_of(calls, [(0, 1, 3, 4), (1, 0, 3, 3), (-1, 0, 0, 2)])
    first, second = calls[0][EMBEDDINGS][:, 0], calls[1][EMBEDDINGS][:, 0]
    wanted = torch.cat([first[1:4], first[3:4], second[:3], first[:1], first[:1]])
    assert torch.equal(found[EMBEDDINGS][:, 0], wanted) and found["input_ids"] is None
    assert found[MASK].tolist() == [[False, True, True, True, False, False, True, False, False]]
    one, other = (one[DEEPSTACK][1] for one in calls)
    assert torch.equal(found[DEEPSTACK][1], torch.stack([one[0], one[1], one[1], other[0]]))


def test_other_keywords_of_the_decoder_stay() -> None:
    plain = call(0)
    more = {name: plain.arguments[name] for name in (MASK, DEEPSTACK)}
    calls = [call(0, **{MASK: None, DEEPSTACK: None, BLOCK: more | {"other": 7}})]
    _, found = segment_of(calls, [(0, 0, 6, 6)])
    assert found[BLOCK].keys() == {MASK, DEEPSTACK, "other"} and found[BLOCK]["other"] == 7


def test_gradients_go_to_the_copies_that_rows_were_taken_from() -> None:
    calls = [call(0), call(1, seed=1), call(2)]
    made, found = segment_of(calls, [(0, 1, 3, 4), (1, 0, 3, 3), (-1, 0, 0, 2)])
    leaves: list[Tensor] = [found[EMBEDDINGS], *found[DEEPSTACK]]
    (leaves[0] * torch.arange(1.0, 10.0)[:, None, None]).sum().backward()
    (leaves[2] * torch.arange(1.0, 5.0)[:, None]).sum().backward()
    made.collect(0)
    made.backward()
    rows = [None if (g := one[EMBEDDINGS].grad) is None else g[:, 0, 0].tolist() for one in calls]
    assert rows == [[0, 1, 2, 3, 0, 0], [5, 6, 7, 0, 0, 0], None]  # padding and fillers have none
    deep = [None if (g := one[DEEPSTACK][1].grad) is None else g[:, 0].tolist() for one in calls]
    assert deep == [[1, 2], [4, 0], None]
    assert calls[0][DEEPSTACK][0].grad.abs().sum() == 0


def test_gradients_of_several_segments_come_together() -> None:
    calls, spans = [call(0)], [[(0, 0, 4, 4)], [(0, 4, 2, 2)]]
    made = ChunkRows(calls, rank(), 0)
    made.codes([6], None)
    both = [forest(one, [6]).segments[0] for one in spans]
    made.prepare(SimpleNamespace(num_positions=[6], segments=both))  # type: ignore[arg-type]
    for index in range(2):
        found = made.arguments(index)
        (found[EMBEDDINGS].sum() * (2 + index)).backward()
        made.collect(index)
    made.backward()
    assert calls[0][EMBEDDINGS].grad[:, 0, 0].tolist() == [2, 2, 2, 2, 3, 3]


def test_a_second_attempt_begins_with_nothing() -> None:
    calls, spans = [call(0)], [(0, 0, 6, 6)]
    made, found = segment_of(calls, spans)
    found[EMBEDDINGS].sum().backward()
    made.collect(0)
    made.prepare(forest(spans, [6]))
    made.backward()
    assert calls[0][EMBEDDINGS].grad is None


@pytest.mark.parametrize("size", [1, 2])
def test_the_first_row_of_positions_where_ranks_have_their_own(size: int) -> None:
    ids = torch.arange(6) + 10 * torch.arange(3)[:, None, None]
    every = [call(0, position_ids=ids).arguments, call(1).arguments]
    signature = inspect.signature(lambda **_: None)
    calls = [bound(signature, (), {**one}, number) for number, one in enumerate(every)]
    known = read_tokens(calls, size, Callbacks())
    assert known is not None
    found = None if known.positions is None else known.positions.tolist()
    assert found == {1: None, 2: [*range(6), *range(6)]}[size]  # alone nobody looks at them


def test_without_gradients_nothing_is_kept_of_a_segment() -> None:
    with torch.no_grad():
        made, found = segment_of([call(0)], [(0, 0, 6, 6)])
    assert not found[EMBEDDINGS].requires_grad
    gone = weakref.ref(found.pop(EMBEDDINGS))
    found.clear()
    gc.collect()
    assert gone() is None
    made.collect(0)


def test_a_call_keeps_the_rows_that_segments_read() -> None:
    weight = torch.ones(6, 1, WIDTH, requires_grad=True)
    made = weight * 2
    first, second = call(0, **{EMBEDDINGS: made}), call(1)
    given, found = segment_of([first, second], [(0, 1, 3, 3)])
    assert made.numel() == 1 and found[EMBEDDINGS].shape == (3, 1, WIDTH)
    rows = CallRows.of(second, positions_first=False)
    rows.keep((torch.tensor([4, 1]), torch.tensor([0, 0])))
    assert rows.kept is not None and torch.equal(rows.kept, second[EMBEDDINGS][[4, 1], 0])
    (found[EMBEDDINGS] * torch.arange(1.0, 4.0)[:, None, None]).sum().backward()
    given.collect(0)
    given.backward()
    assert weight.grad is not None and weight.grad[:, 0, 0].tolist() == [0, 2, 4, 6, 0, 0]


class Waits(TorchDispatchMode):
    """Counts what would make the host wait for a device: its numbers, and indices by flags."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args[1:], kwargs or {}))
        flags = any(isinstance(one, Tensor) and one.dtype == torch.bool for one in leaves)
        name = func.overloadpacket.__name__
        self.count += name in ("nonzero", "_local_scalar_dense", "masked_select")
        self.count += name in ("index", "index_put", "index_put_") and flags
        return func(*args, **(kwargs or {}))


def test_no_segment_makes_the_host_wait() -> None:
    calls, spans = [call(0), call(1, seed=1)], [(0, 1, 3, 4), (1, 0, 3, 3)]
    made, _ = segment_of(calls, spans)
    with Waits() as waits:
        found = made.arguments(0)
    sum(one.sum() for one in [found[EMBEDDINGS], *found[DEEPSTACK]]).backward()
    with waits:
        made.collect(0)
    assert found[DEEPSTACK][0].grad is not None and waits.count == 0
