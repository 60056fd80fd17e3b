"""How a model is computed, as far as that decides what its layers keep.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_prefix.plan.layer_numbers import Sharding


@dataclass(frozen=True)
class Execution:
    """How a model is computed: by default in bf16, by transformer-engine's fused layers.

    Attributes:
        itemsize: bytes of a number.
        num_stages: pipeline size times virtual stages.
        tp, cp, sequence_parallel: the layout.
        fused_layers: transformer-engine's layers, else Megatron's local ones.
        fused_activation, fused_rope, fused_loss: whether these are one kernel each.
        fused_gradients: whether products add gradients of weights to the main gradients themselves.
        recompute: "none", "full" or "selective".
        method, num_layers, modules: Megatron's options of recomputation.
        keeps_outputs: see `Footprint`.
        holds_projection: whether a recurrent layer's convolution saves its input where the
            projection has left it, so that all of that stays (Megatron-Core since 0.18).
    """

    itemsize: int = 2
    num_stages: int = 1
    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    fused_layers: bool = True
    fused_activation: bool = True
    fused_rope: bool = True
    fused_loss: bool = True
    recompute: str = "none"
    method: str = "uniform"
    num_layers: int = 1
    modules: tuple[str, ...] = ("core_attn",)
    keeps_outputs: bool = True
    fused_gradients: bool = True
    holds_projection: bool = False

    @property
    def sharding(self) -> Sharding:
        return Sharding(self.tp, self.cp, self.itemsize)

    @property
    def sequence_ranks(self) -> int:
        """Tensor-parallel ranks that share the positions between layers' matrix products."""
        return self.tp if self.sequence_parallel else 1

    def selects(self, module: str) -> bool:
        """Whether Megatron's selective recomputation has a module."""
        return self.recompute == "selective" and module in self.modules

    @classmethod
    def of_config(cls, config: Any, recomputes: bool = True) -> Execution:
        """Of a TransformerConfig; `recomputes`: whether the model follows its
        `recompute_granularity` "full"."""
        recompute = config.recompute_granularity or "none"
        stages = config.virtual_pipeline_model_parallel_size or 1
        return cls(
            config.params_dtype.itemsize, stages * config.pipeline_model_parallel_size,
            config.tensor_model_parallel_size, config.context_parallel_size,
            bool(config.sequence_parallel), config.transformer_impl == "transformer_engine",
            bool(config.bias_activation_fusion), bool(config.apply_rope_fusion),
            bool(config.cross_entropy_loss_fusion),
            recompute if recomputes or recompute != "full" else "none",
            config.recompute_method or "", config.recompute_num_layers or 1,
            tuple(config.recompute_modules or ()), not config.deallocate_pipeline_outputs,
            bool(config.gradient_accumulation_fusion),
        )  # fmt: skip
