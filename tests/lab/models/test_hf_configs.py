"""Models from Hugging Face's config.json: latents, gpt-oss, and what a file leaves out."""

import dataclasses
import importlib
import json

import pytest

from megatron_prefix.errors import UserError
from megatron_prefix.lab.models import hf
from megatron_prefix.lab.models.presets import PRESETS

YARN = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "type": "yarn",
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "attention_bias": False, "first_k_dense_replace": 3,
    "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_scaling": YARN, "rope_theta": 10000,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
    "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
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


def loaded(folder, values):
    path = folder / "config.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    return hf.load(path)


def test_yarn_in_both_formats(tmp_path):
    old = loaded(tmp_path, DEEPSEEK)
    assert (old.rope_type, old.mscale, old.mscale_all_dim) == ("yarn", 1.0, 1.0)
    values = {name: value for name, value in DEEPSEEK.items() if not name.startswith("rope_")}
    yarn = {name: value for name, value in YARN.items() if name != "type"}
    yarn |= {"rope_type": "yarn", "rope_theta": 10000}
    assert loaded(tmp_path, {**values, "rope_parameters": yarn}) == old
    del yarn["factor"]  # what follows from the two lengths
    assert loaded(tmp_path, {**values, "rope_parameters": yarn}) == old


def test_dense_layers_and_auxiliary_losses_are_as_the_file_says(tmp_path):
    kinds = ["dense", "sparse", "dense"]
    glm = loaded(tmp_path, {**GLM, "num_hidden_layers": 3, "mlp_layer_types": kinds})
    assert glm.moe_layer_freq == (0, 1, 0)
    dense = loaded(tmp_path, {**DEEPSEEK, "first_k_dense_replace": 61})
    assert not dense.is_moe
    given = {"aux_loss_alpha": 0.001, "seq_aux": False, "n_shared_experts": None}
    found = loaded(tmp_path, {**DEEPSEEK, **given})
    assert found.moe_shared_expert_intermediate_size is None
    assert found.moe_aux_loss_coeff == 0.001
    assert found.moe_router_load_balancing_type == "aux_loss"


YARN_GPT = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
    "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False,
}  # fmt: skip
KINDS = ["sliding_attention", "full_attention"]
GPT_OSS = {
    "model_type": "gpt_oss", "attention_bias": True, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2880, "initializer_range": 0.02, "intermediate_size": 2880,
    "layer_types": KINDS * 12, "max_position_embeddings": 131072, "num_attention_heads": 64,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "num_local_experts": 32, "rms_norm_eps": 1e-05, "rope_scaling": YARN_GPT, "rope_theta": 150000,
    "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "vocab_size": 201088,
}  # fmt: skip


SHORT = {name: value for name, value in GPT_OSS.items() if not name.startswith("rope_")}


@pytest.mark.parametrize(
    ("preset", "values"),
    [
        ("deepseek-v3", DEEPSEEK), ("moonlight-16b-a3b", MOONLIGHT), ("glm-4.7-flash", GLM),
        ("gpt-oss-20b", GPT_OSS), ("gpt-oss-20b", {**SHORT, "layer_types": None}),  # its defaults
        ("gpt-oss-20b", {**SHORT, "rope_parameters": {**YARN_GPT, "rope_theta": 150000}}),
    ],
)  # fmt: skip
def test_a_config_json_gives_the_preset_of_its_model(tmp_path, preset, values):
    assert loaded(tmp_path, values) == dataclasses.replace(PRESETS[preset], name=tmp_path.name)


def test_any_layer_may_have_a_window(tmp_path):
    kinds = [*KINDS, KINDS[1]]
    found = loaded(tmp_path, {**GPT_OSS, "num_hidden_layers": 3, "layer_types": kinds})
    assert found.window_attn_skip_freq == (1, 0, 0)
    assert found.first(2).window_attn_skip_freq == (1, 0)
    plain = loaded(tmp_path, {**GPT_OSS, "rope_scaling": {"rope_type": "default"}})
    assert plain.rope_scaling is None and plain.rotary_base == 150000


