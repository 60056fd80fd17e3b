"""The trainer's losses on joined outputs, and the cotangents they send back."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.plan.planner import make_plan
from megatron_prefix.run.execute.call_outputs import CHECKED_ROWS
from megatron_prefix.run.execute.losses import LossContract, Losses, are_in_order
from megatron_prefix.run.read.step import Step
from megatron_prefix.tree import Pairs, TreeOptions, build
from tests.harness import (
    ranks,  # noqa: F401  # applies the CPU platform
    steps,
)
from tests.harness.arenas import Storages
from tests.harness.trees import rollout_sets, tree_options


def config(**fields: Any) -> SimpleNamespace:
    known = dict(timers=None, grad_scale_func=None, calculate_per_token_loss=False)
    return SimpleNamespace(**{**known, "num_moe_experts": None, "mtp_num_layers": None, **fields})


Logs = Callable[[Tensor, dict[str, Any]], Any]


class Paused:
    """A suspended forward step."""

    twice = None

    def __init__(self, job: Job, item: dict[str, Any], loss: Logs) -> None:
        self._job, self._item, self._loss = job, item, loss

    def resume(self, answer: Callable[[], Any]) -> Any:
        output = answer()
        self._job.seen.append((self._item["uid"], output))

        def loss(value: Tensor) -> Any:
            found = self._loss(value, self._item)
            self._job.made.add(found[0])
            return found

        return output, loss


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
        self.rollouts = [p for item in self.items for p in steps.pairs_of(item)]
        packed = (False,) * len(self.items)
        self.step = Step(self.forest, tuple(microbatch_of), packed, self.rollouts)
        self.seen: list[tuple[int, Any]] = []
        self.made = Storages()
        """Outputs of segments, and losses."""
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(64, generator=generator, dtype=torch.float64, requires_grad=True)
        self.shape = fields.pop("shape", lambda output: output)
        model: Any = SimpleNamespace(parameters=lambda: iter(()))
        contract = LossContract(config(**fields), 1, False)
        paused: Any = [Paused(self, item, loss) for item in self.items]
        self.losses = Losses(self.step, contract, model, paused)

    def values(self, rollout: int, start: int, stop: int) -> Tensor:
        """The model's output of some positions of a rollout, [stop - start]."""
        pairs = self.rollouts[rollout]
        codes = pairs.inputs * 5 + pairs.labels * 3 + np.arange(len(pairs))
        return self.table[torch.from_numpy(codes[start:stop] % 64)]

    def output(self, index: int) -> Any:
        """A segment's output [1, positions], NaN where a span pads, in the form of `shape`."""
        parts = []
        for span in self.forest.segments[index].spans:
            parts.append(self.values(span.rollouts[0], span.start, span.end))
            parts.append(
                torch.full((span.padded - span.length,), float("nan"), dtype=torch.float64)
            )
        row = torch.cat(parts)[None]
        self.made.add(row)
        return self.shape(row)

    def left(self) -> int:
        """How many outputs and losses something still refers to, but for what the trainer got."""
        self.seen.clear()
        gc.collect()
        return self.made.num_alive

    def run(self) -> Tensor | None:
        """Forwards and backwards in the planner's order; the table's gradient."""
        outputs = {}
        for action in make_plan(self.forest, microbatches=self.step.microbatch_of).programs[0]:
            index = action.segment
            scored = self.forest.segments[index].scored
            if action.kind == "F" and scored:
                outputs[index] = self.output(index)
                self.losses.take(index, outputs[index], differentiable=True)
            elif scored:
                self.losses.complete(index)
                tensors, sent = self.losses.outputs.gradients(index, outputs.pop(index))
                torch.autograd.backward(tensors, sent)
            if action.kind == "B":
                self.losses.release(index)
        return self.table.grad

    def actions(self) -> list[tuple[str, int]]:
        """What `run` does."""
        return make_plan(self.forest, microbatches=self.step.microbatch_of).actions_of(0, 0)

    def forward(self) -> None:
        """Forwards only, each segment released as soon as the plan says."""
        with torch.no_grad():
            for action in make_plan(self.forest, microbatches=self.step.microbatch_of).programs[0]:
                index = action.segment
                if action.kind == "F" and self.forest.segments[index].scored:
                    self.losses.take(index, self.output(index), differentiable=False)
                if action.kind == "B":
                    self.losses.release(index)


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
        found += steps.pairs_of(as_item(members, microbatch))
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
    logs = job.losses.forward_data_store
    called = [uid for uid, _ in job.seen]
    assert are_in_order(job.step, job.actions()) == (called == sorted(called))

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
    assert int(job.losses.num_tokens) == num_tokens
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


