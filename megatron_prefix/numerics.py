"""The numerics policy: one relative tolerance for every test and every alignment check.

A result is a long sum of rounded products, stored once. Its error relative to the largest
expected magnitude is modelled as

    SLACK * (eps(dtype) + eps(accumulator) * sqrt(reduction_length))

The first term is the rounding of inputs, weights and results to the storage dtype; the second is
the accumulation, whose rounding errors behave like a random walk over the terms of the sum
(N. J. Higham, T. Mary: "A New Approach to Probabilistic Rounding Error Analysis", section 1:
sqrt(n) * u in place of n * u). Kernels accumulate bf16 and fp16 in fp32, so a long sum in bf16 is
not allowed sqrt(n) times bf16's eps: that would accept anything. fp32 and fp64 accumulate in
themselves.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SLACK = 4.0
"""The policy's one constant: several roundings in a row (logits, weights, output) instead of one,
and a worst element instead of a typical one. Never change it for one test."""

ERROR_RATIO = 1.1
"""In 16 bit: error of a gradient against fp32, over that of the stock schedule."""

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


def tolerance(dtype: torch.dtype, reduction_length: int) -> float:
    """Largest accepted `relative_error` of a result held in ``dtype``.

    ``reduction_length`` is the number of terms in the longest sum behind one element (keys for an
    attention output, tokens for a weight gradient), at least 1; ValueError otherwise.
    """
    if reduction_length < 1:
        raise ValueError(f"reduction_length is {reduction_length}: a sum has at least one term")
    accumulated = torch.finfo(accumulator_dtype(dtype)).eps * math.sqrt(reduction_length)
    return SLACK * (torch.finfo(dtype).eps + accumulated)


def error_ratio(num_elements: int) -> float:
    """Largest accepted ratio of two errors of a gradient in 16 bit, as 2-norms against fp32.

    The logarithm of the ratio of two norms of n independent roundings spreads by 1/sqrt(n): for a
    norm weight of 64 elements chance alone makes 1.13 of 1, for a matrix of a million 1.001.
    """
    if num_elements < 1:
        raise ValueError(f"num_elements is {num_elements}: a gradient has at least one")
    return ERROR_RATIO * math.exp(SLACK / math.sqrt(num_elements))


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
