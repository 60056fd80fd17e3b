"""Models with multi-latent attention from Hugging Face's config.json."""

import dataclasses
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


@pytest.mark.parametrize(
    ("preset", "values"),
    [("deepseek-v3", DEEPSEEK), ("moonlight-16b-a3b", MOONLIGHT), ("glm-4.7-flash", GLM)],
)
def test_a_config_json_gives_the_preset_of_its_model(tmp_path, preset, values):
    assert loaded(tmp_path, values) == dataclasses.replace(PRESETS[preset], name=tmp_path.name)


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


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
        ({"norm_topk_prob": False}, "norm_topk_prob False is not supported"),
        ({"topk_group": 2}, "topk_group 2 with num_experts_per_tok 8 is not supported"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok 1 is not supported"),
        ({"num_key_value_heads": 8}, "num_key_value_heads 8 is not supported"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"rope_interleave": False}, "rope_interleave False is not supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        ({"rope_scaling": {**YARN, "type": "linear"}}, "'linear' is not supported"),
        ({"rope_scaling": {**YARN, "mscale": None}}, "mscale is missing beside mscale_all_dim"),
        ({"rope_scaling": {**YARN, "truncate": False}}, "truncate False is not supported"),
        ({"rope_scaling": {**YARN, "attention_factor": 2}}, "attention_factor 2 is not supported"),
        ({"qk_rope_head_dim": 63}, "qk_pos_emb_head_dim 63 must be even"),
    ],
)
def test_what_megatron_computes_otherwise_is_refused(tmp_path, values, words):
    with pytest.raises(UserError, match=words):
        loaded(tmp_path, {**DEEPSEEK, **values})


def test_layers_of_unknown_types_are_refused(tmp_path):
    for kinds in (["dense"], ["dense"] * 46 + ["other"]):
        with pytest.raises(UserError, match="mlp_layer_types is not"):
            loaded(tmp_path, {**GLM, "mlp_layer_types": kinds})
    with pytest.raises(UserError, match=r"partial_rotary_factor 0\.5 is not supported"):
        loaded(tmp_path, {**GLM, "partial_rotary_factor": 0.5})
