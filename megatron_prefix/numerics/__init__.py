"""The numerics policy: one relative tolerance for every test and every alignment check."""

from megatron_prefix.numerics.policy import (
    DRAWS,
    ERROR_RATIO,
    FLOOR,
    SLACK,
    accumulator_dtype,
    assert_close,
    error_ratio,
    relative_error,
    tolerance,
)

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
