"""The trainer's losses on joined outputs, and the cotangents they send back."""

import gc
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

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


def config(**fields):
    known = dict(timers=None, grad_scale_func=None, calculate_per_token_loss=False)
    return SimpleNamespace(**{**known, "num_moe_experts": None, "mtp_num_layers": None, **fields})


class Paused:
    """A suspended forward step."""

    twice = None

    def __init__(self, job, item, loss):
        self._job, self._item, self._loss = job, item, loss

    def resume(self, answer):
        output = answer()
        self._job.seen.append((self._item["uid"], output))

        def loss(value):
            found = self._loss(value, self._item)
            self._job.made.add(found[0])
            return found

        return output, loss


class Job:
    """A step whose segments' outputs are a table of values by (position, input, label)."""

    def __init__(self, rollouts, groups, microbatch_of, options, loss, **fields):
        self.forest = build(rollouts, groups, options)
        self.items = [
            as_item([r for r, o in zip(rollouts, microbatch_of, strict=True) if o == m], m)
            for m in range(max(microbatch_of) + 1)
        ]
        self.rollouts = [p for item in self.items for p in steps.pairs_of(item)]
        packed = (False,) * len(self.items)
        self.step = Step(self.forest, tuple(microbatch_of), packed, self.rollouts)
        self.seen = []
        self.made = Storages()
        """Outputs of segments, and losses."""
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(64, generator=generator, dtype=torch.float64, requires_grad=True)
        self.shape = fields.pop("shape", lambda output: output)
        model = SimpleNamespace(parameters=lambda: iter(()))
        contract = LossContract(config(**fields), 1, False)
        paused = [Paused(self, item, loss) for item in self.items]
        self.losses = Losses(self.step, contract, model, paused)

    def values(self, rollout, start, stop):
        """The model's output of some positions of a rollout, [stop - start]."""
        pairs = self.rollouts[rollout]
        codes = pairs.inputs * 5 + pairs.labels * 3 + np.arange(len(pairs))
        return self.table[torch.from_numpy(codes[start:stop] % 64)]

    def output(self, index):
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

    def left(self):
        """How many outputs and losses something still refers to, but for what the trainer got."""
        self.seen.clear()
        gc.collect()
        return self.made.num_alive

    def run(self):
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

    def actions(self):
        """What `run` does."""
        return make_plan(self.forest, microbatches=self.step.microbatch_of).actions_of(0, 0)

    def forward(self):
        """Forwards only, each segment released as soon as the plan says."""
        with torch.no_grad():
            for action in make_plan(self.forest, microbatches=self.step.microbatch_of).programs[0]:
                index = action.segment
                if action.kind == "F" and self.forest.segments[index].scored:
                    self.losses.take(index, self.output(index), differentiable=False)
                if action.kind == "B":
                    self.losses.release(index)


def as_item(rollouts, uid):
    longest = max(map(len, rollouts))

    def rows(name):
        columns = [np.asarray(getattr(r, name)).astype(np.int64) for r in rollouts]
        return torch.from_numpy(np.stack([np.pad(c, (0, longest - len(c))) for c in columns]))

    mask = rows("trained").double()
    return {"tokens": rows("inputs"), "labels": rows("labels"), "loss_mask": mask, "uid": uid}


def squared(output, batch):
    """A loss that is not linear in the outputs and differs by microbatch."""
    mask = batch["loss_mask"]
    loss = ((output * mask).sum(1) ** 2).sum() * (batch["uid"] + 1) * 0.1
    return loss, mask.sum().to(torch.int32), {"uid": batch["uid"], "loss": loss.detach().clone()}


def two(first, trained, **fields):
    """Two rollouts that share `first` positions of ten, trained from `trained` on."""
    rollouts = []
    for number, begin in enumerate(trained):
        tokens = np.array([*range(first), *[20 + number] * (10 - first)])
        rollouts.append(Pairs(tokens, tokens, np.arange(10) >= begin))
    loss = fields.pop("loss", squared)
    return Job(rollouts, [0, 0], [0, 1], TreeOptions(min_gain=0), loss, **fields)


def test_the_trainer_sees_its_microbatch_with_zeros_before_loss():
    job = two(6, [7, 8])
    job.run()
    assert [uid for uid, _ in job.seen] == [0, 1]
    for uid, output in job.seen:
        assert output.shape == (1, 10) and (output[:, :6] == 0).all()
        assert_close(output[0, 6:], job.values(uid, 6, 10).detach(), 10)


def of_three(segment_tokens):
    """The first and the third are equal; in segments of two positions a wave each, else in one."""
    rollouts = [Pairs(np.array([n, n]), np.array([n, n]), np.ones(2, bool)) for n in (1, 2, 1)]
    options = TreeOptions(min_gain=0, segment_tokens=segment_tokens)
    return Job(rollouts, [0, 1, 0], [0, 1, 2], options, squared)


