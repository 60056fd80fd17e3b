"""Stock and prefix schedule on the same update: a snapshot to go back to, and a verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_prefix import numerics
from megatron_prefix.models.build import unwrap


def named_parameters(chunks: list[Any]) -> Iterator[tuple[str, Any]]:
    """The parameters of this rank, named by chunk."""
    for number, chunk in enumerate(chunks):
        for name, parameter in unwrap(chunk).named_parameters():
            yield f"{number}.{name}", parameter


class Snapshot:
    """Weights and optimizer state of one rank, copied to host memory.

    Copies tensors, not state dicts: so it serves every optimizer of Megatron's, the distributed one
    and those with fp32 main parameters included, and going back is exact.
    """

    def __init__(self, chunks: list[Any], optimizer: Any) -> None:
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._inner = [o.optimizer for o in _optimizers(optimizer) if o.optimizer is not None]
        self._had_state: set[int] = set()
        for _, parameter in named_parameters(chunks):
            self._keep(parameter.data)
        for inner in self._inner:
            for group in inner.param_groups:
                self._groups.append((group, {n: v for n, v in group.items() if n != "params"}))
                for parameter in group["params"]:
                    self._keep(parameter.data)
                    state = inner.state.get(parameter)
                    if state:
                        self._had_state.add(id(parameter))
                        for value in state.values():
                            self._keep(value)

    def _keep(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._tensors.append((value, value.detach().to("cpu", copy=True)))

    @torch.no_grad()
    def restore(self) -> None:
        """Makes weights and optimizer what they were."""
        for tensor, copy in self._tensors:
            tensor.copy_(copy)
        for group, values in self._groups:
            group.update(values)
        for inner in self._inner:
            for parameter in [p for g in inner.param_groups for p in g["params"]]:
                if id(parameter) not in self._had_state:
                    inner.state.pop(parameter, None)


def _optimizers(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


@dataclass(frozen=True)
class Outcome:
    """What one schedule made of an update, on the CPU.

    Attributes:
        losses: per microbatch the mean loss of its trained tokens, float64 [microbatches].
        gradients: by parameter name, before clipping.
        parameters: by name, after the optimizer step.
    """

    losses: Tensor
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def gradients(chunks: list[Any]) -> dict[str, Tensor]:
    """Copies of the summed gradients."""
    return {n: p.main_grad.detach().to("cpu", copy=True) for n, p in named_parameters(chunks)}


def parameters(chunks: list[Any]) -> dict[str, Tensor]:
    """Copies of the weights."""
    return {n: p.detach().to("cpu", copy=True) for n, p in named_parameters(chunks)}


def losses(logs: Sequence[dict[str, Tensor]]) -> Tensor:
    """Mean loss of every microbatch, float64 [microbatches]."""
    rows = [log["loss"].double().cpu() for log in logs]
    table = torch.stack(rows) if rows else torch.zeros(0, 2, dtype=torch.float64)
    return table[:, 0] / table[:, 1].clamp(min=1)


@dataclass(frozen=True)
class Scales:
    """How large the terms are whose sums a comparison looks at.

    Attributes:
        loss: of a microbatch's mean loss: log-probs times advantages.
        gradient: what a trained token can send back on average, advantage and KL added up.
        cancellation: that, over what it does send back, at least 1: near the reference the KL's
            gradient is a difference of nearly equal numbers, which rounding errors do not follow.
    """

    loss: float
    gradient: float
    cancellation: float

    @classmethod
    def of(cls, items: Sequence[dict[str, Any]], kl_coeff: float) -> Scales:
        """The scales of an update's microbatches."""
        largest, sent, terms, trained = 1.0, 0.0, 0.0, 0.0
        for item in items:
            advantages, mask = item["advantages"], item["loss_mask"]
            kl = kl_coeff * mask.double()
            terms += float((advantages.abs() + kl).sum())
            if "old_logprobs" in item:
                largest = max(largest, _largest(item["old_logprobs"]) * _largest(advantages))
            if "ref_logprobs" in item and "old_logprobs" in item:
                kl = kl * -torch.expm1(item["ref_logprobs"] - item["old_logprobs"])
            sent += float((kl - advantages).abs().sum())
            trained += float(mask.sum())
        return cls(largest, terms / max(trained, 1.0), terms / sent if sent else 1.0)


