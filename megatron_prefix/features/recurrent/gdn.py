"""GatedDeltaNet, which replaces attention in most layers of Qwen3-Next.  Pure.

Its segments run in features/recurrent/delta.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from megatron_prefix.errors import Reason
from megatron_prefix.features.recurrent.kind import CHUNK, Recurrent, Shape
from megatron_prefix.layers.kind import Override, Running
from megatron_prefix.refusals.table import DELTA_CP, DELTA_KERNEL, OWN_DELTA_CP

VARIANTS = frozenset({"gated_delta_net", "gdn"})
"""Megatron's `experimental_attention_variant`; the latter since 0.20."""


class GatedDeltaNet(Recurrent):
    """Megatron's GatedDeltaNet."""

    name, symbol, module, method = "GatedDeltaNet", "G", "GatedDeltaNet", "forward"
    divides, cut = ("linear_num_key_heads", "linear_num_value_heads"), CHUNK
    hybrid_since, cp_since = "0.17", "0.18"

    def knows(self, own: type, base: type) -> bool:
        """See Recurrent: also mcore-bridge's (ms-swift), which calls the same kernels."""
        return super().knows(own, base) or _is_bridges(own)

    def fills(self, config: Any, layer: int) -> bool:
        if getattr(config, "experimental_attention_variant", None) not in VARIANTS:
            return False
        every = config.linear_attention_freq
        return (layer + 1) % every != 0 if isinstance(every, int) else bool(every[layer])

    def shape(self, config: Any) -> Shape:
        """See Recurrent; projected are queries, keys, values, gate, beta and alpha."""
        heads = config.linear_num_value_heads
        key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        keys, values = config.linear_num_key_heads * key_dim, heads * value_dim
        scan = 3 * key_dim * value_dim + 2 * CHUNK * (key_dim + value_dim)
        return Shape(
            (keys, keys, values, values, heads, heads), (keys, keys, values), values,
            config.linear_conv_kernel_dim, heads * key_dim * value_dim, heads * scan,
        )  # fmt: skip

    def refusals(self, number: int, module: Any, model: Any) -> Iterator[Reason]:
        """See Kind; on a GPU the rule is tried, once a process."""
        from megatron_prefix.features.recurrent import probe
        from megatron_prefix.layers.releases import is_since

        config = model.config
        if config.context_parallel_size > 1 and _is_bridges(type(module)):
            yield OWN_DELTA_CP.given()
        elif config.context_parallel_size > 1 and not is_since(self.cp_since):
            yield DELTA_CP.given()
        if next(model.parameters()).device.type != "cuda":
            return
        ranks = config.tensor_model_parallel_size * config.context_parallel_size
        why = probe.refusals(
            "cuda", config.linear_key_head_dim, config.linear_value_head_dim,
            config.linear_num_value_heads // ranks,
        )[self.module]  # fmt: skip
        if why:
            yield DELTA_KERNEL.given("GatedDeltaNet", why)

    def overrides(self, module: Any, number: int, running: Running) -> Iterable[Override]:
        from megatron_prefix.features.recurrent.delta import GatedDeltaLayer

        return GatedDeltaLayer(module, number, running).overrides()


def _is_bridges(own: type) -> bool:
    """Whether a class runs mcore-bridge's forward, which finds both kernels by global names."""
    forward: Any = getattr(own, "forward", None)
    if not getattr(forward, "__module__", "").startswith("mcore_bridge."):
        return False
    kernels = {"causal_conv1d", "chunk_gated_delta_rule"}
    called = kernels <= {*forward.__code__.co_names}
    return called and all(forward.__globals__.get(kernel) is not None for kernel in kernels)
