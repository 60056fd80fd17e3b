"""Models from Hugging Face's config.json: presets, what a file leaves out, and what is refused."""

import dataclasses
import importlib
import json
import math

import pytest

from megatron_prefix.errors import UserError
from megatron_prefix.lab.models import hf
from megatron_prefix.lab.models.presets import PRESETS, RopeScaling, resolve

LLAMA3 = {
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 8192,
    "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "vocab_size": 128256,
}  # fmt: skip
QWEN3 = {
    "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288,
    "max_position_embeddings": 40960, "model_type": "qwen3", "num_attention_heads": 32,
    "num_hidden_layers": 36, "num_key_value_heads": 8, "rope_theta": 1000000, "vocab_size": 151936,
}  # fmt: skip
QWEN3_MOE = {
    **QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "model_type": "qwen3_moe",
    "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
}  # fmt: skip
LLAMA31_ROPE = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3",
}  # fmt: skip
YARN = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "type": "yarn",
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "first_k_dense_replace": 3, "hidden_size": 7168,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_scaling": YARN, "rope_theta": 10000,
    "routed_scaling_factor": 2.5, "topk_group": 4, "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
MOONLIGHT = {
    **DEEPSEEK, "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 11264,
    "max_position_embeddings": 8192, "moe_intermediate_size": 1408, "n_group": 1,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_attention_heads": 16,
    "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
    "q_lora_rank": None, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446, "topk_group": 1, "vocab_size": 163840,
}  # fmt: skip
GLM = {
    "model_type": "glm4_moe_lite", "hidden_size": 2048, "intermediate_size": 10240,
    "moe_intermediate_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 20,
    "num_key_value_heads": 20, "n_routed_experts": 64, "q_lora_rank": 768, "v_head_dim": 256,
    "qk_nope_head_dim": 192, "rms_norm_eps": 1e-05, "rope_theta": 1000000,
    "max_position_embeddings": 202752, "partial_rotary_factor": 1.0, "vocab_size": 154880,
}  # fmt: skip
YARN_GPT = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
    "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False,
}  # fmt: skip
KINDS = ["sliding_attention", "full_attention"]
GPT_OSS = {
    "model_type": "gpt_oss", "head_dim": 64, "hidden_size": 2880, "intermediate_size": 2880,
    "layer_types": KINDS * 12, "max_position_embeddings": 131072, "num_attention_heads": 64,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "num_local_experts": 32, "rms_norm_eps": 1e-05, "rope_scaling": YARN_GPT, "rope_theta": 150000,
    "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "vocab_size": 201088,
}  # fmt: skip
QWEN3_NEXT = {
    **QWEN3_MOE, "full_attention_interval": 4, "head_dim": 256, "hidden_size": 2048,
    "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    "max_position_embeddings": 262144, "model_type": "qwen3_next", "moe_intermediate_size": 512,
    "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10,
    "num_hidden_layers": 48, "num_key_value_heads": 2, "partial_rotary_factor": 0.25,
    "rope_theta": 10000000, "shared_expert_intermediate_size": 512,
}  # fmt: skip
QWEN3_5 = {
    "full_attention_interval": 4, "head_dim": 256, "hidden_size": 4096, "intermediate_size": 12288,
    "linear_num_value_heads": 32,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8, "num_attention_heads": 16,
    "max_position_embeddings": 262144, "model_type": "qwen3_5_text", "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
        "rope_theta": 10000000, "rope_type": "default",
    }, "vocab_size": 248320,
}  # fmt: skip
NEMOTRON_H = {
    "conv_kernel": 4, "head_dim": 128, "hidden_size": 4096, "hybrid_override_pattern": "M-M-M-M*-M",
    "intermediate_size": 21504, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64,
    "mamba_num_heads": 128, "model_type": "nemotron_h", "n_groups": 8, "num_attention_heads": 32,
    "num_key_value_heads": 8, "ssm_state_size": 128, "vocab_size": 131072,
}  # fmt: skip
NEMOTRON_MOE = {
    "hybrid_override_pattern": "MEM-M-M*-E", "moe_intermediate_size": 96, "n_routed_experts": 16,
    "num_experts_per_tok": 6, "moe_shared_expert_intermediate_size": 192,
    "routed_scaling_factor": 2.5,
}  # fmt: skip


def loaded(folder, values):
    path = folder / "config.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    return hf.load(path)


SHORT = {name: value for name, value in GPT_OSS.items() if not name.startswith("rope_")}


