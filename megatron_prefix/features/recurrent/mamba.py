"""Mamba2 (Nemotron-H).  Pure.

Its segments run in features/recurrent/scan.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from megatron_prefix.errors import Reason
from megatron_prefix.features.recurrent.kind import CHUNK, Recurrent, Shape
from megatron_prefix.layers.kind import Override, Running
from megatron_prefix.refusals.table import MAMBA_PATH

CONV_WIDTH = 4
"""Megatron has no option for it."""


class Mamba2(Recurrent):
    """Megatron's MambaMixer; only hybrid models have it."""

    name, symbol, module, method = "Mamba2", "M", "MambaMixer", "_ssm_training"
    divides = "mamba_num_groups", "mamba_num_heads"

    def shape(self, config: Any) -> Shape:
        """See Recurrent; projected are z, x, B, C and dt."""
        width, state_dim = config.mamba_head_dim, config.mamba_state_dim
        heads = getattr(config, "mamba_num_heads", None) or 2 * config.hidden_size // width
        inner, shared = heads * width, config.mamba_num_groups * state_dim
        return Shape(
            (inner, inner, shared, shared, heads), (inner, shared, shared), inner, CONV_WIDTH,
            inner * state_dim, 2 * inner * state_dim + CHUNK * (shared + inner),
        )  # fmt: skip

    def option_refusals(self, module: Any, config: Any) -> Iterator[Reason]:
        yield from super().option_refusals(module, config)
        if not module.use_mem_eff_path:
            yield MAMBA_PATH.given()

    def overrides(self, module: Any, number: int, running: Running) -> Iterable[Override]:
        from megatron_prefix.features.recurrent.scan import MambaLayer

        return MambaLayer(module, number, running).overrides()
