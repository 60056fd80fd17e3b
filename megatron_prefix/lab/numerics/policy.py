"""The policy's constants for whole steps, and errors of 16-bit runs pooled over draws.

The tolerance of a single result is the core's (device/tolerance.py).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch

from megatron_prefix.device.tolerance import FLOOR, SLACK, tolerance

__all__ = [
    "DRAWS",
    "DRIFT_RATIO",
    "ERROR_RATIO",
    "FLOOR",
    "FP8_RATIO",
    "WRONG_BASELINE",
    "error_ratio",
    "tolerance",
]

ERROR_RATIO = 1.1
"""In 16 bit: error against fp32, over that of the stock schedule."""
FP8_RATIO = math.sqrt(2)
"""The same in FP8 where the advantages of a group do not sum to zero. What rollouts of a shared
position send back is then rounded once, as a sum, and not each by itself: of n equal parts the sum
is n times as large, and so its rounding, where n independent ones would grow by sqrt(n)."""
WRONG_BASELINE = 0.1
"""In 16 bit: a gradient of the stock schedule that is off by more than this part of its norm, where
the prefix schedule's error is less than this part of that, is wrong. Roundings are alike."""
DRIFT_RATIO = 2.0
"""Two runs of many steps, one with either schedule: their distance over that of two stock runs."""
DRAWS = 8
"""In 16 bit: draws of tokens and advantages over which errors are pooled."""
_NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


def error_ratio(ratios: Sequence[float], size: int, limit: float = ERROR_RATIO) -> float:
    """Largest accepted ratio of two errors pooled over draws: chance is added to a limit.

    Pooled over n draws chance moves the logarithm by spread / sqrt(n), and SLACK times that is
    granted.  Roundings of one draw are not independent: on an H200 the ratios of single draws
    spread by 0.01 to 0.17 around 1.02, a router's with 16,384 elements the most.  The spread is the
    median deviation from the median, so that a draw that is far off does not widen its own limit.
    Of a few numbers, as a loss is, eight draws may spread little by chance.  So at least that is
    granted by which norms of independent roundings differ: a norm of N of them squared follows a
    chi-squared distribution, whose logarithm has the variance trigamma(N / 2).

    Args:
        ratios: of every draw.
        size: numbers that one draw compares.
    """
    if not all(0 < ratio < math.inf for ratio in ratios):
        return limit
    logs = [math.log(ratio) for ratio in ratios]
    middle = statistics.median(logs)
    spread = _NORMAL * statistics.median(abs(value - middle) for value in logs)
    halves = torch.tensor(max(1, size) * len(logs) / 2, dtype=torch.float64)
    independent = math.sqrt(torch.special.polygamma(1, halves).item() / 2)
    return limit * math.exp(SLACK * max(spread / math.sqrt(len(logs)), independent))
