"""Self-attention with a sliding window: a span leaves K and V of its last positions.  Pure.

A query sees its own position and the `window` before it, so descendants read no more of a span than
its last positions, and attention costs the same at every position. A model has such layers and full
ones in turn (gpt-oss, Gemma 3, MiMo), or no other (Mistral). What of segments is other than in
layers/blocks/core.py is in features/windows/windowed.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from megatron_prefix.errors import Reason
from megatron_prefix.layers import fused_yarn
from megatron_prefix.layers.attention import Attention, InSegments, exchanged_by, window_of
from megatron_prefix.layers.kind import Override, Running
from megatron_prefix.plan.layer_numbers import LayerWork, Payload, Sharding
from megatron_prefix.refusals.table import WINDOW_AHEAD, WINDOW_CP, WINDOW_FUSED
from megatron_prefix.tree.payload_map import Form


class Window(Attention):
    """Megatron's SelfAttention, causal, with a `window_size`."""

    name, has_window = "attention with a window", True

    def form_in(self, module: Any) -> Form:
        return Form("positions", self.window(module))

    def fills(self, config: Any, layer: int) -> bool:
        """See Kind; as `is_layer_window_attention` of megatron/core/transformer/utils.py."""
        window = getattr(config, "window_size", None)
        # Some models have a number there, and layers of their own that know what it means.
        if not isinstance(window, Sequence) or window[0] < 0:
            return False
        every = getattr(config, "window_attn_skip_freq", None)
        if every is None:
            return True
        return (layer + 1) % every != 0 if isinstance(every, int) else bool(every[layer])

    def work(self, config: Any) -> LayerWork:
        """See Kind; every position sees as many, but for the first ones of a rollout."""
        full = super().work(config)
        return LayerWork(full.products + full.pairs * (config.window_size[0] + 1))

    def payload(self, config: Any, sharding: Sharding) -> Payload:
        rows = Form("positions", config.window_size[0])
        return replace(super().payload(config, sharding), form=rows)

    def module_of(self, layer: Any) -> Any | None:
        module = super().module_of(layer)
        return None if module is None or window_of(module) is None else module

    def option_refusals(self, module: Any, config: Any) -> Iterator[Reason]:
        yield from super().option_refusals(module, config)
        before, behind = window_of(module) or (0, 0)
        if before < 1 or behind != 0:
            yield WINDOW_AHEAD.given((before, behind))
        softmax: Any = getattr(module.core_attention, "scale_mask_softmax", None)
        if getattr(softmax, "scaled_masked_softmax_fusion", False) and softmax.input_in_float16:
            yield WINDOW_FUSED.given()
        if config.context_parallel_size > 1:
            how = exchanged_by(module)
            if how not in (None, "a2a", "all_gather"):
                yield WINDOW_CP.given(how)

    def overrides(self, module: Any, number: int, running: Running) -> Iterable[Override]:
        from megatron_prefix.features.windows.windowed import Tails

        tails = Tails(self.form_in(module))
        yield module.core_attention, "forward", InSegments(module, number, running, tails).forward
        yield from fused_yarn.overrides(module, running)

    def window(self, module: Any) -> int | None:
        size = window_of(module)
        return None if size is None else size[0]
