"""Coefficients of the time model, fitted to measured actions.  Pure.

Of the measurements only sums are kept: the matrix and the right-hand side of weighted normal
equations, to which every measured step and rank adds its own. The fit is non-negative least squares
(Lawson and Hanson, "Solving Least Squares Problems", chapter 23) with a weak ridge that pulls to
the guess made from FLOPs, scaled by the one factor that fits best: features that came in one
proportion only keep the guess's proportion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from megatron_prefix.plan.times import NUM_COEFFICIENTS, Row, TimeModel

RIDGE = 1e-3
"""Weight of the guess, in actions of average length."""
KEPT = 0.8
"""What earlier measured steps count when a new one comes: machines and kernels change."""
_HUBER, _ROUNDS, _LEAST_SPREAD = 2.0, 8, 0.02
_MOST_STEPS = 5  # whole steps of each schedule that are remembered
_LEAST_COUNT = 8.0  # actions before their coefficients take the place of the guess's


class StepTime(NamedTuple):
    """A whole step that was measured.

    Attributes:
        share: whether the prefix schedule ran it.
        row: its work on one rank, see `times.Prediction`.
        seconds: from the first action to the end of the step.
    """

    share: bool
    row: tuple[float, ...]
    seconds: float


@dataclass(frozen=True)
class Evidence:
    """What measurements say, in sums that can be added up.

    Attributes:
        gram: of weighted features, float64 [NUM_COEFFICIENTS, NUM_COEFFICIENTS].
        moment: of features and seconds, float64 [NUM_COEFFICIENTS].
        count: number of measured actions.
        steps: whole steps, the latest last.
    """

    gram: np.ndarray = field(default_factory=lambda: np.zeros((NUM_COEFFICIENTS,) * 2))
    moment: np.ndarray = field(default_factory=lambda: np.zeros(NUM_COEFFICIENTS))
    count: float = 0.0
    steps: tuple[StepTime, ...] = ()

    @classmethod
    def of_actions(
        cls, rows: Sequence[Row], seconds: Sequence[float], prior: TimeModel
    ) -> Evidence:
        """Measured actions of one rank in one step; those that fit badly count less.

        A row weighs 1 / its seconds: long actions decide what a step costs, and their error grows
        with their length. Outliers (the first call of a kernel) are weighed down as Huber does
        ("Robust Estimation of a Location Parameter").
        """
        pairs = [(r, t) for r, t in zip(rows, seconds, strict=True) if t > 0]
        if not pairs:
            return cls()
        features, measured = (np.array(column) for column in zip(*pairs, strict=True))
        base = 1 / (np.maximum(measured, 0.1 * measured.mean()) * measured.mean())
        weights, found = base, cls()
        for _ in range(_ROUNDS):
            weighted = features * weights[:, None]
            gram = weighted.T @ features
            found = cls((gram + gram.T) / 2, weighted.T @ measured, float(len(measured)))
            predicted = features @ np.array(found.fitted(prior).coefficients)
            error = predicted / measured - 1
            away = np.abs(error - np.median(error))
            limit = _HUBER * max(1.5 * float(np.median(away)), _LEAST_SPREAD)
            weights = base * np.minimum(1.0, limit / np.maximum(away, limit))
        return found

    def and_also(self, other: Evidence, kept: float = 1.0) -> Evidence:
        """With what was measured later; this counts `kept` times as much."""
        steps = [*self.steps, *other.steps]
        latest = [s for share in (True, False) for s in _latest(steps, share)]
        return Evidence(
            kept * self.gram + other.gram, kept * self.moment + other.moment,
            kept * self.count + other.count, tuple(latest),
        )  # fmt: skip

    def measured(self, share: bool) -> bool:
        """Whether a whole step of a schedule has been timed."""
        return any(step.share == share for step in self.steps)

    def times(self, prior: TimeModel) -> TimeModel:
        """The time model: fitted coefficients, and the factors of whole steps.

        A schedule of which no step was measured has the factor of the other.
        """
        found = self.fitted(prior) if self.count >= _LEAST_COUNT else prior
        ratios: dict[bool, list[float]] = {False: [], True: []}
        for step in self.steps:
            if (predicted := found.seconds(np.array(step.row))) > 0:
                ratios[step.share].append(step.seconds / predicted)
        stock, prefix = (
            float(np.median(ratios[share] or ratios[not share] or [1.0])) for share in ratios
        )
        return replace(found, stock=stock, prefix=prefix)

    def fitted(self, prior: TimeModel) -> TimeModel:
        """The prior with coefficients that fit the actions best; none of them below 0."""
        unit = np.array(prior.coefficients)
        used = unit > 0  # e.g. no output layer counted: its coefficient stays 0
        gram = (self.gram * np.outer(unit, unit))[np.ix_(used, used)]
        moment = (self.moment * unit)[used]
        if not gram.sum() > 0 or not moment.sum() > 0:
            return prior
        factor = moment.sum() / gram.sum()
        pull = RIDGE / factor**2
        solved = _non_negative(gram + pull * np.eye(len(gram)), moment + pull * factor)
        scale = np.zeros(NUM_COEFFICIENTS)
        scale[used] = solved
        return replace(prior, coefficients=tuple((scale * unit).tolist()))

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers; `from_json` reads them."""
        steps = [[step.share, list(step.row), step.seconds] for step in self.steps]
        return {
            "gram": self.gram.tolist(), "moment": self.moment.tolist(), "count": self.count,
            "steps": steps,
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
                StepTime(bool(share), tuple(map(float, row)), float(seconds))
                for share, row, seconds in values["steps"]
            )
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise ValueError(f"no measurements ({error})") from None
        numbers = np.array([count, *(n for s in steps for n in (*s.row, s.seconds))])
        shapes = gram.shape == (NUM_COEFFICIENTS,) * 2 and moment.shape == (NUM_COEFFICIENTS,)
        if not shapes or any(len(step.row) != NUM_COEFFICIENTS for step in steps):
            raise ValueError(f"measurements of another number of features than {NUM_COEFFICIENTS}")
        every = np.concatenate([gram.ravel(), moment, numbers])
        if not (np.isfinite(every).all() and (every >= 0).all() and (gram == gram.T).all()):
            raise ValueError("measurements that are not finite numbers from 0")
        if any(not sum(step.row) > 0 or step.seconds == 0 for step in steps):
            raise ValueError("a measured step without work or time")
        return cls(gram, moment, count, steps)


