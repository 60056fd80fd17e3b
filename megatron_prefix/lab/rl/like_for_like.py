"""One attention kernel for both schedules on the CPU, where their speeds are compared.

There Megatron's own attention is unfused: the whole square of scores, a softmax, a product. The
prefix schedule would take torch's tiled kernel, and a part of its speed would be the kernel's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.models.presets import ModelSpec
from megatron_prefix.lab.rl.job import ModelOptions
from megatron_prefix.layers import table
from megatron_prefix.layers.blocks import kernels
from megatron_prefix.megatron.install import installed

FLASH, MATH = "flash_cpu", "math"
STOCK = {
    "DotProductAttention": "math (Megatron's, unfused)",
    "LocalAttention": "math (Megatron's, unfused)",
    "SdpaAttention": FLASH,
    "TEDotProductAttention": "transformer-engine",
}
"""What a class of core attention runs in the stock schedule."""


class Attention(NamedTuple):
    """Names of the attention kernels that ran; None where none did."""

    stock: str | None
    prefix: str | None


def like_for_like(
    options: ModelOptions, spec: ModelSpec, config: PrefixConfig
) -> tuple[ModelOptions, PrefixConfig]:
    """The same job with attention by torch's kernel in both schedules, or by plain products in both
    where that kernel has not what the model needs; a kernel that the user names stays."""
    if options.device != "cpu":
        return options, config
    plain = spec.window_size is None and spec.softmax_type == "vanilla"
    if config.kernel == "auto":
        heads, dtype = table.heads(spec), getattr(torch, options.dtype)
        widths = heads.width, heads.value_width
        fastest = kernels.choose_kernel("auto", "cpu", dtype, *widths, group=heads.group).name
        config = replace(config, kernel=fastest if plain else MATH)
    return replace(options, sdpa=plain and config.kernel == FLASH), config


def attention_of(chunks: Sequence[Any]) -> Attention:
    """The kernels of a rank's model chunks, after they have run."""
    stock, prefix = set(), set()
    for chunk in chunks:
        for module in unwrap(chunk).modules():
            if hasattr(module, "core_attention"):
                name = type(module.core_attention).__name__
                stock.add(STOCK.get(name, name))
        if hooks := installed(chunk):
            prefix |= {kernel.name for kernel in hooks.kernels.values()}
    return Attention(", ".join(sorted(stock)) or None, ", ".join(sorted(prefix)) or None)
