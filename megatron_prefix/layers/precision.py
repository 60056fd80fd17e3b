"""Linear layers whose products are in FP8, with a scale for every block of numbers.  Pure.

A row of activations is cut into blocks of its own features, so what is quantised of it, and its
product with the weights, depends on no other row. Gradients of weights are products over rows,
whose blocks hold several: those are rounded otherwise in segments than in microbatches, as one
rounding of a sum instead of a sum of roundings. One scale for a tensor would depend on all rows.
Attention, embedding and output layer stay in 16 bit.

For the gradient of its weights a linear layer keeps a copy of its input in blocks of columns, one
byte a number and its scales, and drops the one in blocks of rows that it has multiplied (`_Linear`
and `_LayerNormLinear` in transformer_engine/pytorch/module, `_GroupedLinear` of experts; 2.11): the
16-bit input is kept by others only. Attention's output projection keeps its input as it is, as
attention has kept it anyway (`set_save_original_input` in megatron/core/transformer/attention.py,
since transformer-engine 2.6).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from megatron_prefix.plan.footprint import Execution

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
        scales: bytes of scales for a number of a copy in blocks of columns: for 128 rows 4 bytes,
            for 32 one (`get_scale_shape` and `make_empty` in
            transformer_engine/pytorch/tensor/float8_blockwise_tensor.py and
            transformer_engine/pytorch/tensor/mxfp8_tensor.py).
    """

    alone: int
    gathered: int
    scales: float


BY_BLOCKS = {"blockwise": RowMultiples(16, 128, 4 / 128), "mxfp8": RowMultiples(32, 32, 1 / 32)}
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


def kept_bytes(config: Any, itemsize: int) -> float:
    """Bytes of a number of its input that a linear layer keeps for the gradient of its weights.

    Args:
        itemsize: of a number outside of such layers.
    """
    of = _of(config)
    return itemsize if of is None else 1 + of.scales


def less(numbers: float, config: Any, form: Execution) -> float:
    """Bytes by which products keep less of so many numbers of their inputs than these take."""
    return numbers * (form.itemsize - kept_bytes(config, form.itemsize))


def projected_bytes(config: Any, form: Execution) -> float:
    """Bytes a position that a product with a norm in front of it keeps of what that gives."""
    numbers = config.hidden_size / form.sequence_ranks
    return numbers * form.itemsize - less(numbers, config, form)


def _of(config: Any) -> RowMultiples | None:
    recipe = getattr(config, "fp8_recipe", None)  # a str, or Megatron's Fp8Recipe, which is one
    return BY_BLOCKS.get(recipe or "") if is_fp8(config) else None


def rate(config: Any) -> float:
    """How many times as fast as in 16 bit products of linear layers are."""
    return RATE if is_fp8(config) else 1.0
