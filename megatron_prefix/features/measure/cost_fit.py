"""Prices in seconds, fitted to measured actions.  Pure.

Of the measurements only sums are kept: the matrix and the right-hand side of weighted normal
equations, to which every measured step and rank adds its own. The fit is non-negative least squares
(Lawson and Hanson, "Solving Least Squares Problems", chapter 23) with a weak ridge that pulls to
the guess made from FLOPs, scaled by the one factor that fits best: features that came in one
proportion only keep the guess's proportion.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from megatron_prefix.plan.cost import NUM_FEATURES, CostModel, Features

RIDGE = 1e-3
"""Weight of the guess, in actions of average length."""
KEPT = 0.8
"""What earlier measured steps count when a new one comes: machines and kernels change."""
_HUBER, _ROUNDS, _LEAST_SPREAD = 2.0, 8, 0.02
_MOST_STEPS = 5  # whole steps of each schedule that are remembered
_LEAST_COUNT = 8.0  # actions before their prices replace the guess's


class StepTime(NamedTuple):
    """A whole step that was measured.

    Attributes:
        share: whether the prefix schedule ran it.
        features: of its work on one rank, see `Prediction`.
        seconds: from the first action to the end of the step.
    """

    share: bool
    features: tuple[float, ...]
    seconds: float


@dataclass(frozen=True)
class Evidence:
    """What measurements say, in sums that can be added up.

    Attributes:
        gram: of weighted features, float64 [NUM_FEATURES, NUM_FEATURES].
        moment: of features and seconds, float64 [NUM_FEATURES].
        count: number of measured actions.
        steps: whole steps, the latest last.
    """

    gram: np.ndarray = field(default_factory=lambda: np.zeros((NUM_FEATURES,) * 2))
    moment: np.ndarray = field(default_factory=lambda: np.zeros(NUM_FEATURES))
    count: float = 0.0
    steps: tuple[StepTime, ...] = ()

    @classmethod
    def of_actions(
        cls, work: Sequence[Features], seconds: Sequence[float], prior: CostModel
    ) -> Evidence:
        """Measured actions of one rank in one step; those that fit badly count less.

        An action weighs 1 / its seconds: long actions decide what a step costs, and their error
        grows with their length. Outliers (the first call of a kernel) are weighed down as Huber
        does ("Robust Estimation of a Location Parameter").
        """
        measured = np.array(seconds)
        features, measured = np.array(work)[measured > 0], measured[measured > 0]
        if not len(measured):
            return cls()
        base = 1 / (np.maximum(measured, 0.1 * measured.mean()) * measured.mean())
        weights, evidence = base, cls()
        for _ in range(_ROUNDS):
            weighted = features * weights[:, None]
            gram = weighted.T @ features
            evidence = cls((gram + gram.T) / 2, weighted.T @ measured, float(len(measured)))
            predicted = features @ np.array(evidence.fitted(prior).prices)
            error = predicted / measured - 1
            away = np.abs(error - np.median(error))
            limit = _HUBER * max(1.5 * float(np.median(away)), _LEAST_SPREAD)
            weights = base * np.minimum(1.0, limit / np.maximum(away, limit))
        return evidence

    def and_also(self, later: Evidence, weight: float = 1.0) -> Evidence:
        """Combined with later measurements; this one is weighted by `weight`."""
        shared, stock = (
            (self.measured(share) + later.measured(share))[-_MOST_STEPS:] for share in (True, False)
        )
        return Evidence(
            weight * self.gram + later.gram, weight * self.moment + later.moment,
            weight * self.count + later.count, (*shared, *stock),
        )  # fmt: skip

    def measured(self, share: bool) -> list[StepTime]:
        """Timed steps of a schedule."""
        return [step for step in self.steps if step.share == share]

    def times(self, prior: CostModel) -> CostModel:
        """Fitted prices, and the factors of whole steps.

        A schedule of which no step was measured has the factor of the other.
        """
        fitted = self.fitted(prior) if self.count >= _LEAST_COUNT else prior
        stock, prefix = (
            [
                step.seconds / predicted
                for step in self.measured(share)
                if (predicted := fitted.of(np.array(step.features))) > 0
            ]
            for share in (False, True)
        )
        factors = map(np.median, (stock or prefix or [1.0], prefix or stock or [1.0]))
        return CostModel(fitted.prices, *map(float, factors))

    def fitted(self, prior: CostModel) -> CostModel:
        """The prior with prices that fit the actions best; none of them below 0."""
        unit = np.array(prior.prices)
        used = unit > 0  # e.g. no output layer counted: its price stays 0
        gram = (self.gram * np.outer(unit, unit))[np.ix_(used, used)]
        moment = (self.moment * unit)[used]
        if not gram.sum() > 0 or not moment.sum() > 0:
            return prior
        factor = moment.sum() / gram.sum()
        pull = RIDGE / factor**2
        solved = non_negative(gram + pull * np.eye(len(gram)), moment + pull * factor)
        scale = np.zeros(NUM_FEATURES)
        scale[used] = solved
        return replace(prior, prices=tuple((scale * unit).tolist()))

    def to_json(self) -> dict[str, Any]:
        """Plain sequences and numbers; `from_json` reads them."""
        return {
            "gram": self.gram.tolist(), "moment": self.moment.tolist(), "count": self.count,
            "steps": self.steps,
        }  # fmt: skip

    @classmethod
    def from_json(cls, values: Any) -> Evidence:
        """The inverse of `to_json`.

        Raises:
            ValueError: not what `to_json` makes.
        """
        try:
            gram, moment = (np.array(values[name], np.float64) for name in ("gram", "moment"))
            count = float(values["count"])
            steps = tuple(
                StepTime(bool(share), tuple(map(float, work)), float(seconds))
                for share, work, seconds in values["steps"]
            )
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise ValueError(f"no measurements ({error})") from None
        sizes = {*gram.shape, *moment.shape, *(len(step.features) for step in steps)}
        if (gram.ndim, moment.ndim) != (2, 1) or sizes != {NUM_FEATURES}:
            raise ValueError(f"measurements of another number of features than {NUM_FEATURES}")
        every = np.hstack([gram.ravel(), moment, count, *(n for s in steps for n in s[1:])])
        if not (np.isfinite(every).all() and (every >= 0).all() and (gram == gram.T).all()):
            raise ValueError("measurements that are not finite numbers from 0")
        if any(not sum(step.features) > 0 or step.seconds == 0 for step in steps):
            raise ValueError("a measured step without work or time")
        return cls(gram, moment, count, steps)


def together(parts: Sequence[Evidence], times: CostModel) -> Evidence:
    """What several ranks have measured in one step.

    A rank that ends early waits for others at the end of a step. So of each schedule the rank
    counts that took least for its work: nobody waited longer for it.

    Args:
        parts: of the ranks.
        times: what the steps are compared by.
    """
    fastest = [
        min(steps, key=lambda s: s.seconds / (times.of(np.array(s.features)) or 1))
        for share in (False, True)
        if (steps := [step for part in parts for step in part.measured(share)])
    ]
    return replace(functools.reduce(Evidence.and_also, parts, Evidence()), steps=tuple(fastest))


def non_negative(gram: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """The x >= 0 with the least x·gram·x - 2 x·moment, for a positive definite `gram`."""
    size = len(moment)
    passive, solution = np.zeros(size, bool), np.zeros(size)
    for _ in range(10 * size):
        slope = np.where(passive, -np.inf, moment - gram @ solution)
        best = int(slope.argmax())
        if slope[best] <= 1e-12 * np.abs(moment).max():
            break
        passive[best] = True
        while True:
            trial = np.zeros(size)
            trial[passive] = np.linalg.solve(gram[np.ix_(passive, passive)], moment[passive])
            low = passive & (trial <= 0)
            if not low.any():
                break
            reach = np.min(solution[low] / np.maximum(solution[low] - trial[low], 1e-300))
            solution = solution + reach * (trial - solution)
            passive &= solution > 1e-15 * max(1.0, float(solution.max()))
            solution[~passive] = 0.0
        solution = trial
    return solution
