"""The trainer's losses on joined outputs, and the cotangents they send back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from megatron_prefix.run.batch import TensorBatchAdapter
from torch import Tensor

from megatron_prefix.numerics import assert_close
from megatron_prefix.plan.planner import make_plan
from megatron_prefix.run.losses import LossContract, Scorer
from megatron_prefix.run.step import Step
from megatron_prefix.tree import Pairs, TreeOptions, build
from tests.harness import ranks  # noqa: F401  # applies the CPU platform
from tests.harness.trees import rollout_sets, tree_options


class Hooks:
    """Answers the model's calls, as the real ones do."""

    answer: Tensor | None = None

    @contextlib.contextmanager
    def answering(self, output: Tensor) -> Iterator[None]:
        self.answer = output
        yield
        self.answer = None


def config(**fields: Any) -> SimpleNamespace:
    known = dict(timers=None, grad_scale_func=None, calculate_per_token_loss=False)
    return SimpleNamespace(**{**known, "num_moe_experts": None, "mtp_num_layers": None, **fields})


Logs = Callable[[Tensor, dict[str, Any]], Any]


class Job:
    """A step whose segments' outputs are a table of values by (position, input, label)."""

    def __init__(
        self,
        rollouts: Sequence[Pairs],
        groups: Sequence[int],
        microbatch_of: Sequence[int],
        options: TreeOptions,
        loss: Logs,
        **fields: Any,
    ) -> None:
        self.forest = build(rollouts, groups, options)
        self.items = [
            as_item([r for r, o in zip(rollouts, microbatch_of, strict=True) if o == m], m)
            for m in range(max(microbatch_of) + 1)
        ]
        self.rollouts = [p for item in self.items for p in TensorBatchAdapter().pairs(item)]
        self.step = Step(self.forest, tuple(microbatch_of), self.items, self.rollouts)
        self.hooks, self.seen, self.config = Hooks(), [], config(**fields)
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(64, generator=generator, dtype=torch.float64, requires_grad=True)

        def forward_step(iterator: Iterator[Any], model: Any) -> Any:
            batch = next(iterator)
            self.seen.append(batch)
            return self.hooks.answer, lambda output: loss(output, batch)

        contract = LossContract(forward_step, self.config, 1, False)
        model: Any = SimpleNamespace()
        self.scorer = Scorer(self.step, contract, TensorBatchAdapter(), model, self.hooks)  # type: ignore[arg-type]

    def values(self, rollout: int, start: int, stop: int) -> Tensor:
        """The model's output of some positions of a rollout, [stop - start]."""
        pairs = self.rollouts[rollout]
        codes = pairs.inputs * 5 + pairs.labels * 3 + np.arange(len(pairs))
        return self.table[torch.from_numpy(codes[start:stop] % 64)]

    def output(self, index: int) -> Tensor:
        """A segment's output [1, rows], NaN where rows pad."""
        parts = []
        for span in self.forest.segments[index].spans:
            parts.append(self.values(span.rollouts[0], span.start, span.end))
            parts.append(
                torch.full((span.padded - span.length,), float("nan"), dtype=torch.float64)
            )
        return torch.cat(parts)[None]

    def run(self) -> Tensor | None:
        """Forwards and backwards in the planner's order; the table's gradient."""
        outputs = {}
        for action in make_plan(self.forest, microbatches=self.step.microbatch_of).programs[0]:
            index = action.segment
            scored = self.forest.segments[index].scored
            if action.kind == "F" and scored:
                outputs[index] = self.output(index)
                self.scorer.take(index, outputs[index], differentiable=True)
            elif scored:
                outputs.pop(index).backward(self.scorer.cotangent(index))
            if action.kind == "B":
                self.scorer.release(index)
        return self.table.grad


def as_item(rollouts: Sequence[Pairs], uid: int) -> dict[str, Any]:
    longest = max(map(len, rollouts))

    def rows(name: str) -> Tensor:
        columns = [np.asarray(getattr(r, name)).astype(np.int64) for r in rollouts]
        return torch.from_numpy(np.stack([np.pad(c, (0, longest - len(c))) for c in columns]))

    mask = rows("trained").double()
    return {"tokens": rows("inputs"), "labels": rows("labels"), "loss_mask": mask, "uid": uid}


def padded(rollouts: Sequence[Pairs], microbatch_of: Sequence[int]) -> list[Pairs]:
    """The rollouts as a trainer's padded microbatches hold them."""
    found = []
    for microbatch in range(max(microbatch_of) + 1):
        members = [r for r, o in zip(rollouts, microbatch_of, strict=True) if o == microbatch]
        found += TensorBatchAdapter().pairs(as_item(members, microbatch))
    return found


def squared(output: Tensor, batch: dict[str, Any]) -> Any:
    """A loss that is not linear in the outputs and differs by microbatch."""
    mask = batch["loss_mask"]
    loss = ((output * mask).sum(1) ** 2).sum() * (batch["uid"] + 1) * 0.1
    return loss, mask.sum().to(torch.int32), {"uid": batch["uid"], "loss": loss.detach().clone()}