@pytest.mark.parametrize(
    ("base", "values", "words"),
    [
        (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        (DEEPSEEK, {"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
        (DEEPSEEK, {"norm_topk_prob": False}, "norm_topk_prob False is not supported"),
        (DEEPSEEK, {"topk_group": 2}, "topk_group 2 with num_experts_per_tok 8 is not supported"),
        (DEEPSEEK, {"num_experts_per_tok": 1}, "num_experts_per_tok 1 is not supported"),
        (DEEPSEEK, {"num_key_value_heads": 8}, "num_key_value_heads 8 is not supported"),
        (DEEPSEEK, {"attention_bias": True}, "attention_bias True is not supported"),
        (DEEPSEEK, {"rope_interleave": False}, "rope_interleave False is not supported"),
        (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        (DEEPSEEK, {"rope_scaling": {**YARN, "type": "linear"}}, "'linear' is not supported"),
        (
            DEEPSEEK,
            {"rope_scaling": {**YARN, "mscale": None}},
            "mscale is missing beside mscale_all_dim",
        ),
        (
            DEEPSEEK,
            {"rope_scaling": {**YARN, "truncate": False}},
            "truncate False is not supported",
        ),
        (
            DEEPSEEK,
            {"rope_scaling": {**YARN, "attention_factor": 2}},
            "attention_factor 2 is not supported",
        ),
        (DEEPSEEK, {"qk_rope_head_dim": 63}, "qk_pos_emb_head_dim 63 must be even"),
        (GLM, {"mlp_layer_types": ["dense"]}, "mlp_layer_types is not"),
        (GLM, {"mlp_layer_types": ["dense"] * 46 + ["other"]}, "mlp_layer_types is not"),
        (GLM, {"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5 is not supported"),
        (GPT_OSS, {"rope_scaling": {**YARN_GPT, "factor": float("nan")}}, "must be finite numbers"),
        (GPT_OSS, {"attention_bias": False}, "attention_bias False is not supported"),
        (GPT_OSS, {"swiglu_alpha": 1.0}, r"swiglu_alpha 1\.0 is not supported"),
        (GPT_OSS, {"layer_types": [*KINDS, "other"] * 8}, "layer_types is not 'full_attention' or"),
        (GPT_OSS, {"layer_types": KINDS}, "layer_types is not 'full_attention' or"),
        (GPT_OSS, {"rope_scaling": {**YARN_GPT, "mscale": 1.0}}, r"mscale 1\.0 is not supported"),
        (GPT_OSS, {"rope_scaling": {**YARN_GPT, "factor": 0}}, "must be finite numbers above 0"),
        (GPT_OSS, {"rope_scaling": {"rope_type": "linear"}}, "'linear' is not supported"),
        (GPT_OSS, {"sliding_window": 0}, "sliding_window is 0"),
    ],
)
def test_what_megatron_computes_otherwise_is_refused(tmp_path, base, values, words):
    with pytest.raises(UserError, match=words):
        loaded(tmp_path, {**base, **values})


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("window_size", (5, 1), r"window_size \(5, 1\) must be \(N, 0\)"),
        ("window_size", (-1, 0), "must be"),
        ("window_attn_skip_freq", (1, 0), "2 flags for 4 layers"),
        ("window_attn_skip_freq", 0, "must be an integer from 1"),
        ("softmax_type", "off-by-one", "softmax_type 'off-by-one' is not supported"),
        ("multi_latent_attention", True, "num_query_groups 2 must be|has no add_bias_linear"),
        ("activation_func_clamp_value", 0.0, "must be a finite number above 0"),
    ],
)
def test_fields_are_checked(field, value, words):
    with pytest.raises(UserError, match=words):
        dataclasses.replace(PRESETS["tiny-gpt-oss"], **{field: value})


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
