"""Three prices against the fit of features/measure/cost_fit.py, replayed from measured actions.

    python -m benchmarks.price_replay RECORDS.json...

RECORDS are what `benchmarks/action_records.py` writes for Qwen3-8B with 12 layers.  Of every set
the actions of one step make the prices, those of the next are predicted by them: by today's fit,
and by a linear FLOP, a (query, key) pair and a launch with least squares, where an action weighs
1 / sqrt(its seconds).  Both then have the median ratio of each schedule's whole step.  Prints mean
errors of actions, and both predicted speedups beside the measured one.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_prefix.features.measure.cost_fit import Evidence, StepTime
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.layers.model import cost_of
from megatron_prefix.plan.cost import CostModel, Work

FLOPS = cost_of(replace(resolve("qwen3-8b"), num_layers=12))
PRIOR = FLOPS.in_seconds(4e14, 12)
NUM = len(Work._fields)
CALL = 1 / 6  # of a launch: an attention call's, as CALL_SECONDS to ACTION_SECONDS
COLUMNS = np.zeros((2 * NUM, 3))
"""Features as linear FLOPs, FLOPs of pairs, and launches; a backward launches twice as much."""
for number, name in enumerate(Work._fields):
    for begin, passes in ((0, 1), (NUM, 2)):
        column = {"pairs": 1, "actions": 2, "calls": 2}.get(name, 0)
        launches = {"actions": passes, "calls": passes * CALL}
        COLUMNS[begin + number, column] = launches.get(name, FLOPS.prices[begin + number])


def measured(step: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Features and seconds of a step's actions."""
    rows = step["rows"]
    seconds = [statistics.median(row["seconds"]) for row in rows]
    return np.array([row["features"] for row in rows]), np.array(seconds)


def of_stock(step: dict[str, Any], ours: dict[str, Any]) -> np.ndarray:
    """Features of the same step in Megatron's schedule."""
    calls, positions = len(step["positions"]), sum(step["positions"])
    work = Work(positions, positions, ours["stock_work"][2], calls, calls)
    return np.array((*work, *work))


def three(features: np.ndarray, seconds: np.ndarray) -> CostModel:
    """Three prices; what would be below 0 is left out."""
    weights = 1 / np.sqrt(seconds)
    matrix, wanted = features @ COLUMNS * weights[:, None], seconds * weights
    scale = np.abs(matrix).max(0)
    used = [0, 1, 2]
    while (found := np.linalg.lstsq((matrix / scale)[:, used], wanted, rcond=None)[0]).min() < 0:
        used.pop(int(found.argmin()))
    prices = np.zeros(3)
    prices[used] = found / scale[used]
    return CostModel(tuple((COLUMNS @ prices).tolist()))


def row(ours: Sequence[dict[str, Any]], stock: Sequence[dict[str, Any]]) -> str:
    """Of one set: today's fit, then three prices."""
    features, seconds = measured(ours[0])
    later, truth = measured(ours[1])
    whole = [1e-3 * statistics.median(step["whole_ms"]) for step in ours]
    stock_features = [of_stock(*pair) for pair in zip(stock, ours, strict=True)]
    steps = (
        StepTime(True, tuple(features.sum(0)), whole[0]),
        StepTime(False, tuple(stock_features[0]), 1e-3 * stock[0]["milliseconds"]),
    )
    fitted = Evidence.of_actions([*features], [*seconds], PRIOR).fitted(PRIOR)
    cells = []
    for model in (fitted, three(features, seconds)):
        prefix, other = (step.seconds / model.of(np.array(step.features)) for step in steps)
        error = np.abs(later @ np.array(model.prices) / truth - 1).mean()
        speedup = other * model.of(stock_features[1]) / (prefix * model.of(later.sum(0)))
        cells.append(f"{100 * error:5.1f} %  {speedup:5.2f}x")
    real = 1e-3 * stock[1]["milliseconds"] / whole[1]
    return f"{len(seconds):3d}, {len(truth):3d} actions  " + "  ".join(cells) + f"  {real:5.2f}x"


if __name__ == "__main__":
    print("actions of both steps; today's fit: error, speedup; three prices: the same; measured")
    for path in sys.argv[1:]:
        schedules = json.loads(Path(path).read_text(encoding="utf-8"))["schedules"]
        for stock, ours in zip(schedules[::2], schedules[1::2], strict=False):
            print(f"{Path(path).stem:8s} {row(ours['steps'], stock['steps'])}")
