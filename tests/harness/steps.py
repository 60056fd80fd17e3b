"""Training steps made up for tests: microbatches, losses, and plain autograd as the reference.

The reference knows nothing of schedules: the model on every whole microbatch with Megatron's own
attention, the loss scaled as Megatron's contract says (`forward_step_calc_loss` in
megatron/core/pipeline_parallel/schedules.py), and `.backward()`.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_prefix.lab import numerics
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.tree import Pairs

Microbatch = dict[str, Any]


@dataclass(frozen=True)
class Contract:
    """How a trainer's loss looks.

    Attributes:
        per_token: Megatron's calculate_per_token_loss.
        logits: the model is called without labels.
        scale: factor of grad_scale_func, None for none.
    """

    per_token: bool = False
    logits: bool = False
    scale: float | None = None

    def loss_func(self, batch):
        def loss_func(output):
            nll = _nll(output, batch["labels"]) if self.logits else output
            mask = batch["loss_mask"].to(nll.dtype)
            masked = nll * mask
            loss = (masked * batch["weight"]).sum()
            num_tokens = batch["loss_mask"].sum().to(torch.int32)
            logs = {
                "uid": batch["uid"], "loss": loss.detach().clone(), "sum": masked.sum().detach(),
            }  # fmt: skip
            return loss, num_tokens, logs

        return loss_func

    def step(self, data_iterator, model):
        batch = next(data_iterator)
        labels = None if self.logits else batch["labels"]
        output = model(
            batch["tokens"], batch["position_ids"], None, labels=labels,
            loss_mask=batch["loss_mask"],
        )  # fmt: skip
        return output, self.loss_func(batch)

    def configure(self, model):
        """Sets on the model's config what the trainer would."""
        config = unwrap(model).config
        config.calculate_per_token_loss = self.per_token
        scaler = SimpleNamespace(get_loss_scale=lambda: self.scale)
        scale_loss = MethodType(MegatronOptimizer.scale_loss, scaler)
        config.grad_scale_func = None if self.scale is None else scale_loss


def _nll(logits, labels):
    return -logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def microbatch(rollouts, group, uid, vocab=64):
    """Rollouts of one group as [samples, longest], padded at the end; token weights by `uid`.

    Weights differ by sample and position, so rollouts that share a position want different things
    of it.
    """
    longest = max(len(rollout) for rollout in rollouts)
    draw = np.random.default_rng(uid)

    def rows(name):
        columns = [np.asarray(getattr(rollout, name)).astype(np.int64) for rollout in rollouts]
        padded = [np.pad(column, (0, longest - len(column))) for column in columns]
        return torch.from_numpy(np.stack(padded))

    advantages = draw.choice([-1.0, 1.0], (len(rollouts), 1)) * draw.uniform(0.5, 1.5, (1, longest))
    routes = {}
    if rollouts[0].routes is not None:  # padding goes to any experts, each once
        some = np.arange(rollouts[0].routes.shape[2])
        padded = np.tile(some, (len(rollouts), longest, rollouts[0].routes.shape[1], 1))
        for whole, rollout in zip(padded, rollouts, strict=True):
            whole[: len(rollout)] = rollout.routes
        routes["routes"] = torch.from_numpy(padded)
    return {
        **routes, "tokens": rows("inputs") % vocab, "labels": rows("labels") % vocab,
        "loss_mask": rows("trained").double(),
        "position_ids": torch.arange(longest).expand(len(rollouts), -1),
        "weight": torch.from_numpy(advantages), "group": group, "uid": uid,
    }  # fmt: skip


def pairs_of(item):
    """The samples of a microbatch, padding included."""
    columns = [item[name].cpu().numpy() for name in ("tokens", "labels", "loss_mask")]
    return [Pairs(i, o, m != 0) for i, o, m in zip(*columns, strict=True)]


def routes_of(items):
    """Callbacks that say where the routers are to send the tokens of these microbatches."""
    return Callbacks(routes=lambda call: items[call.microbatch].get("routes"))


def group(seed, num):
    """One group of rollouts with a common prompt, one a microbatch."""
    draw = np.random.default_rng(seed)
    return answers(draw, [draw.integers(0, 60, 12)] * num, 6, 9)


def answers(draw, starts, num, begin, group=0, uid=0):
    """A microbatch for each of `starts`: these tokens, and `num` more; trained from `begin` on."""
    found = []
    for start in starts:
        tokens = np.r_[start, draw.integers(0, 60, num)]
        pairs = Pairs(tokens[:-1], tokens[1:], np.arange(len(tokens) - 1) >= begin)
        found.append(microbatch([pairs], group, uid + len(found)))
    return found


def dealt(rollouts, size, seed=None):
    """Microbatches of `size` rollouts each, in their order or in one that is drawn."""
    if seed is not None:
        rollouts = random.Random(seed).sample(rollouts, len(rollouts))
    starts = range(0, len(rollouts), size)
    return [microbatch(rollouts[start : start + size], 0, start) for start in starts]