def test_the_trainer_sees_its_microbatch_with_zeros_before_loss() -> None:
    job = two(6, [7, 8])
    job.run()
    assert [uid for uid, _ in job.seen] == [0, 1]
    for uid, output in job.seen:
        assert output.shape == (1, 10) and (output[:, :6] == 0).all()
        assert_close(output[0, 6:], job.values(uid, 6, 10).detach(), 10)


def test_loss_in_a_shared_segment_computes_that_segment() -> None:
    job = two(6, [4, 8])
    job.run()
    assert [bool((output != 0).all()) for _, output in job.seen] == [True, True]


def test_a_lossless_segment_between_two_others_keeps_its_place() -> None:
    """The first four positions carry loss for one sample, the next four for none."""
    tokens = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    other = np.array([1, 2, 3, 4, 50, 51, 52, 53, 54, 55])
    third = np.array([1, 2, 3, 4, 5, 6, 7, 8, 60, 61])
    begins = [(tokens, 8), (other, 2), (third, 8)]
    rollouts = [Pairs(t, t, np.arange(10) >= begin) for t, begin in begins]
    job = Job(rollouts, [0] * 3, [0, 1, 2], TreeOptions(min_gain=0), squared)
    job.run()
    outputs = dict(job.seen)
    for uid, start in ((0, 8), (2, 8)):
        assert_close(outputs[uid][0, :4], job.values(uid, 0, 4).detach(), 10)
        assert (outputs[uid][0, 4:start] == 0).all()
        assert_close(outputs[uid][0, start:], job.values(uid, start, 10).detach(), 10)


def of_three(segment_tokens: int) -> Job:
    """The first and the third are equal; in segments of two positions a wave each, else in one."""
    rollouts = [Pairs(np.array([n, n]), np.array([n, n]), np.ones(2, bool)) for n in (1, 2, 1)]
    options = TreeOptions(min_gain=0, segment_tokens=segment_tokens)
    return Job(rollouts, [0, 1, 0], [0, 1, 2], options, squared)


@pytest.mark.parametrize(("segment_tokens", "called"), [(2, [0, 2, 1]), (0, [0, 1, 2])])
def test_the_store_is_in_microbatch_order_not_segment_order(
    segment_tokens: int, called: list[int]
) -> None:
    job = of_three(segment_tokens)
    assert len(job.forest.segments) == (2 if segment_tokens else 1)
    job.run()
    assert [uid for uid, _ in job.seen] == called  # the first backward needs both losses
    assert are_in_order(job.step, job.actions()) == (called == [0, 1, 2])
    assert [log["uid"] for log in job.losses.forward_data_store] == [0, 1, 2]


@pytest.mark.parametrize("segment_tokens", [2, 0])
def test_without_gradients_losses_keep_the_trainers_order(segment_tokens: int) -> None:
    """Who collects results call by call would get them permuted."""
    job = of_three(segment_tokens)
    job.forward()
    assert [uid for uid, _ in job.seen] == [0, 1, 2]
    for uid, output in job.seen:
        assert_close(output[0], job.values(uid, 0, 2).detach(), 10)
    assert job.left() == 0


def test_answers_are_memory_of_their_own() -> None:
    """Trainers divide logits in place; copies of a rollout would see it twice."""
    tokens = np.arange(5)
    rollouts = [Pairs(tokens, tokens, np.ones(5, bool))] * 2

    def halved(output: Tensor, batch: dict[str, Any]) -> Any:
        output.div_(2.0)
        return output.sum(), torch.tensor(1, dtype=torch.int32), output.detach().clone()

    job = Job(rollouts, [0, 0], [0, 1], TreeOptions(min_gain=0), halved)
    job.forward()
    wanted = job.values(0, 0, 5).detach() / 2
    for log in job.losses.forward_data_store:
        assert_close(log[0], wanted, 5)


