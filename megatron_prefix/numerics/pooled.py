"""In 16 bit: the error of the prefix schedule against fp32, beside that of the stock schedule.

It may be at most `policy.ERROR_RATIO` times as large, pooled over several draws, and over the
experts of a layer: a token that is nearly undecided between two experts goes to one or the other by
rounding, in either schedule, and an expert with few tokens has no other error of that size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megatron_prefix.numerics import policy
from megatron_prefix.numerics.compare import Trace, Verdict

_EXPERT = re.compile(r"\bexperts\.(local_experts\.)?\d+\.")


class Errors:
    """In 16 bit: errors of both schedules against fp32, draw by draw."""

    def __init__(self) -> None:
        # By name, (stock, prefix) of every draw, as 2-norms.
        self._gradients: dict[str, list[tuple[float, float]]] = {}
        self._forward: dict[str, list[tuple[float, float]]] = {"losses": [], "log-probs": []}

    def add(self, expected: Trace, found: Trace, exact: Trace) -> None:
        """One more draw."""
        together: dict[str, list[tuple[float, float]]] = {}
        for name, truth in exact.gradients.items():
            values = expected.gradients[name], found.gradients[name]
            together.setdefault(_EXPERT.sub("experts.*.", name), []).append(_norms(values, truth))
        for name, each in together.items():
            self._gradients.setdefault(name, []).append(_summed(each))
        for name, traces in (
            ("losses", [trace.losses for trace in (expected, found, exact)]),
            ("log-probs", [trace.logprobs for trace in (expected, found, exact)]),
        ):
            stock, ours, truth = (torch.zeros(0) if x is None else x for x in traces)
            self._forward[name].append(_norms((stock, ours), truth))

    def judged(self, verdict: Verdict) -> Verdict:
        """The verdict with the pooled ratios, and what is outside, the largest ratio first."""
        named = {f"gradient of {name}": each for name, each in self._gradients.items()}
        outside = []
        for name, each in (*named.items(), *self._forward.items()):
            ratio, most = _pooled(each), policy.error_ratio([_ratio(*one) for one in each])
            if not ratio <= most:
                above = f"error ratio of {name}: {ratio:.3f} exceeds {most:.3f}"
                outside.append((ratio, _not_finite(name, each) or above))
        ratios = [_pooled(each) for each in self._gradients.values()]
        failures = (*verdict.failures, *(line for _, line in sorted(outside, reverse=True)))
        return replace(
            verdict,
            passed=not failures,
            failures=failures,
            tolerance=policy.ERROR_RATIO,
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


def _not_finite(name: str, each: Sequence[tuple[float, float]]) -> str:
    """Which schedule's values have no error to speak of; empty where both have."""
    pairs = zip(("stock", "prefix"), _summed(each), strict=True)
    wrong = " and the ".join(who for who, error in pairs if not math.isfinite(error))
    return wrong and f"{name}: NaN or infinite with the {wrong} schedule"


def _pooled(each: Sequence[tuple[float, float]]) -> float:
    """The ratio of both errors over all draws."""
    return _ratio(*_summed(each))


def _summed(each: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Both errors of several tensors as if they were one."""
    stock, ours = (math.hypot(*errors) for errors in zip(*each, strict=True))
    return stock, ours
