"""What two schedules computed, compared: the verdict of `align.align`.

It follows the policy of megatron_prefix/numerics: one tolerance from dtype and length;
in 16 bit the error of the prefix schedule against an fp32 reference, pooled over several draws, may
be at most 1.1 times that of the stock schedule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_prefix import numerics

LR = 1e-3
ADAM_EPS = 1e-8
STOCK = "stock schedule"
"""The usual baseline."""


@dataclass(frozen=True)
class Trace:
    """What one schedule computed.

    Attributes:
        losses: loss of every microbatch, float64 [microbatches].
        logprobs: of every trained token, float64 [trained tokens].
        gradients: by parameter name.
        parameters: after one optimizer step, by name; empty where none was asked for.
        auxiliary: what the step left in the routers (moe/observed.py).
    """

    losses: Tensor
    logprobs: Tensor
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    auxiliary: dict[str, Tensor]


@dataclass(frozen=True)
class Alignment:
    """The verdict; the keys of `align --json`.

    Attributes:
        loss_max_abs_diff: over microbatches.
        logprob_max_abs_diff: over trained tokens, with and without gradients.
        grad_max_rel_diff: over parameters, relative to each one's largest stock gradient.
        param_max_abs_diff: over parameters after one AdamW step.
        raw_tokens: positions of all rollouts.
        executed_tokens: positions that the prefix schedule computed.
        passed: every difference is within the policy.
        tolerance: the relative tolerance (in 16 bit: of the error ratio, chance aside).
        grad_error_ratio_max: in 16 bit the largest ratio of errors over parameters, else None.
        grad_error_ratio_p50: its median.
        draws: steps over which these errors are pooled.
        failures: what was outside, one line each.
        baseline: what the prefix schedule was compared with.
    """

    loss_max_abs_diff: float
    logprob_max_abs_diff: float
    grad_max_rel_diff: float
    param_max_abs_diff: float
    raw_tokens: int
    executed_tokens: int
    passed: bool
    tolerance: float
    grad_error_ratio_max: float | None = None
    grad_error_ratio_p50: float | None = None
    draws: int = 1
    failures: tuple[str, ...] = ()
    baseline: str = STOCK

    def as_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def judge(
    expected: Trace, found: Trace, forward_diff: float, tokens: tuple[int, int, int]
) -> Alignment:
    """The verdict on one draw, in 16 bit still without a limit.

    `tokens`: positions that a gradient sums up, this rank's, and executed.
    """
    num_summed, raw, executed = tokens
    dtype = next(iter(expected.parameters.values())).dtype
    coarse = dtype.itemsize < 4
    limit = numerics.ERROR_RATIO if coarse else numerics.tolerance(dtype, num_summed)
    gradients = {n: _error(found.gradients[n], g) for n, g in expected.gradients.items()}
    loss_diff = float((found.losses - expected.losses).abs().max())
    logprob_diff = max(forward_diff, float((found.logprobs - expected.logprobs).abs().max()))
    parameters = {
        n: float((found.parameters[n].double() - p.double()).abs().max())
        for n, p in expected.parameters.items()
    }
    failures: list[str] = []
    if not any(g.abs().max() > 0 for g in expected.gradients.values()):
        failures.append("every stock gradient is zero: nothing was compared")
    if not coarse:
        failures += [f"gradient of {n}: {e:.2e}" for n, e in gradients.items() if not e <= limit]
        failures += _parameter_failures(expected, parameters, limit, dtype)
        failures += _auxiliary_failures(expected, found, raw)
        scale = max(1.0, float(expected.logprobs.abs().max()), float(expected.losses.abs().max()))
        for name, found_diff in (("loss", loss_diff), ("log-prob", logprob_diff)):
            if not found_diff <= limit * scale:
                failures.append(f"{name}: {found_diff:.2e} exceeds {limit * scale:.2e}")
    return Alignment(
        loss_diff, logprob_diff, max(gradients.values()), max(parameters.values()), raw, executed,
        not failures, limit, failures=tuple(failures),
    )  # fmt: skip


class Errors:
    """In 16 bit: errors of both schedules against fp32, draw by draw."""

    def __init__(self) -> None:
        # By name, (stock, prefix) of every draw, as 2-norms.
        self._gradients: dict[str, list[tuple[float, float]]] = {}
        self._forward: dict[str, list[tuple[float, float]]] = {"losses": [], "log-probs": []}

    def add(self, expected: Trace, found: Trace, exact: Trace) -> None:
        """One more draw."""
        for name, truth in exact.gradients.items():
            values = expected.gradients[name], found.gradients[name]
            self._gradients.setdefault(name, []).append(_norms(values, truth))
        for name, traces in (
            ("losses", (expected.losses, found.losses, exact.losses)),
            ("log-probs", (expected.logprobs, found.logprobs, exact.logprobs)),
        ):
            self._forward[name].append(_norms(traces[:2], traces[2]))

    def judged(self, verdict: Alignment) -> Alignment:
        """The verdict with the pooled ratios, and what is outside, the largest ratio first."""
        named = {f"gradient of {name}": each for name, each in self._gradients.items()}
        outside = []
        for name, each in (*named.items(), *self._forward.items()):
            ratio, most = _pooled(each), numerics.error_ratio([_ratio(*one) for one in each])
            if not ratio <= most:
                outside.append((ratio, f"error ratio of {name}: {ratio:.3f} exceeds {most:.3f}"))
        ratios = [_pooled(each) for each in self._gradients.values()]
        failures = (*verdict.failures, *(line for _, line in sorted(outside, reverse=True)))
        return replace(
            verdict,
            passed=not failures,
            failures=failures,
            grad_error_ratio_max=max(ratios),
            grad_error_ratio_p50=float(np.median(ratios)),
            draws=len(self._forward["losses"]),
        )


def _norms(values: Sequence[Tensor], truth: Tensor) -> tuple[float, float]:
    """How far the stock and the prefix schedule's values are from the truth."""
    stock, ours = (
        float(torch.linalg.vector_norm(value - truth, dtype=torch.float64)) for value in values
    )
    return stock, ours