@pytest.mark.parametrize(("preset", "values"), [
    ("llama3-8b", LLAMA3), ("qwen3-8b", QWEN3), ("qwen3-30b-a3b", QWEN3_MOE),
    ("qwen3-30b-a3b", {**QWEN3_MOE, "num_experts": None, "num_local_experts": 128}),
    ("deepseek-v3", DEEPSEEK), ("moonlight-16b-a3b", MOONLIGHT), ("glm-4.7-flash", GLM),
    ("gpt-oss-20b", GPT_OSS), ("gpt-oss-20b", {**SHORT, "layer_types": None}),  # its defaults
    ("gpt-oss-20b", {**SHORT, "rope_parameters": {**YARN_GPT, "rope_theta": 150000}}),
    ("qwen3-next-80b-a3b", QWEN3_NEXT), ("qwen3.5-9b", QWEN3_5),
])  # fmt: skip
def test_a_config_json_gives_the_preset_of_its_model(tmp_path, preset, values):
    expected = dataclasses.replace(PRESETS[preset], name=tmp_path.name)
    assert loaded(tmp_path, values) == expected
    assert resolve(str(tmp_path)) == expected


def test_rope_scaling_in_both_formats(tmp_path):
    old = loaded(tmp_path, {**LLAMA3, "rope_scaling": LLAMA31_ROPE})
    assert old.rope_scaling == RopeScaling(8.0) and old.rotary_base == 500000.0
    values = {k: v for k, v in LLAMA3.items() if not k.startswith("rope_")}
    new = {**values, "rope_parameters": {**LLAMA31_ROPE, "rope_theta": 500000.0}}
    assert loaded(tmp_path, new) == old
    old = loaded(tmp_path, DEEPSEEK)
    assert (old.rope_type, old.mscale, old.mscale_all_dim) == ("yarn", 1.0, 1.0)
    values = {name: value for name, value in DEEPSEEK.items() if not name.startswith("rope_")}
    yarn = {name: value for name, value in YARN.items() if name != "type"}
    yarn |= {"rope_type": "yarn", "rope_theta": 10000}
    assert loaded(tmp_path, {**values, "rope_parameters": yarn}) == old
    del yarn["factor"]  # what follows from the two lengths
    assert loaded(tmp_path, {**values, "rope_parameters": yarn}) == old


def test_layers_and_auxiliary_losses_are_as_the_file_says(tmp_path):
    moe = {**QWEN3_MOE, "num_hidden_layers": 6, "mlp_only_layers": [5], "decoder_sparse_step": 2}
    assert loaded(tmp_path, moe).moe_layer_freq == (0, 1, 0, 1, 0, 0)
    kinds = ["dense", "sparse", "dense"]
    glm = loaded(tmp_path, {**GLM, "num_hidden_layers": 3, "mlp_layer_types": kinds})
    assert glm.moe_layer_freq == (0, 1, 0)
    assert not loaded(tmp_path, {**DEEPSEEK, "first_k_dense_replace": 61}).is_moe
    given = {"aux_loss_alpha": 0.001, "seq_aux": False, "n_shared_experts": None}
    found = loaded(tmp_path, {**DEEPSEEK, **given})
    assert found.moe_shared_expert_intermediate_size is None
    assert found.moe_aux_loss_coeff == 0.001
    assert found.moe_router_load_balancing_type == "aux_loss"
    kinds = [*KINDS, KINDS[1]]
    found = loaded(tmp_path, {**GPT_OSS, "num_hidden_layers": 3, "layer_types": kinds})
    assert found.window_attn_skip_freq == (1, 0, 0)
    switched = {"sliding_window": 4096, "use_sliding_window": False}
    assert loaded(tmp_path, QWEN3 | switched).window_size is None


def test_models_that_see_and_layers_in_lists(tmp_path):
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    listed = {**QWEN3_NEXT, "layer_types": kinds * 12, "full_attention_interval": None}
    assert loaded(tmp_path, listed) == (next_ := loaded(tmp_path, QWEN3_NEXT))
    found = loaded(tmp_path, QWEN3_5)
    seeing = {"model_type": "qwen3_5", "text_config": QWEN3_5, "vision_config": {"depth": 27}}
    assert loaded(tmp_path, seeing) == found
    tied = loaded(tmp_path, {**seeing, "tie_word_embeddings": True})
    assert tied == dataclasses.replace(found, tie_embeddings=True)
    # Its config says less: all layers have experts, whose weights add up to one.
    said = ("decoder_sparse_step", "intermediate_size", "mlp_only_layers", "norm_topk_prob")
    text = {name: value for name, value in QWEN3_NEXT.items() if name not in said}
    text |= {"model_type": "qwen3_5_moe_text", "num_experts": 256}
    experts = loaded(tmp_path, {"model_type": "qwen3_5_moe", "text_config": text})
    assert experts == dataclasses.replace(next_, num_moe_experts=256, ffn_hidden_size=512)


