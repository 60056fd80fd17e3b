"""A stand-in for transformer-engine's core attention, for trainers' attention that asks for it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests.oracle.attention import CausalAttention


class TEDotProductAttention(nn.Module):
    """Causal whatever the mask is; called and named as the real one, and built as Megatron's."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()
        self.inside = CausalAttention(*args, **options)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inside"), name)

    def forward(self, *args: Any, **named: Any) -> Tensor:
        """See `CausalAttention.forward`."""
        attended: Tensor = self.inside(*args, **named)
        return attended


TEDotProductAttention.__module__ = TEDotProductAttention.forward.__module__ = (
    "megatron.core.extensions.transformer_engine"
)


def put_into(model: nn.Module) -> None:
    """Gives every attention layer of a model one of them."""
    for module in [module for module in model.modules() if hasattr(module, "core_attention")]:
        module.core_attention = TEDotProductAttention(
            module.config, module.layer_number, module.attn_mask_type, module.attention_type,
            softmax_scale=module.config.softmax_scale, pg_collection=module.pg_collection,
        )  # fmt: skip
