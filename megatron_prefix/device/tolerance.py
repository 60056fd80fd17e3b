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
again in the backward, stores them, and passes its errors on to the next. Roundings of what is
stored behave like a random walk, too. For a whole step the model is

    SLACK * (eps(dtype) * sqrt(1 + 2 * depth)
             + eps(accumulator) * (sqrt(tokens) + 2 * depth * sqrt(width)))
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SLACK = 4.0
"""The policy's one constant: several roundings in a row (logits, weights, output) instead of one,
and a worst element instead of a typical one. Never change it for one test."""

FLOOR = 1e-2
"""A gradient below this part of the largest of all parameters is judged as if it were that large.
All are sums of the same signals. If a sum cancels, its rounding errors do not: the norms of
queries and keys have no gradient if a query sees one key, and what is left is rounding."""

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
        names = ", ".join(str(known_dtype) for known_dtype in _ACCUMULATOR)
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
    return SLACK * (torch.finfo(dtype).eps * math.sqrt(1 + 2 * depth) + accumulated)


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
    reference = expected.detach().to(torch.float64)
    got = actual.detach().to(device=reference.device, dtype=torch.float64)
    difference, magnitude = float((got - reference).abs().max()), float(reference.abs().max())
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
