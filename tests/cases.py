"""The tables that tests of exactness draw from: families of models, layouts, options, trees; and
rows, each of which says of a case what must come out.

A new feature is a value of an axis: a line of FAMILIES, LAYOUTS, OPTIONS, or of an axis in
tests/oracle/case.py, and the rows that name it. `tests/judge.py` runs a row, `tests/test_cases.py`
all of them; `python -m tests.oracle` draws cases from the same tables.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron_prefix.lab.models.presets import PRESETS, RopeScaling
from megatron_prefix.lab.runtime.layout import Layout


class Family(NamedTuple):
    """A small model.

    Attributes:
        preset: of lab/models/presets.py.
        spec: fields of the preset that differ.
        config: fields of Megatron's TransformerConfig that differ.
        own_attention: keeps its own core attention, where others get the oracle's.
        since: release of megatron-core that runs it first.
        until: the first that does not; "": all later ones do.
        around: name of a context manager of tests/oracle/model.py that it is built and run in.
    """

    preset: str = "tiny-llama"
    spec: Mapping[str, Any] = MappingProxyType({})
    config: Mapping[str, Any] = MappingProxyType({})
    own_attention: bool = False
    since: str = "0"
    until: str = ""
    around: str = ""


def _windows(left: int, every: Any = 2, **more: Any) -> dict[str, Any]:
    return {"window_size": (left, 0), "window_attn_skip_freq": every, **more}


def _selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": [*modules]}


def _dsa(spec: Mapping[str, Any] | None = None, **config: Any) -> Family:
    spec = _LATENTS if spec is None else spec
    return Family("tiny-deepseek", spec, DSA | config, own_attention=True, around="rotating")


def _hybrid(pattern: str, num_further: int = 0, further: str = "*-") -> dict[str, Any]:
    fields = {"num_layers": len(pattern), "hybrid_override_pattern": pattern}
    if num_further:
        fields |= {"mtp_num_layers": num_further, "mtp_hybrid_override_pattern": further}
    return fields


_SINKS = {"softmax_type": "learnable"}
_ROUTERS = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.0}
_SEQUENCE = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1.0}
_GLOBAL = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 1.0}
_Z = {"moe_aux_loss_coeff": 1.0, "moe_z_loss_coeff": 1.0}
_BOTH = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
    "moe_aux_loss_coeff": [1.0, 0.7], "moe_z_loss_coeff": 0.5,
}  # fmt: skip
_ALL = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [1.0, 0.7, 2.0], "moe_z_loss_coeff": 0.5,
}  # fmt: skip
_BIAS = {
    "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid",
    "moe_router_bias_update_rate": 0.05,
}  # fmt: skip
_REPEATED = {"mtp_use_repeated_layer": True}
_ALL_GATHER = {"moe_token_dispatcher_type": "allgather", "variable_seq_lengths": False}
_LATENTS = {"num_moe_experts": None}
DSA = {
    "experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 16, "dsa_indexer_topk": 6,
    "dsa_indexer_head_dim": 16, "dsa_indexer_loss_coeff": 0.0,
}  # fmt: skip
"""With so many heads no score is zero: ties have no place here."""
_GDN = {"num_layers": 2, "linear_attention_freq": 2}
_FEW = {"num_moe_experts": 8, "moe_ffn_hidden_size": 32, "moe_aux_loss_coeff": 1e-2}
# GatedDeltaNet's convolution takes the MLP's activation, and only SiLU.
_DELTA = {"linear_attention_freq": None, "gated_linear_unit": True}
_DELTA = {n: v for n, v in vars(PRESETS["tiny-qwen3-next"]).items() if "linear_" in n} | _DELTA
DRAWN: dict[str, Family] = {
    "gqa": Family(), "dense": Family(spec={"num_query_groups": 4}),
    "qk_norm": Family("tiny-qwen3"), "mla": Family("tiny-deepseek", _LATENTS),
    "windows": Family(config=_windows(3, **_SINKS)),
    "gated_delta_net": Family("tiny-qwen3-next", {"linear_attention_freq": 2}),
    "mtp": Family(spec={"mtp_num_layers": 1}),
    "aux_loss": Family("tiny-moe", config=_ROUTERS | {"moe_aux_loss_coeff": 0.05}),
    "seq_aux_loss": Family("tiny-moe", config=_SEQUENCE | {"moe_aux_loss_coeff": 0.05}),
    "z_loss": Family("tiny-moe", config=_ROUTERS | {"moe_z_loss_coeff": 0.01}),
    "record": Family("tiny-moe", config=_ROUTERS | {"moe_enable_routing_replay": True}),
    "replay_forward": Family("tiny-moe", config=_ROUTERS | {"moe_enable_routing_replay": True}),
    "expert_bias": Family(
        "tiny-moe", config={"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0,
                            **_BIAS}
    ),
}  # fmt: skip
"""Models of random trainers."""
FAMILIES: dict[str, Family] = DRAWN | {
    # Options that reach attention or positions.
    "softmax scale": Family(config={"softmax_scale": 0.3}),
    "whole softmax scale": Family(config={"softmax_scale": 1}),
    "layer scaling": Family(config={"apply_query_key_layer_scaling": True}),
    "both scales": Family(config={"softmax_scale": 0.4, "apply_query_key_layer_scaling": True}),
    "a layer without rope": Family(config={"no_rope_freq": [0, 1]}),
    "interleaved rope": Family(config={"rotary_interleaved": True}),
    "scaled rope": Family(spec={"rope_scaling": RopeScaling(8.0), "rotary_base": 500000.0}),
    "l2 norm": Family(config={"qk_l2_norm": True}),
    "residual behind the norm": Family(config={"apply_residual_connection_post_layernorm": True}),
    "biases": Family(config={"add_bias_linear": True, "add_qkv_bias": True}),
    "tied": Family(spec={"tie_embeddings": True, "num_query_groups": 4, "num_layers": 3}),
    "tied, norms": Family("tiny-qwen3", {"tie_embeddings": True, "num_query_groups": 4}),
    "untied, norms": Family("tiny-qwen3", {"tie_embeddings": False, "num_layers": 3}),
    "learned positions": Family(spec={"max_position": 96}, around="learned_positions"),
    "no positions": Family(spec={"max_position": 96}, around="no_positions"),
    # Latents.
    "mla rope": Family("tiny-deepseek", {**_LATENTS, "rope_type": "rope"}),
    "mla no q_lora": Family(
        "tiny-deepseek", {**_LATENTS, "q_lora_rank": None, "qk_layernorm": False}
    ),
    "mla no norms": Family("tiny-deepseek", {**_LATENTS, "qk_layernorm": False}),
    "mla wide values": Family("tiny-deepseek", {**_LATENTS, "v_head_dim": 28}),
    "mla mscales": Family(
        "tiny-deepseek",
        {**_LATENTS, "mscale": 0.707, "mscale_all_dim": 0.707, "rotary_scaling_factor": 40.0},
    ),
    "mla marked": Family("tiny-deepseek", _LATENTS, around="marked projections"),
    # Windows and sinks.
    **{f"window {n}": Family(spec={"num_layers": 3}, config=_windows(n))
       for n in (1, 7, 8, 30, 200)},
    "mistral": Family(spec={"num_layers": 3}, config=_windows(6, None)),
    "gemma": Family(spec={"num_layers": 3}, config=_windows(6, [1, 1, 0])),
    "windows last": Family(spec={"num_layers": 3}, config=_windows(6, [0, 1, 1])),
    "sinks": Family(config=_SINKS),
    "off by one": Family(config={"softmax_type": "off-by-one"}),
    "gpt-oss": Family(spec={"num_layers": 3}, config=_windows(5, **_SINKS)),
    "gpt-oss experts": Family("tiny-gpt-oss"),
    # Recurrent layers.
    "gdn": Family("tiny-qwen3-next", _GDN),
    "gdn alone": Family("tiny-qwen3-next", _GDN | {"linear_attention_freq": 3}),
    "gdn experts": Family("tiny-qwen3-next", _GDN | _FEW),
    "mamba": Family("tiny-nemotron-h", _hybrid("M*M-")),
    "mamba alone": Family("tiny-nemotron-h", _hybrid("M-M")),
    "gdn and mamba": Family("tiny-nemotron-h", {**_DELTA, **_hybrid("GM*G-M")}, since="0.17"),
    # Kimi Delta Attention, beside latent attention (miles, Megatron-Bridge). Its first positions
    # leave little, of which there is a norm.
    **{name: Family("tiny-deepseek", {**_LATENTS, "num_layers": 4, "layernorm_epsilon": 1e-2},
                    own_attention=True, around=name) for name in ("kimi", "kimi alone")},
    # Several residual streams.
    "streams": Family("tiny-qwen3", config={"enable_mhc_connections": True}, since="0.20",
                      around="streams"),
    # Sparse attention.
    "dsa": _dsa(), "dsa two keys": _dsa(dsa_indexer_topk=2),
    "dsa all keys": _dsa(dsa_indexer_topk=200),
    "dsa rope": _dsa({**_LATENTS, "rope_type": "rope"}),
    "dsa no q_lora": _dsa({**_LATENTS, "q_lora_rank": None, "qk_layernorm": False}),
    "dsa wide indexer": _dsa(dsa_indexer_n_heads=24, dsa_indexer_head_dim=64),
    "dsa mtp": _dsa({**_LATENTS, "mtp_num_layers": 1}), "dsa experts": _dsa({}),
    "dsa dense loss": _dsa({}, dsa_indexer_loss_coeff=0.5),
    "dsa sparse loss": _dsa(dsa_indexer_loss_coeff=0.5, dsa_indexer_use_sparse_loss=True),
    # A trainer's own, of packs; all layers choose, or follow what one before them has chosen.
    **{f"own {name}": Family("tiny-deepseek", {**_LATENTS, **fields}, own_attention=True,
                             around=f"own {name}")
       for name, fields in (("sparse", {}), ("sparse sharing", {"num_layers": 4}))},
    "own sparse rope": Family("tiny-deepseek", {**_LATENTS, "rope_type": "rope"},
                              own_attention=True, around="own sparse"),
    "own sparse experts": Family("tiny-deepseek", {"num_layers": 4}, own_attention=True,
                                 around="own sparse sharing"),
    # A trainer's own GatedDeltaNet, of packs (slime, miles), by where the rule stands.
    **{f"own delta {net}": Family(own_attention=True, around=f"own delta {net}")
       for net in ("attribute", "global", "keywords")},
    "own delta on stages": Family(spec={"num_layers": 4}, own_attention=True,
                                  around="own delta on stages"),
    "own delta alone": Family(own_attention=True, around="own delta alone"),
    "own delta experts": Family("tiny-moe", {}, _Z, own_attention=True,
                                around="own delta attribute"),
    "own delta mtp": Family("tiny-moe", {"mtp_num_layers": 1}, _Z, own_attention=True,
                            until="0.19", around="own delta mtp"),
    # Adapters beside frozen layers.
    **{name: Family(around=name)
       for name in ("adapted", "switched", "adapted fc2", "adapted last", "adapted first")},
    "adapted experts": Family("tiny-moe", around="adapted"),
    # Models that are frozen but for some parameters.
    "mla, projection frozen": Family("tiny-deepseek", _LATENTS,
                                     around="all but linear_kv_up_proj embedding"),
    "gdn, fc2 alone": Family("tiny-qwen3-next", _GDN, around="only linear_fc2"),
    "mamba, A_log alone": Family("tiny-nemotron-h", _hybrid("M*M"), around="only A_log"),
    "routers frozen": Family(
        "tiny-deepseek", {"moe_layer_freq": (False, True)}, _Z, around="all but router norm"
    ),
    # By ModelOpt (tests/core/alignment/test_quantised.py).
    **{f"quantised: {name}": Family(own_attention=True, around=f"quantised: {name}")
       for name in ("weights", "blocks of weights", "queries, keys and values",
                    "a scale of a whole tensor", "mixed")},
    "quantised: by token": Family("tiny-moe", own_attention=True, around="quantised: by token"),
    # Options of pipelines.
    "a stage without layers": Family(config={"pipeline_model_parallel_layout": "Ett|L"}),
    "outputs freed": Family(config={"deallocate_pipeline_outputs": True}),
    "equal lengths": Family(config={"variable_seq_lengths": False}),
    "turns of three": Family(config={"microbatch_group_size_per_vp_stage": 3}),
    # What a later release can.
    "gdn in packs": Family("tiny-qwen3-next", _GDN, since="0.18"),
    "gdn with CP": Family("tiny-qwen3-next", _GDN, since="0.18"),
    "mamba in virtual stages": Family("tiny-nemotron-h", _hybrid("M*M-"), since="0.17"),
    # Experts. Coefficients are 1, so that a wrong weight of an auxiliary loss changes gradients by
    # as much as the loss itself.
    "experts": Family("tiny-moe", config={"moe_aux_loss_coeff": 0.0}),
    "experts aux": Family("tiny-moe", config={"moe_aux_loss_coeff": 1.0}),
    "experts seq": Family("tiny-moe", config=_SEQUENCE),
    "experts global": Family("tiny-moe", config=_GLOBAL),
    "experts z": Family("tiny-moe", config={"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 1.0}),
    "experts both": Family("tiny-moe", config=_BOTH),
    "experts all": Family("tiny-moe", config=_ALL),
    "experts sigmoid": Family("tiny-moe", config=_Z | {"moe_router_score_function": "sigmoid"}),
    "experts bias": Family("tiny-moe", config=_Z | _BIAS),
    "experts bias alone": Family("tiny-moe", config={"moe_aux_loss_coeff": 0.0, **_BIAS}),
    "experts shared": Family("tiny-moe", config=_Z | {"moe_shared_expert_intermediate_size": 24}),
    "experts in groups": Family(
        "tiny-moe", config=_Z | {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
    ),
    "experts pre-softmax": Family(
        "tiny-moe", config=_Z | {"moe_router_pre_softmax": True, "moe_router_topk": 3}
    ),
    "experts behind a dense layer": Family("tiny-moe", {"moe_layer_freq": (False, True)}, _Z),
    "experts all-gather": Family("tiny-moe", config=_Z | _ALL_GATHER),
    "mla experts": Family(
        "tiny-deepseek", config={"moe_router_load_balancing_type": "aux_loss"}
    ),
    # Routers that follow routes; the schedule may ask for them.
    **{name: Family("tiny-moe", spec, _Z | _BIAS | {"moe_enable_routing_replay": True})
       for name, spec in (("replay", {}), ("replay asked", {}),
                          ("replay mtp", {"mtp_num_layers": 1}))},
    **{f"replay {trainer}": Family("tiny-moe", {}, _Z, around=f"queues of {trainer}")
       for trainer in ("slime", "miles")},
    # Multi-token prediction.
    "mtp experts": Family("tiny-moe", {"mtp_num_layers": 1}, _Z),
    "mtp norms": Family("tiny-qwen3", {"mtp_num_layers": 1}),
    "mtp tied": Family(spec={"mtp_num_layers": 1, "tie_embeddings": True}),
    "mtp gdn": Family("tiny-qwen3-next", _GDN | {"mtp_num_layers": 1}),
    "mtp biases": Family("tiny-moe", {"mtp_num_layers": 1}, _BOTH | _BIAS),
    "mtp global": Family("tiny-moe", {"mtp_num_layers": 1}, _GLOBAL),
    "mtp learned": Family(spec={"mtp_num_layers": 1, "max_position": 96},
                          around="learned_positions"),
    "mtp no positions": Family(spec={"mtp_num_layers": 1, "max_position": 96},
                               around="no_positions"),
    # Of later releases: calls without labels, and heads that train nothing but themselves.
    "mtp without labels": Family(spec={"mtp_num_layers": 1}, since="0.19"),
    "mtp detached": Family(spec={"mtp_num_layers": 1, "tie_embeddings": True},
                           config={"mtp_detach_heads": True}, since="0.19"),
    # slime and miles change releases before 0.19.
    "mtp keyword": Family("tiny-qwen3", {"mtp_num_layers": 1}, until="0.19", around="mtp keyword"),
    "mtp 3 keyword": Family(spec={"mtp_num_layers": 3, "tie_embeddings": True}, until="0.19",
                            around="mtp keyword"),
    "mtp 2 keyword experts": Family("tiny-moe", {"mtp_num_layers": 2}, _Z, until="0.19",
                                    around="mtp keyword"),
    "mtp unused": Family("tiny-qwen3", {"mtp_num_layers": 1}, until="0.19",
                         around="mtp keyword unused"),
    "mtp unused experts": Family("tiny-moe", {"mtp_num_layers": 1}, _Z, until="0.19",
                                 around="mtp keyword unused"),
    "mtp 2": Family("tiny-qwen3", {"mtp_num_layers": 2}),
    "mtp 5": Family(spec={"mtp_num_layers": 5}),
    "mtp 3 mla": Family("tiny-deepseek", {**_LATENTS, "mtp_num_layers": 3}),
    "mtp 2 windows": Family(spec={"mtp_num_layers": 2}, config=_windows(3, None)),
    "mtp 2 experts": Family("tiny-moe", {"mtp_num_layers": 2}, _Z),
    # One layer that runs for every further label.
    "mtp 3 repeated": Family(spec={"mtp_num_layers": 3}, config=_REPEATED, since="0.17"),
    "mtp 5 repeated": Family("tiny-qwen3", {"mtp_num_layers": 5},
                             _REPEATED | {"mtp_detach_heads": True}, since="0.19"),
    "mtp 2 repeated mla": Family("tiny-deepseek", {"mtp_num_layers": 2}, _REPEATED, since="0.17"),
    "mtp 2 repeated experts": Family("tiny-moe", {"mtp_num_layers": 2}, _BOTH | _BIAS | _REPEATED,
                                     since="0.17"),
    # Hybrid models, whose layers for further labels are stacks.
    "mtp mamba": Family("tiny-nemotron-h", _hybrid("M*M-", 1), since="0.17"),
    "mtp 2 mamba": Family("tiny-nemotron-h", _hybrid("M*M-", 2, "M*-") | {"tie_embeddings": True},
                          since="0.17"),
    "mtp 2 mamba repeated": Family("tiny-nemotron-h", _hybrid("M*M-", 2, "*M"), _REPEATED,
                                   since="0.17"),
    "mtp 5 mamba repeated": Family("tiny-nemotron-h", _hybrid("MEM*", 5, "*E") | _FEW,
                                   _REPEATED | {"mtp_detach_heads": True}, since="0.19"),
    "mtp 2 gdn and mamba": Family(
        "tiny-nemotron-h", {**_DELTA, **_hybrid("GM*G-M", 2, "G*-")}, since="0.17"),
}  # fmt: skip


def _layout(name: str) -> Layout:
    sizes = {kind: int(size) for kind, size in re.findall(r"([a-z]+)(\d)", name)}
    return Layout.fill(**sizes, sequence_parallel="tp" in sizes and name != "tp2")


LAYOUTS = {
    name: _layout(name) for name in (
        "one tp2 tp2_sp pp2 cp2 dp2 ep2 pp4 pp2_vpp2 pp3_vpp2 cp4 dp3 tp2_pp2 tp2_cp2 tp2_dp2"
        " tp2_ep2 cp2_pp2 cp2_dp2 cp2_ep2 pp2_dp2 pp2_ep2 dp4_ep2 pp2_vpp2_dp2 cp2_ep4"
        " tp2_cp2_ep2_pp2"
    ).split()
}  # fmt: skip
"""Sequence parallelism beside every other kind, and with `_sp`."""
_GRAPHS = {"graph_tokens": 48, "segment_tokens": 24}
OPTIONS: dict[str, dict[str, Any]] = {
    "small": {"segment_tokens": 24, "chunk_tokens": 12},
    "whole": {},
    "recompute": {"segment_tokens": 32, "memory": "recompute"},
    "light": {"segment_tokens": 32, "memory": "recompute_act"},
    "across_ranks": {"segment_tokens": 24, "chunk_tokens": 12, "across_ranks": "on"},
    # Of rows alone.
    "across whole": {"across_ranks": "on"},
    "across recompute": {"across_ranks": "on", "memory": "recompute"},
    "chunks of 7": {"chunk_tokens": 7}, "chunks of 2": {"chunk_tokens": 2},
    "packs of chunks": {"chunk_tokens": 5, "segment_tokens": 16},
    "small packs": {"segment_tokens": 30}, "depth first": {"segment_tokens": 8},
    "a rollout a wave": {"segment_tokens": 1},
    "recompute chunks": {"memory": "recompute", "chunk_tokens": 16},
    "light chunks": {"memory": "recompute_act", "chunk_tokens": 16},
    "offload": {"memory": "offload", "chunk_tokens": 16},
    "a layer on the host": {"cache_host_layers": 1, "memory": "offload"},
    "all on the host": {"cache_host_layers": 9, "memory": "recompute", "chunk_tokens": 7},
    "losses in leaves": {"loss_in_leaves": True, "segment_tokens": 24},
    "no parent": {"min_gain": 10**6}, "joined": {"min_gain": 1},
    "joined 100": {"min_gain": 1, "segment_tokens": 100},
    "joined 64": {"min_gain": 1, "segment_tokens": 64},
    "joined 24": {"min_gain": 1, "segment_tokens": 24},
    "budget": {"memory": "auto", "memory_budget_gb": 1e-4, "chunk_tokens": 8, "segment_tokens": 24},
    "wave": {"cp_reduce": "wave", "chunk_tokens": 8, "segment_tokens": 24},
    "segment": {"cp_reduce": "segment", "chunk_tokens": 8, "segment_tokens": 24},
    "wave recompute": {"cp_reduce": "wave", "memory": "recompute", "segment_tokens": 32},
    "segment recompute": {"cp_reduce": "segment", "memory": "recompute", "segment_tokens": 32},
    "auto chunks": {"chunk_tokens": "auto"}, "keeps 5": {"min_gain": 5, "segment_tokens": 20},
    "no gain": {"min_speedup": 100.0}, "gain of 2": {"min_speedup": 2.0, "across_ranks": "off"},
    # Layers on CUDA graphs, each of one memory policy.
    "graphs": {**_GRAPHS, "memory": "retain"},
    "graphs in chunks": {**_GRAPHS, "memory": "retain", "chunk_tokens": 8},
    **{
        f"graphs {memory}": {**_GRAPHS, "memory": memory, "chunk_tokens": 8}
        for memory in ("recompute", "recompute_act", "offload")
    },
}  # fmt: skip
"""Fields of PrefixConfig; `min_gain` is 0 where it is not named."""
RANDOM_OPTIONS = (
    *("small", "whole", "recompute", "light", "chunks of 7", "packs of chunks", "small packs"),
    *("depth first", "a rollout a wave", "recompute chunks", "offload", "a layer on the host"),
    *("all on the host", "no parent", "joined", "joined 64", "joined 24", "budget", "keeps 5"),
)
PACKED = ("gqa", "qk_norm", "mla", "gpt-oss", "experts", "experts both", "experts bias")
"""Families that the stock schedule of every release runs in packs and rows."""
RECOMPUTES: dict[str, dict[str, Any]] = {
    "full": {},
    "selective": {},
    "block": {"recompute_granularity": "full", "recompute_method": "block",
              "recompute_num_layers": 1},
    "uniform": {"recompute_granularity": "full", "recompute_method": "uniform",
                "recompute_num_layers": 2},
    **{name: _selective(*name.split("+")) for name in (
        "core_attn", "layernorm", "mlp", "mhc", "mla_up_proj", "mla_up_proj+core_attn",
        "moe+layernorm", "core_attn+mlp+layernorm",
    )},
}  # fmt: skip
"""Megatron's own recomputation, and fields of TransformerConfig that say so; none of those: see
`build_model`."""


@dataclass(frozen=True)
class Row:
    """A case, and what must come out.

    Attributes:
        values: of the axes of a Case (tests/oracle/case.py) that are not its simplest.
        mode: of the prefix schedule.
        expects: "equal": shared in every step, and equal to the stock schedule to rounding;
            "fallback": the stock schedule bit for bit; "refused": an error of ours by name;
            "wrong": with a mistake; "ends": an error of ours by name where stock goes on.
        says: stands in the last step's reason, or in the error.
        mistake: of tests/mistakes.py, which ours runs with; `says` has what it makes wrong (kinds
            of a Verdict).
        shares: which steps are shared; empty: all.
        is_random: a drawn tree may have nothing to share.
        ran: what must have been in a step: names of `facts` (tests/judge.py). No row passes
            because nothing happened.
    """

    values: dict[str, Any] = field(hash=False)
    mode: str = "on"
    expects: str = "equal"
    says: str = ""
    shares: tuple[bool, ...] = ()
    is_random: bool = False
    mistake: str = ""
    ran: tuple[str, ...] = ()

    def __str__(self) -> str:
        more = (*{self.mode} - {"on"}, *filter(None, [self.mistake]))
        return ", ".join(map(str, (*self.values.values(), *more)))


def row(model: str = "gqa", options: str = "whole", *ran: str, **values: Any) -> Row:
    """Of one step of a tree with spans of all lengths, in fp64."""
    plain = {"model": model, "options": options, "tree": "lengths", "session": "once",
             "form": "one", "returns": "three", "ddp": "wrapped"}  # fmt: skip
    if model.startswith("own"):
        plain["form"] = "thd"
    if "mtp" in model or model == "learned positions":
        plain["positions"] = "given"
    return Row({**plain, **values}, ran=ran)


FURTHER = {"returns": "per_token", "loss_mask": "absent", "tree": "turns"}
"""With so many labels that some are left after several places."""


def auto_row(says: str = "", *shares: bool, **values: str) -> Row:
    """Of a trainer in mode auto, whose first step is watched; `shares`: which of its steps are
    shared, none of two if nothing is said."""
    session = "train_long" if len(shares) > 2 else "train"
    plain = {"model": "gqa", "session": session, "ddp": "wrapped"}
    expects = "equal" if any(shares) else "fallback"
    return Row({**plain, **values}, "auto", expects, says, shares or (False, False))


def random_row(model: str, seed: int, **values: str) -> Row:
    """Of random trees; form, loss, scale and options are drawn by the seed where not given."""
    draw = random.Random(f"{model} {seed}")
    pack = "thd_padded" if LAYOUTS[values.get("layout", "one")].alignment > 1 else "thd"
    plain = {
        "model": model, "seed": seed, "tree": "random", "ddp": "wrapped", "session": "once",
        "form": draw.choice(("one", pack, "rows") if model in PACKED else ("one",)),
        "options": draw.choice(RANDOM_OPTIONS), "returns": draw.choice(("three", "per_token")),
        "scale": draw.choice(("none", "constant")),
        "recompute": draw.choice(("none", "none", "full", "selective")),
    }  # fmt: skip
    if model.startswith("dsa"):  # Megatron does not recompute its attention alone
        plain["recompute"] = draw.choice(("none", "full"))
    if "mtp" in model:
        plain |= {"positions": "given", "returns": "per_token", "scale": "none"}
    return Row({**plain, **values}, is_random=True)


def wrong(mistake: str, kinds: str, model: str, options: str = "small", **values: str) -> Row:
    """A row that a mistake makes wrong, in such kinds."""
    return replace(row(model, options, **values), expects="wrong", mistake=mistake, says=kinds)