def test_outputs_may_be_trees_in_either_order_of_dimensions() -> None:
    def shape(output: Tensor) -> Any:
        states = output.t()[..., None] * torch.ones(3)
        return {"nll": output, "states": states, "flat": 2 * output[0], "none": None}

    def loss(output: Any, batch: dict[str, Any]) -> Any:
        assert output["none"] is None and output["states"].shape == (10, 1, 3)
        assert output["flat"].shape == (10,)
        total = output["nll"].sum() + (output["states"] ** 2).sum() + output["flat"].sum()
        return total, torch.tensor(1, dtype=torch.int32), total.detach()

    job = two(6, [0, 0], loss=loss, shape=shape)
    found = job.run()
    table = job.table.detach().requires_grad_()
    job.table = table
    whole = [job.values(rollout, 0, 10) for rollout in range(2)]
    (sum(3 * one.sum() + 3 * (one**2).sum() for one in whole) / 2).backward()  # type: ignore[union-attr]
    assert_close(found, table.grad, 10)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(()), r"returns a tensor of shape .* positions"),
        (torch.zeros(3, 7), r"returns a tensor of shape .* positions"),
        (SimpleNamespace(nll=torch.zeros(1, 10)), "returns a SimpleNamespace, in which"),
    ],
)
def test_an_output_that_is_not_per_position_is_refused(value: Any, message: str) -> None:
    job = two(6, [0, 0], shape=lambda output: (output, value))
    job.forward()
    assert re.search(message, str(job.losses.problem()))


def test_an_output_without_a_batch_is_refused_for_several_rows() -> None:
    rollouts = [Pairs(np.arange(n, n + 5), np.arange(5), np.ones(5, bool)) for n in range(2)]
    job = Job(rollouts, [0, 0], [0, 0], TreeOptions(min_gain=0), squared, shape=lambda o: o[0])
    job.forward()
    assert "for 2 rows, whose order" in str(job.losses.problem())


def test_plain_values_of_an_output_are_the_same_for_all_segments() -> None:
    def shape(output: Tensor) -> Any:
        return {"nll": output, "total": float(output.detach().nansum()), "name": "x"}

    job = two(6, [0, 0], shape=shape)
    job.forward()
    assert "must be the same for all" in str(job.losses.problem())
    job = two(6, [0, 0], shape=lambda output: {"nll": output, "name": "x"}, loss=named)
    job.forward()
    assert [output["name"] for _, output in job.seen] == ["x", "x"]


def named(output: Any, batch: dict[str, Any]) -> Any:
    return output["nll"].sum(), torch.tensor(1, dtype=torch.int32), {}


def test_one_position_does_not_fix_the_order_of_dimensions() -> None:
    def shape(output: Tensor) -> Tensor:
        return output.t()[..., None]  # [positions, 1, 1]

    def loss(output: Tensor, batch: dict[str, Any]) -> Any:
        assert output.shape == (10, 1, 1)
        return output.sum(), torch.tensor(1, dtype=torch.int32), {}

    two(1, [0, 0], shape=shape, loss=loss).forward()


@pytest.mark.parametrize("looks", [1.0, 1e-9, 0.0])
def test_a_gradient_of_uncomputed_positions_is_an_error(looks: float) -> None:
    """However small."""

    def loss(output: Tensor, batch: dict[str, Any]) -> Any:
        mask = batch["loss_mask"]
        return (output * (mask + looks * (1 - mask))).sum(), torch.tensor(1, dtype=torch.int32), {}

    job = two(6, [7, 8], loss=loss)
    job.run()
    if looks:
        assert "positions without loss, which were not" in str(job.losses.problem())
    else:
        assert job.losses.problem() is None


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
    assert int(job.losses.num_tokens) == (6 if triple else 0)
    assert job.losses.forward_data_store == ["log", "log"]


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
                job.losses.take(index, job.output(index), differentiable=False)
    assert len(job.losses.forward_data_store) == len(job.seen) == 2
    assert not any(output.requires_grad for _, output in job.seen)


