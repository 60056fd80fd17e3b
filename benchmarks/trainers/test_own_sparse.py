"""The real sparse attention of slime and miles in fp64, from sources that are there already.

The variable TRAINER_SOURCES names a folder with checkouts `slime` and `miles`, as run_sources.py
takes it; without it the tests are skipped. Kernels are their definitions (own_sparse.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from benchmarks.trainers.own_sparse import real_sparse, replaying
from megatron_prefix.errors import CannotShare
from megatron_prefix.features.own_dsa import replay
from megatron_prefix.features.own_dsa.layer import _rows_of
from megatron_prefix.features.own_dsa.replay import IndexerReplay
from megatron_prefix.run.read.suspend import Capture
from tests import judge
from tests.cases import Row, row
from tests.core.trainers.stand_ins import where_missing
from tests.oracle import model

SHARED = "own sparse sharing"
ROWS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("own sparse", "small", {}), ("own sparse", "whole", {}), (SHARED, "small", {}),
    (SHARED, "joined", {"session": "evaluate"}),
    (SHARED, "recompute chunks", {"recompute": "full"}),
)  # fmt: skip
FORMS = {"one": "thd", "tp2_sp": "thd", "pp2": "thd", "cp2": "thd_parts", "cp2_pp2": "thd_parts"}


def rows(layout: str) -> list[Row]:
    """Those of tests/cases.py, in a form that the trainers' packs have."""
    return [row(name, options, form=FORMS[layout], **more) for name, options, more in ROWS]


def replayed(layout: str) -> list[Row]:
    """Those whose indexers replay the sampler's choices."""
    return [
        row(SHARED, "small", form="thd"),
        row(SHARED, "chunks of 2", form="thd", loss_mask="tails"),
        row(SHARED, "recompute chunks", form="thd", recompute="full"),
        row(SHARED, "joined", form="thd"),
    ]


class _Queue:
    def __init__(self, *entries: Tensor) -> None:
        self.top_indices_list, self.forward_index, self.backward_index = entries, 0, 0


def _replay(
    monkeypatch: pytest.MonkeyPatch,
    entries: Sequence[Any],
    stage: str = "replay_forward",
    **facts: Any,
) -> tuple[IndexerReplay, list[Any], Capture]:
    """The part of a step with one pack of two samples, four positions each, of a model that has
    queues with these entries; and the modules."""
    manager = Namespace(stage=stage, enabled=True)
    managers = Namespace(indexer_replay_manager=manager, all_replay_managers=[manager])
    monkeypatch.setitem(sys.modules, "miles.utils.replay_base", managers)
    monkeypatch.setattr(replay, "layouts", lambda *_: [Namespace(lengths=(4, 4))])
    model = nn.ModuleList(nn.Module() for _ in entries)
    for number, (module, entry) in enumerate(zip(model, entries, strict=True), 1):
        queue = _Queue(torch.tensor(entry))
        vars(module).update(indexer_replay=queue, skip_topk=False, layer_number=number)
    one = Namespace(size=lambda: 1)
    config = Namespace(num_moe_experts=None)
    rank: dict[str, Any] = {
        "language_models": [model], "model": Namespace(sequence_ranks=1, has_experts=False),
        "groups": Namespace(cp=one, pp=one), "device": "cpu", "forward_only": False,
        "config": config,
    }  # fmt: skip
    part = IndexerReplay(None, Namespace(**rank | facts), None)
    step: Any = Namespace(chunk=0, number=0, notes={})
    step.notes[part] = part.suspended(step)
    capture: Any = Namespace(steps=[[step]], calls=lambda _: [])
    return part, [*model], capture


PLACES = [[0, -1], [1, 0], [0, 2], [0, 3], [4, -1], [4, 5], [6, 5], [7, 6]]
OTHERS = [[0, -1], [0, 1], [1, 2], [1, 3], [4, -1], [5, 4], [4, 6], [5, 7]]


