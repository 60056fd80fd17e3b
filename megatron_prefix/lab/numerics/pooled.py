"""In 16 bit: the prefix schedule's error against fp32, compared with the stock schedule's.

It may be at most `policy.ERROR_RATIO` times as large, pooled over several draws, and over the
experts of a layer: a token that is nearly undecided between two experts goes to one or the other by
rounding, in either schedule, and an expert with few tokens has no other error of that size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_prefix.lab.numerics import policy
from megatron_prefix.lab.numerics.compare import Trace, Verdict

_PART = 1 << 26
"""Values that are looked at together."""
_EXPERT = re.compile(r"\bexperts\.(local_experts\.)?\d+\.")


class Norms(NamedTuple):
    """2-norms of the errors of both schedules against fp32, and of what fp32 gives; of how many
    numbers."""

    stock: float
    ours: float
    truth: float
    size: int


class Errors:
    """In 16 bit: errors of both schedules against fp32, draw by draw.

    Args:
        limit: of their ratio.
    """

    def __init__(self, limit: float = policy.ERROR_RATIO) -> None:
        self._limit = limit
        self._gradients: dict[str, list[Norms]] = {}
        self._forward: dict[str, list[Norms]] = {"losses": [], "log-probs": []}

    def add(self, expected: Trace, found: Trace, exact: Trace) -> None:
        """One more draw."""
        together: dict[str, list[Norms]] = {}
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

    @property
    def ratios(self) -> dict[str, float]:
        """Of every parameter's gradient, pooled: the prefix schedule's error over stock's."""
        return {name: _ratio(_summed(each)) for name, each in self._gradients.items()}

    def judged(self, verdict: Verdict) -> Verdict:
        """The verdict with the pooled ratios, and what is outside, the largest ratio first."""
        named = {f"gradient of {name}": each for name, each in self._gradients.items()}
        outside = []
        for name, each in (*named.items(), *self._forward.items()):
            ratio = _ratio(_summed(each))
            most = policy.error_ratio([_ratio(one) for one in each], each[0].size, self._limit)
            if not ratio <= most:
                above = f"error ratio of {name}: {ratio:.3f} exceeds {most:.3f}"
                outside.append((ratio, _not_finite(name, _summed(each)) or above))
        ratios = [*self.ratios.values()]
        failures = (
            *verdict.failures,
            *(line for _, line in sorted(outside, reverse=True)),
            *self._wrong_baseline(),
        )
        return replace(
            verdict,
            passed=not failures,
            failures=failures,
            tolerance=self._limit,
            grad_error_ratio_max=max(ratios),
            grad_error_ratio_p50=float(np.median(ratios)),
            draws=len(self._forward["losses"]),
        )

    def _wrong_baseline(self) -> list[str]:
        """Gradients that the stock schedule has wrong, and the prefix schedule has not: it has
        proved nothing to be near it, and times of such a baseline mean nothing."""
        pooled = {name: _summed(each) for name, each in self._gradients.items()}
        least = policy.FLOOR * max((one.truth for one in pooled.values()), default=0.0)
        return [
            f"gradient of {name}: the stock schedule's is off by {one.stock / size:.0%} of its"
            f" norm, the prefix schedule's by {one.ours / size:.1%}: the baseline is wrong here"
            for name, one in pooled.items()
            if math.isfinite(one.stock)
            and one.ours < policy.WRONG_BASELINE * one.stock
            and one.stock > policy.WRONG_BASELINE * (size := max(one.truth, least))
        ]


def _norms(values: Sequence[Tensor], truth: Tensor) -> Norms:
    """How far the stock and the prefix schedule's values are from the truth.

    Part by part: an embedding of 151,936 tokens has no room for copies beside three gradients.
    """
    parts = zip(*(one.reshape(-1).split(_PART) for one in (*values, truth)), strict=True)
    each = [
        torch.stack([torch.linalg.vector_norm(x, dtype=torch.float64) for x in (a - t, b - t, t)])
        for a, b, t in parts
    ]
    stock, ours, exact = torch.linalg.vector_norm(torch.stack(each), dim=0).tolist()
    return Norms(stock, ours, exact, truth.numel())


def _ratio(one: Norms) -> float:
    """1 for equal errors, zeros too; infinite if something is not finite."""
    if not (math.isfinite(one.stock) and math.isfinite(one.ours)):
        return math.inf
    return 1.0 if one.ours == one.stock else one.ours / one.stock if one.stock else math.inf


def _not_finite(name: str, one: Norms) -> str:
    """Whose values have no error to speak of; empty if both have."""
    if not math.isfinite(one.truth):
        return f"{name}: NaN or infinite in the reference in fp32"
    pairs = ("stock", one.stock), ("prefix", one.ours)
    wrong = " and the ".join(who for who, error in pairs if not math.isfinite(error))
    return wrong and f"{name}: NaN or infinite with the {wrong} schedule"


def _summed(each: Sequence[Norms]) -> Norms:
    """Norms of several tensors as if they were one; of all draws, too."""
    stock, ours, truth, sizes = zip(*each, strict=True)
    return Norms(math.hypot(*stock), math.hypot(*ours), math.hypot(*truth), sum(sizes))
