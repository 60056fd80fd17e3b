"""Linear layers whose products are in FP8, with a scale for every block of numbers.  Pure.

A row of activations is cut into blocks of its own features, so what is quantised of it, and its
product with the weights, depends on no other row. Gradients of weights are products over rows,
whose blocks hold several: those are rounded otherwise in segments than in microbatches, as one
rounding of a sum instead of a sum of roundings. One scale for a tensor would depend on all rows.
Attention, embedding and output layer stay in 16 bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

RATE = 1.35
"""How many times as fast as in 16 bit linear layers are, quantising included: blockwise scales,
Llama3-8B's widths, one H200 (benchmarks/fp8_rates.py; docs/results.md). Tensor cores have 2."""
UNTRIED = ("mxfp8",)
"""Recipes that have run in an emulation only."""


class RowMultiples(NamedTuple):
    """Multiples in which transformer-engine takes rows.

    Attributes:
        alone: of a product: transformer_engine/common/gemm/cublaslt_gemm.cu wants leading
            dimensions, of weight gradients those are rows, to be multiples of 16, and
            transformer_engine/pytorch/csrc/quantizer.cpp whole MX blocks.
        gathered: on every rank of sequence parallelism: `is_quantizable` in
            transformer_engine/pytorch/tensor, asserted before an all-gather.
    """

    alone: int
    gathered: int


BY_BLOCKS = {"blockwise": RowMultiples(16, 128), "mxfp8": RowMultiples(32, 32)}
"""By Megatron's `fp8_recipe`: those whose scales are of blocks (transformer-engine 2.3 to 2.20)."""


def is_fp8(config: Any) -> bool:
    """Whether a model's linear layers compute in FP8."""
    return bool(getattr(config, "fp8", None))


def is_untried(config: Any) -> bool:
    """Whether a model computes in FP8 as it has on no GPU yet."""
    return is_fp8(config) and getattr(config, "fp8_recipe", None) in UNTRIED


def row_multiple(config: Any, sequence_ranks: int) -> int:
    """What the positions that linear layers get are a multiple of, on all ranks of sequence
    parallelism together: every one of these has as many."""
    of = _of(config)
    if of is None:
        return sequence_ranks
    return of.alone if sequence_ranks == 1 else of.gathered * sequence_ranks


def segment_multiple(config: Any, sequence_ranks: int, cp_size: int) -> int:
    """What segments are padded to, see TreeOptions; 1 without FP8."""
    multiple = row_multiple(config, sequence_ranks)
    return multiple * cp_size if multiple > sequence_ranks else 1


def _of(config: Any) -> RowMultiples | None:
    recipe = getattr(config, "fp8_recipe", None)  # a str, or Megatron's Fp8Recipe, which is one
    return BY_BLOCKS.get(recipe or "") if is_fp8(config) else None


def rate(config: Any) -> float:
    """How many times as fast as in 16 bit products of linear layers are."""
    return RATE if is_fp8(config) else 1.0