@pytest.mark.parametrize(("segment_tokens", "called"), [(2, [0, 2, 1]), (0, [0, 1, 2])])
def test_the_store_is_in_microbatch_order_not_segment_order(segment_tokens, called):
    job = of_three(segment_tokens)
    assert len(job.forest.segments) == (2 if segment_tokens else 1)
    job.run()
    assert [uid for uid, _ in job.seen] == called  # the first backward needs both losses
    assert are_in_order(job.step, job.actions()) == (called == [0, 1, 2])
    assert [log["uid"] for log in job.losses.forward_data_store] == [0, 1, 2]


@pytest.mark.parametrize("segment_tokens", [2, 0])
def test_without_gradients_losses_keep_the_trainers_order(segment_tokens):
    """Who collects results call by call would get them permuted."""
    job = of_three(segment_tokens)
    job.forward()
    assert [uid for uid, _ in job.seen] == [0, 1, 2]
    for uid, output in job.seen:
        assert_close(output[0], job.values(uid, 0, 2).detach(), 10)
    assert job.left() == 0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(()), r"returns a tensor of shape .* positions"),
        (torch.zeros(3, 7), r"returns a tensor of shape .* positions"),
        (SimpleNamespace(nll=torch.zeros(1, 10)), "returns a SimpleNamespace, in which"),
    ],
)
def test_an_output_that_is_not_per_position_is_refused(value, message):
    job = two(6, [0, 0], shape=lambda output: (output, value))
    job.forward()
    assert re.search(message, str(job.losses.problem()))


@pytest.mark.parametrize("looks", [1e-9, 0.0])
def test_a_gradient_of_uncomputed_positions_is_an_error(looks):
    """However small."""

    def loss(output, batch):
        mask = batch["loss_mask"]
        return (output * (mask + looks * (1 - mask))).sum(), torch.tensor(1, dtype=torch.int32), {}

    job = two(6, [7, 8], loss=loss)
    job.run()
    if looks:
        assert "positions without loss, which were not" in str(job.losses.problem())
    else:
        assert job.losses.problem() is None


def test_logits_of_one_microbatch_at_a_time():
    """The next one begins when nothing holds the one before, nor what its loss has saved."""
    rollouts = [Pairs(np.array([1, 2, n]), np.array([1, 2, n]), np.ones(3, bool)) for n in range(4)]
    before, jobs = Storages(), list[Job]()

    def loss(output, batch):
        jobs[0].seen.clear()
        assert not before.num_alive
        saved = output.exp()
        before.add(output)
        before.add(saved)
        return (saved * saved).sum(), torch.tensor(1, dtype=torch.int32), {}

    def logits(output):
        return output[..., None] * torch.arange(1.0, 4.0, dtype=torch.float64)

    job = Job(rollouts, [0] * 4, [0, 1, 2, 3], TreeOptions(min_gain=0), loss, shape=logits)
    jobs.append(job)
    assert [len(s.spans) for s in job.forest.segments] == [1, 4]
    found = job.run()
    assert len(before.seen) == 8
    twin = job.table.detach().requires_grad_()
    job.table = twin
    whole = sum((logits(job.values(n, 0, 3)[None]).exp() ** 2).sum() for n in range(4))
    (whole / 4).backward()
    assert_close(found, twin.grad, 10)


def as_logits(output):
    """[1, positions, vocabulary]."""
    return output[..., None] * torch.ones(3, dtype=output.dtype)


def long(read):
    """Logits of two rollouts of 2,500 positions, of which the last 100 carry loss; the loss of the
    second looks at one position more."""

    def loss(output, batch):
        total = (output * batch["loss_mask"][..., None]).sum()
        if read is not None and batch["uid"] == 1:
            total = total + 1e-9 * output[0, read, 2]
        return total, torch.tensor(1, dtype=torch.int32), {}

    tokens = [np.r_[np.arange(2400), np.full(100, 3000 + number)] for number in range(2)]
    rollouts = [Pairs(one, one, np.arange(2500) >= 2400) for one in tokens]
    options = TreeOptions(min_gain=0)
    return Job(rollouts, [0, 0], [0, 1], options, loss, shape=as_logits)


@pytest.mark.parametrize("read", [0, CHECKED_ROWS, 2399])
def test_a_gradient_of_any_part_of_the_masked_logits_is_an_error(read):
    """They are looked at `CHECKED_ROWS` at a time."""
    job = long(read)
    job.run()
    assert "positions without loss, which were not" in str(job.losses.problem())


@pytest.mark.parametrize("read", [None, 2400])
def test_masked_logits_without_a_gradient_are_no_error(read):
    job = long(read)
    job.run()
    assert job.losses.problem() is None
