"""What two schedules computed, compared: the verdict of `alignment.align`.

It follows the numerics policy (megatron_prefix/numerics.py): one tolerance from dtype and length;
in 16 bit the error of the prefix schedule against an fp32 reference may be at most 1.1 times that
of the stock schedule.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
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
        gradients: by parameter name, on the CPU.
        parameters: after one optimizer step, by name, on the CPU.
        auxiliary: what the step left in the routers (router/observed.py).
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
        tolerance: the relative tolerance (in 16 bit: of the error ratio of a large gradient).
        grad_error_ratio_max: in 16 bit the largest ratio of errors over parameters, else None.
        grad_error_ratio_p50: its median.
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
    failures: tuple[str, ...] = ()
    baseline: str = STOCK

    def as_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def judge(
    expected: Trace,
    found: Trace,
    exact: Trace | None,
    forward_diff: float,
    tokens: tuple[int, int, int],
) -> Alignment:
    """The verdict; `tokens`: positions that a gradient sums up, this rank's, and executed."""
    num_summed, raw, executed = tokens
    dtype = next(iter(expected.parameters.values())).dtype
    limit = numerics.ERROR_RATIO if exact is not None else numerics.tolerance(dtype, num_summed)
    gradients = {n: _error(found.gradients[n], g) for n, g in expected.gradients.items()}
    loss_diff = float((found.losses - expected.losses).abs().max())
    logprob_diff = max(forward_diff, float((found.logprobs - expected.logprobs).abs().max()))
    parameters = {
        n: float((found.parameters[n].double() - p.double()).abs().max())
        for n, p in expected.parameters.items()
    }
    ratios: list[float] = []
    failures: list[str] = []
    if not any(g.abs().max() > 0 for g in expected.gradients.values()):
        failures.append("every stock gradient is zero: nothing was compared")
    if exact is not None:
        ratios = _error_ratios(expected, found, exact)
        failures += _ratio_failures(exact, ratios)
        limits = _forward_limits(expected, exact)
    else:
        failures += [f"gradient of {n}: {e:.2e}" for n, e in gradients.items() if not e <= limit]
        failures += _parameter_failures(expected, parameters, limit, dtype)
        failures += _auxiliary_failures(expected, found, raw)
        scale = max(1.0, float(expected.logprobs.abs().max()), float(expected.losses.abs().max()))
        limits = (limit * scale, limit * scale)
    pairs = (("loss", loss_diff, limits[0]), ("log-prob", logprob_diff, limits[1]))
    failures += [f"{n}: {d:.2e} exceeds {most:.2e}" for n, d, most in pairs if not d <= most]
    return Alignment(
        loss_diff, logprob_diff, max(gradients.values()), max(parameters.values()), raw, executed,
        not failures, limit, max(ratios, default=None),
        float(np.median(ratios)) if ratios else None, tuple(failures),
    )  # fmt: skip


def _error_ratios(expected: Trace, found: Trace, exact: Trace) -> list[float]:
    """Per parameter |prefix - fp32| / |stock - fp32| of the gradients, in the 2-norm."""
    ratios = []
    for name, truth in exact.gradients.items():
        stock = float((expected.gradients[name].double() - truth.double()).norm())
        ours = float((found.gradients[name].double() - truth.double()).norm())
        if not (math.isfinite(stock) and math.isfinite(ours)):
            raise ValueError(f"gradient of {name} is not finite: stock {stock}, prefix {ours}")
        ratios.append(1.0 if ours == stock else ours / stock if stock else math.inf)
    return ratios


def _ratio_failures(exact: Trace, ratios: list[float]) -> list[str]:
    """The largest first."""
    found = [
        (ratio, f"gradient error ratio of {name}: {ratio:.3f} exceeds {most:.3f}")
        for (name, truth), ratio in zip(exact.gradients.items(), ratios, strict=True)
        for most in [numerics.error_ratio(truth.numel())]
        if not ratio <= most
    ]
    return [line for _, line in sorted(found, reverse=True)]


def _forward_limits(expected: Trace, exact: Trace) -> tuple[float, float]:
    """In 16 bit losses and log-probs may differ by what 16 bit costs the stock schedule."""
    loss_error = float((expected.losses - exact.losses).abs().max())
    logprob_error = float((expected.logprobs - exact.logprobs).abs().max())
    return (1 + numerics.ERROR_RATIO) * loss_error, (1 + numerics.ERROR_RATIO) * logprob_error


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
        tuple(failures), mine.baseline,
    )  # fmt: skip