def test_logits_of_one_microbatch_at_a_time() -> None:
    """The next one begins when nothing holds the one before, nor what its loss has saved."""
    rollouts = [Pairs(np.array([1, 2, n]), np.array([1, 2, n]), np.ones(3, bool)) for n in range(4)]
    before, jobs = Storages(), list[Job]()

    def loss(output: Tensor, batch: dict[str, Any]) -> Any:
        jobs[0].seen.clear()
        assert not before.num_alive
        saved = output.exp()
        before.add(output)
        before.add(saved)
        return (saved * saved).sum(), torch.tensor(1, dtype=torch.int32), {}

    def logits(output: Tensor) -> Tensor:
        return output[..., None] * torch.arange(1.0, 4.0, dtype=torch.float64)

    job = Job(rollouts, [0] * 4, [0, 1, 2, 3], TreeOptions(min_gain=0), loss, shape=logits)
    jobs.append(job)
    assert [len(s.spans) for s in job.forest.segments] == [1, 4]
    found = job.run()
    assert len(before.seen) == 8
    twin = job.table.detach().requires_grad_()
    job.table = twin
    whole = sum((logits(job.values(n, 0, 3)[None]).exp() ** 2).sum() for n in range(4))
    (whole / 4).backward()  # type: ignore[union-attr]
    assert_close(found, twin.grad, 10)  # type: ignore[arg-type]


def test_a_released_segment_is_gone() -> None:
    job = two(6, [6, 6])
    job.run()
    assert job.made.seen and job.left() == 0


def as_logits(output: Tensor) -> Tensor:
    """[1, positions, vocabulary]."""
    return output[..., None] * torch.ones(3, dtype=output.dtype)


def long(read: int | None) -> Job:
    """Logits of two rollouts of 2,500 positions, of which the last 100 carry loss; the loss of the
    second looks at one position more."""

    def loss(output: Tensor, batch: dict[str, Any]) -> Any:
        total = (output * batch["loss_mask"][..., None]).sum()
        if read is not None and batch["uid"] == 1:
            total = total + 1e-9 * output[0, read, 2]
        return total, torch.tensor(1, dtype=torch.int32), {}

    tokens = [np.r_[np.arange(2400), np.full(100, 3000 + number)] for number in range(2)]
    rollouts = [Pairs(one, one, np.arange(2500) >= 2400) for one in tokens]
    options = TreeOptions(min_gain=0)
    return Job(rollouts, [0, 0], [0, 1], options, loss, shape=as_logits)


@pytest.mark.parametrize("read", [0, CHECKED_ROWS - 1, CHECKED_ROWS, 2 * CHECKED_ROWS, 2399])
def test_a_gradient_of_any_part_of_the_masked_logits_is_an_error(read: int) -> None:
    """They are looked at `CHECKED_ROWS` at a time."""
    job = long(read)
    job.run()
    assert "positions without loss, which were not" in str(job.losses.problem())


@pytest.mark.parametrize("read", [None, 2400, 2499])
def test_masked_logits_without_a_gradient_are_no_error(read: int | None) -> None:
    job = long(read)
    job.run()
    assert job.losses.problem() is None


def test_one_position_behind_many_does_not_fix_the_order_either() -> None:
    """One rollout is another's beginning: the rest of that one is a segment of one position."""
    tokens = np.arange(10)
    rollouts = [Pairs(tokens[:n], tokens[:n], np.ones(n, bool)) for n in (9, 10)]

    def shape(output: Tensor) -> Tensor:
        return output.t()[..., None]  # [positions, 1, 1]

    def loss(output: Tensor, batch: dict[str, Any]) -> Any:
        assert output.shape == (9 + batch["uid"], 1, 1)
        return output.sum(), torch.tensor(1, dtype=torch.int32), {}

    job = Job(rollouts, [0, 0], [0, 1], TreeOptions(min_gain=0), loss, shape=shape)
    assert [sum(s.padded for s in one.spans) for one in job.forest.segments] == [9, 1]
    found = job.run()
    twin = Job(rollouts, [0, 0], [0, 1], TreeOptions(min_gain=0), loss)
    (sum(twin.values(n, 0, 9 + n).sum() for n in range(2)) / 2).backward()  # type: ignore[union-attr]
    assert_close(found, twin.table.grad, 10)  # type: ignore[arg-type]
