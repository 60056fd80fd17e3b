"""The numerics policy: one relative tolerance for every test and every alignment check."""

from megatron_prefix.device.tolerance import (
    SLACK,
    accumulator_dtype,
    assert_close,
    relative_error,
    tolerance,
)
from megatron_prefix.lab.numerics.policy import DRAWS, ERROR_RATIO, FLOOR, error_ratio

__all__ = [
    "DRAWS",
    "ERROR_RATIO",
    "FLOOR",
    "SLACK",
    "accumulator_dtype",
    "assert_close",
    "error_ratio",
    "relative_error",
    "tolerance",
]