@given(sets=rollout_sets(), options=tree_options())
def test_losses_and_cotangents_are_those_of_whole_rollouts(
    sets: tuple[list[Pairs], list[int]], options: TreeOptions
) -> None:
    rollouts, groups = sets
    order = sorted(range(len(rollouts)), key=lambda i: groups[i])
    microbatch_of, groups = [i // 2 for i in range(len(rollouts))], [groups[i] for i in order]
    rollouts = padded([rollouts[i] for i in order], microbatch_of)
    job = Job(rollouts, groups, microbatch_of, options, squared)
    found = job.run()
    logs = job.scorer.forward_data_store

    total, num_tokens = torch.zeros((), dtype=torch.float64), 0
    table = job.table.detach().requires_grad_()
    job.table = table
    for microbatch, item in enumerate(job.items):
        members = [r for r, o in enumerate(microbatch_of) if o == microbatch]
        whole = torch.stack([job.values(r, 0, len(rollouts[r])) for r in members])
        loss, count, log = squared(whole, item)
        assert logs[microbatch]["uid"] == microbatch
        assert_close(logs[microbatch]["loss"], log["loss"], 100)
        total = total + loss / count.clamp(min=1) / len(job.items)
        num_tokens += int(count)
    total.backward()
    assert int(job.scorer.num_tokens) == num_tokens
    expected = table.grad if num_tokens else torch.zeros_like(table)
    if found is None or not expected.abs().max():
        assert not num_tokens or not expected.abs().max()
        return
    assert_close(found, expected, 100)


def two(first: int, trained: Sequence[int], **fields: Any) -> Job:
    """Two rollouts that share `first` positions of ten, trained from `trained` on."""
    rollouts = []
    for number, begin in enumerate(trained):
        tokens = np.array([*range(first), *[20 + number] * (10 - first)])
        rollouts.append(Pairs(tokens, tokens, np.arange(10) >= begin))
    loss = fields.pop("loss", squared)
    return Job(rollouts, [0, 0], [0, 1], TreeOptions(min_gain=0), loss, **fields)


def test_the_trainer_sees_its_microbatch_without_the_positions_in_front() -> None:
    job = two(6, [7, 8])
    job.run()
    assert [batch["uid"] for batch in job.seen] == [0, 1]
    for batch, item in zip(job.seen, job.items, strict=True):
        for name in ("tokens", "labels", "loss_mask"):
            assert torch.equal(batch[name], item[name][:, 6:])


def test_loss_in_a_shared_segment_keeps_that_segment() -> None:
    job = two(6, [4, 8])
    job.run()
    assert [batch["tokens"].shape[1] for batch in job.seen] == [10, 4]


def test_the_store_is_in_the_order_of_microbatches_and_not_of_segments() -> None:
    rollouts = [Pairs(np.array([n, n]), np.array([n, n]), np.ones(2, bool)) for n in (1, 2, 1)]
    job = Job(rollouts, [0, 1, 0], [0, 1, 2], TreeOptions(min_gain=0), squared)
    job.run()
    assert [batch["uid"] for batch in job.seen] == [0, 2, 1]
    assert [log["uid"] for log in job.scorer.forward_data_store] == [0, 1, 2]


@pytest.mark.parametrize(
    ("triple", "per_token", "scale", "factor"),
    [
        (True, False, None, 1 / (2 * 3)),
        (True, True, None, 1.0),
        (False, False, None, 1 / 2),
        (False, True, None, 1 / 2),
        (True, False, 64.0, 64 / (2 * 3)),
        (False, False, 64.0, 64 / 2),
    ],
)
def test_losses_are_scaled_by_megatrons_contract(
    triple: bool, per_token: bool, scale: float | None, factor: float
) -> None:
    def loss(output: Tensor, batch: dict[str, Any]) -> Any:
        total = (output * batch["loss_mask"]).sum()
        return (total, torch.tensor(3, dtype=torch.int32), "log") if triple else (total, "log")

    scaled = None if scale is None else lambda value: value * scale
    fields = dict(loss=loss, calculate_per_token_loss=per_token, grad_scale_func=scaled)
    twin = two(6, [6, 6])
    sum(twin.values(rollout, 6, 10).sum() for rollout in range(2)).backward()  # type: ignore[union-attr]
    job = two(6, [6, 6], **fields)
    assert_close(job.run(), twin.table.grad * factor, 10)  # type: ignore[arg-type, operator]
    assert int(job.scorer.num_tokens) == (6 if triple else 0)
    assert job.scorer.forward_data_store == ["log", "log"]


def test_no_loss_for_a_segment_gives_zeros() -> None:
    def loss(output: Tensor, batch: dict[str, Any]) -> Any:
        return torch.zeros((), dtype=torch.float64), {}  # does not depend on the output

    job = two(6, [6, 6], loss=loss)
    gradient = job.run()
    assert gradient is not None and (gradient == 0).all()


def test_without_gradients_nothing_is_differentiable() -> None:
    job = two(6, [6, 6])
    with torch.no_grad():
        for index, segment in enumerate(job.forest.segments):
            if segment.scored:
                job.scorer.take(index, job.output(index), differentiable=False)
    assert len(job.scorer.forward_data_store) == 2
    assert not job.scorer._losses and not any(x.requires_grad for x in job.scorer._leaves.values())


def test_a_released_segment_is_gone() -> None:
    job = two(6, [6, 6])
    job.run()
    assert not job.scorer._leaves and not job.scorer._rows and not job.scorer._losses
