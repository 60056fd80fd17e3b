"""Sparse attention that a trainer brings itself: slime's and miles' DeepSeek-V3.2 and GLM-5.  Pure.

Latents are never expanded: queries are put into their space, and a kernel reads the rows that an
indexer has chosen. A span leaves these rows and its index keys. In GLM-5.2 some layers have no
indexer, and read the rows that an earlier layer has chosen (`FollowingDSA`). No loss looks at the
indexer's scores, so nothing trains it. A module is told by what it calls; its segments run in
features/own_dsa/layer.py. ("DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models",
section 2.1.)
"""

from __future__ import annotations

import dis
import os
import types
from collections.abc import Iterable, Iterator
from typing import Any

from megatron_prefix.errors import Reason
from megatron_prefix.features.mla.kind import MLA
from megatron_prefix.layers.attention import ROTARY
from megatron_prefix.layers.kind import Override, Running, owner
from megatron_prefix.plan.layer_numbers import LayerWork, Payload, Sharding
from megatron_prefix.refusals.table import (
    MLA_WITHOUT_SP,
    OTHER_ROTARY,
    OWN_DSA_ALIGNED,
    OWN_DSA_MTP,
    OWN_FORWARD,
)
from megatron_prefix.tree.cp_layout import Slices
from megatron_prefix.tree.payload_map import Form

WHOLE = Form("positions", 1 << 30)
"""Rows of all positions, on every context-parallel rank: the modules gather them anyway."""
_INPUTS = "get_absorb_query_key_value_tensors"
_CALLS = {
    "forward": frozenset({
        "generate_varlen_mask_params", "lighting_indexer", "scatter_to_sequence_parallel_region",
        "SparseMLA",
    }),
    _INPUTS: frozenset({"gather_from_sequence_parallel_region"}),
}  # fmt: skip
"""What methods call by global names."""
_MAY_CALL = frozenset({
    "os", "torch", "parallel_state", "indexer_replay_manager", "WeightLinearFunction",
    "SGLangSparseMLA", "_get_fp8_aligned_absorb_weight", "_get_sglang_indexer_head_weights",
    "_fake_quant_fp8_kv_cache", "_get_sglang_rope_cache", "_SGLangRoPE",
    "_apply_sglang_rope_forward",
})  # fmt: skip
"""What else they may: it keeps positions apart, or is refused by its switch."""
_SWITCHES = (
    "MEGATRON_USE_SGLANG_FP8_INDEXER", "MEGATRON_USE_SGLANG_SPARSE_MLA", "MEGATRON_USE_SGLANG_ROPE",
    "DSA_KV_FP8_QAT",
)  # fmt: skip


class OwnDSA(MLA):
    """Attention of slime's and miles', with an indexer."""

    name, symbol = "a trainer's own sparse attention", ""  # no symbol: in no hybrid model
    form, slices = WHOLE, Slices.CONTIGUOUS
    follows = False
    """Whether it reads rows that an earlier layer has chosen."""

    def told(self, layer: Any) -> dict[str, Any]:
        """See Kind: how many rows a query reads."""
        module = _own_attention(layer)
        return {} if module is None else {"own_dsa_topk": module.index_topk}

    def fills(self, config: Any, layer: int) -> bool:
        """See Kind; the trainers put the indexer's sizes into the config of every stage."""
        if not hasattr(config, "index_num_attention_heads"):
            return False
        every = getattr(config, "index_topk_freq", None) or 1
        first = getattr(config, "index_skip_topk_offset", None) or 0
        return (max(layer + 1 - first, 0) % every != 0) is self.follows

    def parameters(self, config: Any) -> int:
        """See Kind."""
        weights = super().parameters(config)
        if not self.follows:
            heads, width = config.index_num_attention_heads, config.index_head_dim
            weights += config.q_lora_rank * heads * width + config.hidden_size * (width + heads)
        return weights

    def work(self, config: Any) -> LayerWork:
        """See Kind; of what attention reads there is as much at every position, but the first."""
        row = 2 * config.kv_lora_rank + config.qk_pos_emb_head_dim
        read = getattr(config, "own_dsa_topk", 0) * config.num_attention_heads * row
        scores = config.index_num_attention_heads * config.index_head_dim
        return LayerWork(self.parameters(config) + read, 0 if self.follows else scores)

    def payload(self, config: Any, sharding: Sharding) -> Payload:
        """See Kind: rows, and index keys."""
        width = config.kv_lora_rank + config.qk_pos_emb_head_dim
        width += 0 if self.follows else config.index_head_dim
        return Payload.of(WHOLE, width, sharding.itemsize)

    def module_of(self, layer: Any) -> Any | None:
        """See Kind."""
        module = _own_attention(layer)
        is_own = module is not None and module.skip_topk is self.follows
        return module if is_own and all(owner(module, name) for name in _CALLS) else None

    def refusals(self, number: int, module: Any, model: Any) -> Iterator[Reason]:
        """See Kind."""
        if not all(_is_known(module, name) for name in _CALLS):
            yield OWN_FORWARD.given(number, type(module).__name__)
        rotary = module.rotary_pos_emb
        if not {owner(rotary, name) for name in ("forward", "get_emb")} <= ROTARY:
            yield OTHER_ROTARY.given(type(rotary).__name__)
        if getattr(model.config, "mtp_num_layers", None):
            yield OWN_DSA_MTP.given()

    def option_refusals(self, module: Any, config: Any) -> Iterator[Reason]:
        """See Kind."""
        if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
            yield MLA_WITHOUT_SP.given()
        for switch in _SWITCHES:
            if os.environ.get(switch, "0").strip().lower() not in ("0", "", "false", "no", "off"):
                yield OWN_DSA_ALIGNED.given(switch)

    def overrides(self, module: Any, number: int, running: Running) -> Iterable[Override]:
        """See Kind."""
        from megatron_prefix.features.own_dsa.layer import OwnSparse

        return OwnSparse(module, number, running).overrides()


class FollowingDSA(OwnDSA):
    """One without an indexer."""

    follows = True


def _own_attention(layer: Any) -> Any | None:
    """The self-attention of a layer if it is one of these, whatever its instance overrides."""
    module = getattr(layer, "self_attention", None)
    names = {base.__name__ for base in type(module).__mro__}
    return module if "DSAMultiLatentAttention" in names and hasattr(module, "skip_topk") else None


def _is_known(module: Any, method: str) -> bool:
    """Whether a method calls what it is to, and nothing else that this file does not know."""
    function = getattr(type(module), method)
    called = {*_names(function.__code__)} & function.__globals__.keys()
    return called >= _CALLS[method] and called <= _CALLS[method] | _MAY_CALL


def _names(code: types.CodeType) -> Iterator[str]:
    """Global names that are read in a function, and in those inside it."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval
    for inside in code.co_consts:
        if isinstance(inside, types.CodeType):
            yield from _names(inside)