def call(schedule, step, model, items, **options):
    """Calls a schedule as a trainer does; `model` may be a list of chunks."""
    chunks = model if isinstance(model, list) else [model]
    several = len(chunks) > 1
    shapes = [item["tokens"].shape for item in items] or [(1, 64)]
    given = dict(
        forward_step_func=step, num_microbatches=len(items), micro_batch_size=shapes[0][0],
        data_iterator=[iter(items) for _ in chunks] if several else iter(items),
        model=chunks if several else model, seq_length=max(length for _, length in shapes),
        forward_only=False,
    )  # fmt: skip
    return schedule(**given | options)


class Result(NamedTuple):
    """What a rank has after a step: the schedule's logs and the gradients."""

    logs: list[Any]
    gradients: dict[str, Tensor]


def run(schedule, step, model, items, **options):
    """A step from zero gradients; of several chunks names of gradients have the chunk's number."""
    chunks = model if isinstance(model, list) else [model]
    for chunk in chunks:
        zero_gradients(chunk)
    logs = call(schedule, step, model, items, **options)
    if len(chunks) == 1:
        return Result(logs, gradients(chunks[0]))
    named = [gradients(chunk).items() for chunk in chunks]
    return Result(logs, {f"{n} {name}": g for n, some in enumerate(named) for name, g in some})


def zero_gradients(model):
    if hasattr(model, "zero_grad_buffer"):
        model.zero_grad_buffer()
    model.zero_grad(set_to_none=True)


def gradients(model):
    """Copies of the summed gradients by parameter name; zeros where there is none."""
    found = {}
    for name, parameter in unwrap(model).named_parameters():
        gradient = parameter.main_grad if hasattr(parameter, "main_grad") else parameter.grad
        found[name] = torch.zeros_like(parameter) if gradient is None else gradient.detach().clone()
    return found


class Reference(NamedTuple):
    """Gradients by plain autograd, the size of the terms that were summed into each, and what the
    loss function logs of every microbatch."""

    gradients: dict[str, Tensor]
    terms: dict[str, float]
    logs: Sequence[Mapping[str, Any]] = ()


def plain(model, contract, items):
    """Every microbatch whole, one after the other, on a model without DDP and without hooks."""
    totals, terms, logs = {}, {}, []
    for item in items:
        output, loss_func = contract.step(iter([item]), model)
        loss, *_, log = loss_func(output)
        logs.append(log)
        model.zero_grad(set_to_none=True)
        (loss / max(int(item["loss_mask"].sum()), 1) / len(items)).backward()
        for name, gradient in gradients(model).items():
            totals[name] = totals.get(name, 0.0) + gradient
            terms[name] = terms.get(name, 0.0) + float(gradient.abs().max())
    model.zero_grad(set_to_none=True)
    return Reference(totals, terms, logs)


def assert_bitwise(found, expected, *, may_vanish=False):
    """Logs and gradients bit for bit; no gradient is all zero unless it may."""
    for log, wanted in zip(found[0], expected[0], strict=True):
        assert log.keys() == wanted.keys() and log["uid"] == wanted["uid"]
        assert all(torch.equal(log[name], wanted[name]) for name in log if name != "uid")
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert torch.equal(found[1][name], gradient), name
        assert gradient.isfinite().all() and (may_vanish or gradient.any()), name


def assert_gradients(found, expected, num_positions, sums=None):
    """Every gradient within the numerics policy, relative to the terms that were summed into it:
    those of a Reference, or its own largest element. `sums` are the model's width and depth; None:
    those that its gradients show.

    Advantages of both signs cancel, fully so where copies of a rollout have opposite ones: what is
    left is rounding of the terms.  Terms that vanish beside the others are held to the policy's
    floor.
    """
    if not isinstance(expected, Reference):
        sizes = {name: float(wanted.abs().max()) for name, wanted in expected.items()}
        expected = Reference(expected, sizes)
    assert found.keys() == expected.gradients.keys()
    dtype = next(iter(found.values())).dtype
    if sums is None:
        layers = (int(n) for name in found for n in re.findall(r"layers\.(\d+)", name))
        widest = max(max(gradient.shape) for gradient in found.values())
        sums = widest, 1 + max(layers, default=0)
    limit = numerics.tolerance(dtype, num_positions, *sums)
    floor = numerics.FLOOR * max(expected.terms.values())
    for name, wanted in expected.gradients.items():
        size = max(expected.terms[name], floor)
        error = float((found[name] - wanted).abs().max())
        assert found[name].isfinite().all() and wanted.isfinite().all(), name
        assert error <= limit * size, f"{name}: {error:.3e} of {size:.3e} exceeds {limit:.1e}"
