"""The numerics policy: one relative tolerance for every test and every alignment check.

A result is a long sum of rounded products, stored once. Its error relative to the largest expected
magnitude may be

    SLACK * (eps(dtype) + eps(accumulator) * sqrt(reduction_length))

The first term is the rounding of inputs, weights and results to the storage dtype. The second is
the accumulation, whose rounding errors behave like a random walk over the terms of the sum (N. J.
Higham, T. Mary: "A New Approach to Probabilistic Rounding Error Analysis", section 1: sqrt(n) * u
instead of n * u). Kernels accumulate bf16 and fp16 in fp32, so the second term uses fp32's eps
there; bf16's would accept anything. fp32 and fp64 are accumulated in themselves.

Between a weight and the loss lie `depth` layers. Each adds up `width` products in the forward and
again in the backward, and passes its errors on to the next. For a whole step the model is

    SLACK * (eps(dtype) + eps(accumulator) * (sqrt(tokens) + 2 * depth * sqrt(width)))
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

SLACK = 4.0
"""The policy's one constant: several roundings in a row (logits, weights, output) instead of one,
and a worst element instead of a typical one. Never change it for one test."""

FLOOR = 1e-2
"""A gradient below this part of the largest of all parameters is judged as if it were that large.
All are sums of the same signals. Where a sum cancels, its rounding errors do not: the norms of
queries and keys have no gradient where a query sees one key, and what is left is rounding."""

ERROR_RATIO = 1.1
"""In 16 bit: error against fp32, over that of the stock schedule."""
WRONG_BASELINE = 0.1
"""In 16 bit: a gradient of the stock schedule that is off by more than this part of its norm, where
the prefix schedule's error is less than this part of that, is wrong. Roundings are alike."""
DRIFT_RATIO = 2.0
"""Two runs of many steps, one with either schedule: their distance over that of two stock runs."""
DRAWS = 8
"""In 16 bit: draws of tokens and advantages over which errors are pooled."""
_NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""

_ACCUMULATOR = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which kernels add up values of ``dtype``: fp64 for fp64, otherwise fp32.

    Raises ValueError for a dtype without a policy.
    """
    if dtype not in _ACCUMULATOR:
        names = ", ".join(str(known) for known in _ACCUMULATOR)
        raise ValueError(f"no numerics policy for {dtype}: use one of {names}")
    return _ACCUMULATOR[dtype]


def tolerance(dtype: torch.dtype, reduction_length: int, width: int = 0, depth: int = 0) -> float:
    """Largest accepted `relative_error` of a result held in ``dtype``.

    ``reduction_length`` is the number of terms in the longest sum behind one element (keys for an
    attention output, tokens for a weight gradient), at least 1; ValueError otherwise.  ``depth`` is
    the number of layers that the result goes through, ``width`` the longest sum in one of them.
    """
    if reduction_length < 1:
        raise ValueError(f"reduction_length is {reduction_length}: a sum has at least one term")
    terms = math.sqrt(reduction_length) + 2 * depth * math.sqrt(width)
    accumulated = torch.finfo(accumulator_dtype(dtype)).eps * terms
    return SLACK * (torch.finfo(dtype).eps + accumulated)


def error_ratio(ratios: Sequence[float]) -> float:
    """Largest accepted ratio of two errors pooled over draws, from the ratio of every draw.

    Roundings of one draw are not independent: on an H200 the ratios of single draws spread by 0.01
    to 0.17 around 1.02, a router's with 16,384 elements the most.  Pooled over n draws chance moves
    the logarithm by spread / sqrt(n), and SLACK times that is granted.  The spread is the median
    deviation from the median, so that a draw that is far off does not widen its own limit.
    """
    if not all(0 < ratio < math.inf for ratio in ratios):
        return ERROR_RATIO
    logs = [math.log(ratio) for ratio in ratios]
    middle = statistics.median(logs)
    spread = _NORMAL * statistics.median(abs(value - middle) for value in logs)
    return ERROR_RATIO * math.exp(SLACK * spread / math.sqrt(len(logs)))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """max |actual - expected| / max |expected|, computed in fp64.

    Raises ValueError where that number would mean nothing: different shapes, no elements, NaN or
    infinity in either tensor, or an all-zero ``expected`` against a nonzero ``actual``.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"shapes differ: {tuple(actual.shape)} and {tuple(expected.shape)}")
    if actual.numel() == 0:
        raise ValueError(f"nothing to compare: shape {tuple(actual.shape)}")
    for name, tensor in (("actual", actual), ("expected", expected)):
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            raise ValueError(f"{bad} of {tensor.numel()} elements of {name} are NaN or infinite")
    wanted = expected.detach().to(torch.float64)
    got = actual.detach().to(device=wanted.device, dtype=torch.float64)
    difference, magnitude = float((got - wanted).abs().max()), float(wanted.abs().max())
    if magnitude == 0.0:
        if difference != 0.0:
            raise ValueError(f"expected is all zero, actual reaches {difference:.3e}")
        return 0.0
    return difference / magnitude


def assert_close(
    actual: Tensor,
    expected: Tensor,
    reduction_length: int,
    dtype: torch.dtype | None = None,
    what: str = "result",
) -> None:
    """Raise AssertionError if ``actual`` is further from ``expected`` than the policy allows.

    ``dtype`` (``actual``'s if None) is the one in which the result was computed, where that is
    coarser than the one in which it is held. ``what`` names the result in the message.
    """
    try:
        error = relative_error(actual, expected)
    except ValueError as reason:
        raise AssertionError(f"{what}: {reason}") from reason
    limit = tolerance(dtype or actual.dtype, reduction_length)
    if not error <= limit:
        raise AssertionError(f"{what}: relative error {error:.3e} exceeds {limit:.3e}")