def test_nemotron_h_has_layers_of_four_kinds(tmp_path):
    """With experts as Nemotron 3: sigmoid scores with a bias, a shared expert; without a gate."""
    found = loaded(tmp_path, NEMOTRON_H)
    assert [kind.symbol for (kind,) in found.layers] == [*"M-M-M-M*-M"]
    assert not found.rope and not found.gated_linear_unit and found.num_layers == 10
    kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    listed = {**NEMOTRON_H, "layers_block_type": [kinds[one] for one in "M-M-M-M*-M"]}
    del listed["hybrid_override_pattern"]
    assert loaded(tmp_path, listed) == found
    unlimited = {**NEMOTRON_H, "time_step_limit": [0.0, math.inf]}  # JSON's Infinity
    assert loaded(tmp_path, unlimited) == found
    found = loaded(tmp_path, {**NEMOTRON_H, **NEMOTRON_MOE})
    assert found.is_moe and [n for n in range(10) if found.has_experts(n)] == [1, 9]
    assert (found.moe_router_topk, found.moe_router_score_function) == (6, "sigmoid")
    assert found.moe_shared_expert_intermediate_size == 192 and not found.moe_shared_expert_gate
    assert found.moe_router_num_groups is None and not found.gated_linear_unit


UNSUPPORTED = [
    (LLAMA3, {"model_type": "mistral", "attention_bias": True, "mlp_bias": True,
              "hidden_act": "gelu", "sliding_window": 4096}),
    (QWEN3, {"use_sliding_window": True}),
    (DEEPSEEK, {"scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False,
                "topk_group": 2, "num_experts_per_tok": 1, "num_key_value_heads": 8,
                "attention_bias": True, "rope_interleave": False, "moe_layer_freq": 2}),
    (GLM, {"partial_rotary_factor": 0.5}),
    (GPT_OSS, {"attention_bias": False, "swiglu_alpha": 1.0}),
    (QWEN3_NEXT | {"model_type": "qwen3_5_moe_text"}, {"norm_topk_prob": False}),
    (QWEN3_5, {"attn_output_gate": False, "model_type": ["a"]}),
    (NEMOTRON_H, {"conv_kernel": 3, "layer_norm_epsilon": 1e-3, "time_step_limit": [0.0, 0.1],
                  "num_hidden_layers": 7, "mlp_hidden_act": "silu", "use_conv_bias": False}),
    (NEMOTRON_H | NEMOTRON_MOE, {"moe_latent_size": 64, "n_shared_experts": 2}),
]  # fmt: skip
"""Values of fields with which Megatron computes something else."""