def together(parts: Sequence[Evidence], times: TimeModel) -> Evidence:
    """What several ranks have measured in one step.

    A rank that ends early waits for others at the end of a step. So of each schedule the rank
    counts that took least for its work: nobody waited longer for it.

    Args:
        parts: of the ranks.
        times: what the steps are compared by.
    """
    found = Evidence()
    for part in parts:
        found = Evidence(
            found.gram + part.gram, found.moment + part.moment, found.count + part.count
        )
    steps = []
    for share in (False, True):
        timed = [step for part in parts for step in part.steps if step.share == share]
        if timed:
            steps.append(
                min(timed, key=lambda s: s.seconds / (times.seconds(np.array(s.row)) or 1))
            )
    return replace(found, steps=tuple(steps))


def _latest(steps: Sequence[StepTime], share: bool) -> list[StepTime]:
    return [step for step in steps if step.share == share][-_MOST_STEPS:]


def _non_negative(gram: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """The x >= 0 with the least x·gram·x - 2 x·moment, for a positive definite `gram`."""
    size = len(moment)
    passive, found = np.zeros(size, bool), np.zeros(size)
    for _ in range(10 * size):
        slope = np.where(passive, -np.inf, moment - gram @ found)
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
            reach = np.min(found[low] / np.maximum(found[low] - trial[low], 1e-300))
            found = found + reach * (trial - found)
            passive &= found > 1e-15 * max(1.0, float(found.max()))
            found[~passive] = 0.0
        found = trial
    return found