def _ratio(stock: float, ours: float) -> float:
    """1 for equal errors, zeros too; infinite where something is not finite."""
    if not (math.isfinite(stock) and math.isfinite(ours)):
        return math.inf
    return 1.0 if ours == stock else ours / stock if stock else math.inf


def _pooled(each: Sequence[tuple[float, float]]) -> float:
    """The ratio of both errors over all draws."""
    stock, ours = (math.hypot(*errors) for errors in zip(*each, strict=True))
    return _ratio(stock, ours)


def _parameter_failures(
    expected: Trace, differences: dict[str, float], limit: float, dtype: torch.dtype
) -> list[str]:
    """The first AdamW step is lr * g / (|g| + eps): a gradient that is off by d moves a parameter
    by at most lr * min(2, d / eps), and storing it rounds once more."""
    found = []
    for name, parameter in expected.parameters.items():
        gradient = limit * float(expected.gradients[name].abs().max())
        rounding = 2 * torch.finfo(dtype).eps * float(parameter.abs().max())
        most = LR * min(2.0, gradient / ADAM_EPS) + rounding
        if not differences[name] <= most:
            found.append(f"parameter {name}: {differences[name]:.2e} exceeds {most:.2e}")
    return found


def _auxiliary_failures(expected: Trace, found: Trace, num_tokens: int) -> list[str]:
    """Routers' logged losses and biases, which Megatron keeps in fp32 for every dtype."""
    if expected.auxiliary.keys() != found.auxiliary.keys():
        return [f"routers left {sorted(found.auxiliary)}, not {sorted(expected.auxiliary)}"]
    limit = numerics.tolerance(torch.float32, num_tokens)
    errors = {n: _error(found.auxiliary[n], v) for n, v in expected.auxiliary.items()}
    return [f"{name}: {error:.2e}" for name, error in errors.items() if not error <= limit]


def _error(actual: Tensor, expected: Tensor) -> float:
    try:
        return numerics.relative_error(actual, expected)
    except ValueError:
        return math.inf


def data_rank() -> int:
    """This rank's place among the data-parallel ranks."""
    return int(parallel_state.get_data_parallel_rank())


def over_ranks(mine: Alignment) -> Alignment:
    """The verdict of all ranks together, the same on every rank."""
    verdicts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(verdicts, mine)
    owners: list[Any] = [None] * len(verdicts)
    torch.distributed.all_gather_object(owners, data_rank())
    parts = dict(zip(owners, verdicts, strict=True))

    def most(name: str) -> Any:
        values = [getattr(v, name) for v in verdicts if getattr(v, name) is not None]
        # max() forgets a NaN that does not come first; a NaN anywhere must stay one.
        return max(values, key=lambda x: math.inf if math.isnan(x) else x, default=None)

    failures = [
        f"rank {rank}: {line}" if len(verdicts) > 1 else line
        for rank, verdict in enumerate(verdicts)
        for line in verdict.failures
    ]
    return Alignment(
        most("loss_max_abs_diff"), most("logprob_max_abs_diff"), most("grad_max_rel_diff"),
        most("param_max_abs_diff"), sum(v.raw_tokens for v in parts.values()),
        sum(v.executed_tokens for v in parts.values()), all(v.passed for v in verdicts),
        most("tolerance"), most("grad_error_ratio_max"), most("grad_error_ratio_p50"),
        mine.draws, tuple(failures), mine.baseline,
    )  # fmt: skip