def test_queues_of_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies choose the same places of their rollouts, in any order, in every layer."""
    part, modules, capture = _replay(monkeypatch, [PLACES, OTHERS])
    part.read_last(capture, None)
    assert [*part.same(())] == []
    numbers = part._numbers
    assert numbers is not None and [*(numbers[:4] == numbers[4:])] == [True, True, False, False]
    assert len({*numbers.tolist()}) == 6
    span = Namespace(rollouts=[1], start=1, end=3, length=2, padded=3)
    forest = Namespace(segments=[Namespace(spans=[span])])
    assert part.choices(modules[0], 0) is None
    step: Any = Namespace(forest=forest, microbatch_of=[0, 0])
    part.begin(Namespace(step=step))  # type: ignore[arg-type]
    found = part.choices(modules[0], 0)
    assert found is not None and found.tolist() == [[0, 1], [2, 1], [-1, -1]]
    part.finished()
    assert [vars(each)["indexer_replay"].forward_index for each in modules] == [1, 1]
    part.end()
    assert part.choices(modules[0], 0) is None


@pytest.mark.parametrize(("changed", "message"), [
    ({"stage": "record"}, "while they are recorded"),
    ({"forward_only": True}, "in passes without gradients"),
    ({"entries": [[*PLACES, [0, 1]]]}, "of another number of positions"),
    ({"entries": [[[0, 1], *PLACES[1:]]]}, "of later positions, of other samples or with gaps"),
    ({"entries": [[*PLACES[:4], [3, 4], *PLACES[5:]]]}, "of other samples"),
    ({"entries": [[*PLACES[:5], [-1, -1], *PLACES[6:]]]}, "with gaps"),
])  # fmt: skip
def test_choices_that_are_refused(
    changed: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, _, capture = _replay(monkeypatch, **{"entries": [PLACES], **changed})

    def read() -> None:
        part.read_last(capture, None)
        part.same(())

    with pytest.raises(CannotShare, match=message):
        read()


def test_layouts_whose_choices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing replays where the stage says so."""
    one, two = (Namespace(size=lambda size=size: size) for size in (1, 2))
    experts = Namespace(num_moe_experts=4, moe_z_loss_coeff=1.0)
    facts = {"groups": Namespace(cp=two, pp=one), "config": experts}
    part, _, capture = _replay(monkeypatch, [PLACES], stage="fallthrough", **facts)
    assert ["context parallelism" in one.text for one in part.refusals()] == [True, False]
    part.read_last(capture, None)
    assert [*part.same(())] == [] and part._numbers is None
    part, _, _ = _replay(monkeypatch, [PLACES])
    assert [*part.refusals()] == []
    part, _, _ = _replay(monkeypatch, [], groups=Namespace(cp=one, pp=two))
    assert ["whose layers choose nothing" in reason.text for reason in part.refusals()] == [True]


def test_last_positions_and_padding_may_have_no_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    part, _, capture = _replay(monkeypatch, [[*PLACES[:3], [-1, -1], *[[-1, -1]] * 4]])
    part.read_last(capture, None)
    assert [*part.same(())] == [] and part._numbers is not None


def test_wrong_choices_of_another_stage_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first stage, which makes the segments, would not know."""
    one, two = (Namespace(size=lambda size=size: size) for size in (1, 2))
    part, _, capture = _replay(monkeypatch, [PLACES], groups=Namespace(cp=one, pp=two))
    part.read_last(capture, None)
    monkeypatch.setattr(replay.dist, "all_reduce", lambda numbers, group: numbers[-1:].add_(1))
    with pytest.raises(CannotShare, match="of later positions"):
        part.same(())


def test_a_position_without_choices_sees_the_first_rows() -> None:
    rows = torch.tensor([7, 8, 9])
    found = _rows_of(torch.tensor([[2, 0, -1], [-1, -1, -1]]), rows)
    assert found.tolist() == [[9, 7, -1], [7, 8, 9]]


@pytest.mark.parametrize("layout", FORMS)
@pytest.mark.parametrize("trainer", ["slime", "miles"])
def test_real_modules(trainer: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = os.environ.get("TRAINER_SOURCES", "")
    if not folder or not (Path(folder) / trainer).is_dir():
        pytest.skip(f"no checkout of {trainer} in a folder that TRAINER_SOURCES names")
    monkeypatch.setattr(sys, "path", [str(Path(folder) / trainer), *sys.path])
    where_missing("ray", "sglang", "wandb", "omegaconf", "httpx", "transformers")
    around = {
        "own sparse": lambda case: real_sparse(trainer),
        SHARED: lambda case: real_sparse(trainer, 2, 1),
    }
    judge._stock.cache_clear()  # of the other trainer's
    with mock.patch.dict(model.AROUND, around):
        judge.check(layout, rows(layout))
    if trainer == "miles" and layout in ("one", "tp2_sp", "pp2"):
        judge._stock.cache_clear()
        with mock.patch.dict(model.AROUND, {SHARED: lambda case: replaying()}):
            judge.check(layout, replayed(layout))