@dataclass(frozen=True)
class Difference:
    """How far the prefix schedule's update is from the stock schedule's.

    Attributes:
        loss_max_abs_diff: over microbatches.
        grad_max_rel_diff: over parameters, relative to each one's largest stock gradient.
        param_max_abs_diff: over parameters after the optimizer step.
        tolerance: of gradients.
        passed: within the numerics policy. None in 16 bit, where only an fp32 reference can tell
            (`megatron-prefix align` has one).
        failures: what is outside, one line each.
    """

    loss_max_abs_diff: float
    grad_max_rel_diff: float
    param_max_abs_diff: float
    tolerance: float
    passed: bool | None
    failures: tuple[str, ...] = ()


def compare(
    expected: Outcome, found: Outcome, *, num_tokens: int, scales: Scales, lr: float, eps: float
) -> Difference:
    """Judge an update by the numerics policy.

    Gradients are the test proper: each is to be within the tolerance (times `cancellation`) of its
    own largest element. AdamW divides a gradient by its own size, so where a gradient is
    rounding noise a parameter may go either way: lr * min(2, error / eps) is all that can be asked
    of it, and its storage rounds twice.

    Args:
        expected: the stock schedule's. found: the prefix schedule's.
        num_tokens: positions of the update, the length of a weight gradient's sum.
        lr: learning rate of the update. eps: AdamW's.
    """
    dtype = next(iter(expected.parameters.values())).dtype
    limit = numerics.tolerance(dtype, num_tokens)
    loss = _largest(found.losses - expected.losses)
    most_error = limit * scales.cancellation
    sizes = _gradient_sizes(expected.gradients, most_error, scales.gradient)
    errors = {n: _relative(found.gradients[n] - g, sizes[n]) for n, g in expected.gradients.items()}
    moved = {n: _largest(found.parameters[n] - p) for n, p in expected.parameters.items()}
    checks = [("loss", loss, limit * scales.loss)]
    checks += [(f"gradient of {name}", error, most_error) for name, error in errors.items()]
    for name, parameter in expected.parameters.items():
        rounding = 2 * torch.finfo(dtype).eps * _largest(parameter)
        most = lr * min(2.0, most_error * sizes[name] / eps) + rounding
        checks.append((f"parameter {name}", moved[name], most))
    judged = dtype in (torch.float32, torch.float64)
    # An infinite weight makes its own bound infinite, so finite is asked for too.
    failures = [
        f"{what}: {error:.2e} exceeds {most:.2e}"
        for what, error, most in checks
        if not (error <= most and math.isfinite(error))
    ]
    return Difference(
        loss_max_abs_diff=loss,
        grad_max_rel_diff=max(errors.values()),
        param_max_abs_diff=max(moved.values()),
        tolerance=most_error,
        passed=not failures if judged else None,
        failures=tuple(failures) if judged else (),
    )


def _gradient_sizes(gradients: dict[str, Tensor], limit: float, scale: float) -> dict[str, float]:
    """What the error of each parameter's gradient is relative to: the largest stock gradient.

    Where the sums of terms cancel (identical rollouts whose advantages add up to zero, and nothing
    else) all gradients are rounding noise, and errors are relative to the terms.
    """
    sizes = {name: _largest(value) for name, value in gradients.items()}
    return sizes if max(sizes.values()) > limit * scale else dict.fromkeys(sizes, scale)


def over_ranks(difference: Difference, device: torch.device) -> Difference:
    """The largest differences over all ranks of the job; the failures stay the rank's own."""
    numbers = [
        difference.loss_max_abs_diff,
        difference.grad_max_rel_diff,
        difference.param_max_abs_diff,
        0.0 if difference.passed is None or difference.passed else 1.0,
    ]
    table = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    loss, gradient, parameter, failed = table.tolist()
    passed = None if difference.passed is None else not failed
    return Difference(loss, gradient, parameter, difference.tolerance, passed, difference.failures)


def _largest(values: Tensor) -> float:
    """The largest magnitude; infinity where there is NaN, so that it never passes for small."""
    largest = float(values.double().abs().max()) if values.numel() else 0.0
    return math.inf if math.isnan(largest) else largest


def _relative(difference: Tensor, size: float) -> float:
    largest = _largest(difference)
    return largest / size if size else math.inf if largest else 0.0