@pytest.mark.parametrize(("base", "values", "words"), [
    *((base, {field: value}, f"{field} .*not supported")
      for base, values in UNSUPPORTED for field, value in values.items()),
    (LLAMA3, {"hidden_size": None}, "hidden_size is missing"),
    (LLAMA3, {"hidden_size": "wide"}, "hidden_size is 'wide'"),
    (LLAMA3, {"num_hidden_layers": 2.5}, r"num_hidden_layers is 2\.5"),
    (LLAMA3, {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
    (LLAMA3, {"num_key_value_heads": 5}, "num_query_groups 5 must divide"),
    (LLAMA3, {"rope_scaling": {"type": "linear", "factor": 2}}, "'linear' is not supported"),
    (LLAMA3, {"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling.*factor.*missing"),
    (LLAMA3, {"rope_scaling": {**LLAMA31_ROPE, "original_max_position_embeddings": 4096}},
     r"4096\) is not supported.*8192"),
    (QWEN3, {"layer_types": ["sliding_attention"]}, "layer_types.*'sliding_attention'"),
    (QWEN3_MOE, {"mlp_only_layers": "none"}, "mlp_only_layers is 'none'"),
    (QWEN3_MOE, {"num_experts_per_tok": 200}, "moe_router_topk 200 .*128"),
    (DEEPSEEK, {"rope_scaling": {**YARN, "type": "linear"}}, "'linear' is not supported"),
    (DEEPSEEK, {"rope_scaling": {**YARN, "mscale": None}}, "mscale is missing beside"),
    (DEEPSEEK, {"rope_scaling": {**YARN, "truncate": False}}, "truncate False is not"),
    (DEEPSEEK, {"rope_scaling": {**YARN, "attention_factor": 2}}, "attention_factor 2 is not"),
    (DEEPSEEK, {"qk_rope_head_dim": 63}, "qk_pos_emb_head_dim 63 must be even"),
    (GLM, {"mlp_layer_types": ["dense"] * 46 + ["other"]}, "mlp_layer_types is not"),
    (GPT_OSS, {"layer_types": [*KINDS, "other"] * 8}, "layer_types is not 'full_attention' or"),
    (GPT_OSS, {"rope_scaling": {**YARN_GPT, "mscale": 1.0}}, r"mscale 1\.0 is not supported"),
    (GPT_OSS, {"rope_scaling": {**YARN_GPT, "factor": 0}}, "must be finite numbers above 0"),
    (GPT_OSS, {"sliding_window": 0}, "sliding_window is 0"),
    (QWEN3_NEXT, {"layer_types": ["linear_attention"] * 48}, "layer_types are not supported"),
    (QWEN3_NEXT, {"linear_num_key_heads": 3}, "3 must divide linear_num_value_heads 32"),
    (QWEN3_NEXT, {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim 1 sees no other"),
    (QWEN3_NEXT, {"rope_parameters": [1]}, "rope_parameters is .1., not an object"),
    (QWEN3_5, {"num_key_value_heads": None}, "num_key_value_heads is missing"),
    (NEMOTRON_H, {"hybrid_override_pattern": "MXM*"}, "hybrid_override_pattern 'MXM.' is not"),
    (NEMOTRON_H, {"hybrid_override_pattern": "--"}, "no layer that mixes positions"),
    (NEMOTRON_H, {"hybrid_override_pattern": ""}, "hybrid_override_pattern is missing"),
    (NEMOTRON_H, {"hybrid_override_pattern": "MEM*-M-M-M"}, "moe_intermediate_size is miss"),
    ({}, {"model_type": "qwen3_5"}, "text_config is missing"),
    ({}, {"model_type": "qwen3_5", "text_config": {"model_type": "t5"}}, "unknown family"),
])  # fmt: skip
def test_fields_that_are_wrong_or_computed_otherwise_are_refused(tmp_path, base, values, words):
    with pytest.raises(UserError, match=words) as caught:
        loaded(tmp_path, {**base, **values})
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_config_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"config\.json.*check the path"):
        hf.load(tmp_path)
    for text in (b"", b"[1]", b"{", b"\xff"):
        (tmp_path / "config.json").write_bytes(text)
        with pytest.raises(UserError, match=r"config\.json"):
            hf.load(tmp_path)


SIZES = {
    "hidden_size": 1024, "num_attention_heads": 64, "num_hidden_layers": 8,
    "num_experts": 64, "num_local_experts": 64, "n_routed_experts": 64,
}  # fmt: skip
"""None is a default, so that what is derived from one of these is told from a constant."""
FAMILIES = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text",
    "nemotron_h", "deepseek_v3", "glm4_moe_lite", "gpt_oss",
)  # fmt: skip


def configuration(family):
    pytest.importorskip("transformers", reason="transformers is not installed")
    auto = importlib.import_module("transformers.models.auto.configuration_auto")
    return auto.CONFIG_MAPPING[family]


def sizes_of(family, fields):
    """SIZES that the family has, and keys and values for every head where latents need them."""
    if family == "nemotron_h":
        return {}  # its layers follow from its pattern
    own = {name: size for name, size in SIZES.items() if name in fields}
    return own | ({"num_key_value_heads": 64} if "kv_lora_rank" in fields else {})


@pytest.mark.parametrize("family", FAMILIES)
def test_an_absent_field_is_transformers_default_or_refused(tmp_path, family):
    """Whether a family has a field, and what it is without it, transformers' class says."""
    made = configuration(family)
    sizes = sizes_of(family, made().to_dict())
    whole, compared = made(**sizes).to_dict(), 0
    wrong = {}
    for field in whole.keys() - {"model_type", "num_key_value_heads" if sizes else ""} | {"x"}:
        short = {name: value for name, value in whole.items() if name != field}
        try:
            ours = loaded(tmp_path, short)
        except UserError as error:
            if "is missing" not in str(error):
                wrong[field] = str(error)
            continue
        theirs = made(**{n: v for n, v in short.items() if n != "model_type"}).to_dict()
        compared += 1
        if ours != loaded(tmp_path, theirs):
            wrong[field] = ours
    assert not wrong and compared > 20


@pytest.mark.parametrize("nulls", [{}, {"num_key_value_heads": None}], ids=["absent", "null"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_key_heads_that_are_not_given(tmp_path, family, nulls):
    made = configuration(family)
    if nulls and family == "qwen3_moe":
        return  # its class takes no null
    whole = made(num_attention_heads=64, hidden_size=1024).to_dict()
    values = {name: value for name, value in whole.items() if name != "num_key_value_heads"} | nulls
    theirs = made(**{name: value for name, value in values.items() if name != "model_type"})
    assert loaded(tmp_path, values).num_query_groups == theirs.num_key_value_heads
