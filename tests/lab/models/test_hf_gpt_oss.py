"""gpt-oss from Hugging Face's config.json."""

import dataclasses
import json

import pytest

from megatron_prefix.errors import UserError
from megatron_prefix.lab.models import hf
from megatron_prefix.lab.models.presets import PRESETS, YarnScaling

YARN = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
    "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False,
}  # fmt: skip
KINDS = ["sliding_attention", "full_attention"]
GPT_OSS = {
    "model_type": "gpt_oss", "attention_bias": True, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2880, "initializer_range": 0.02, "intermediate_size": 2880,
    "layer_types": KINDS * 12, "max_position_embeddings": 131072, "num_attention_heads": 64,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "num_local_experts": 32, "rms_norm_eps": 1e-05, "rope_scaling": YARN, "rope_theta": 150000,
    "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "vocab_size": 201088,
}  # fmt: skip


def loaded(folder, values):
    path = folder / "config.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    return hf.load(path)


def test_a_config_json_gives_the_preset_of_its_model(tmp_path):
    expected = dataclasses.replace(PRESETS["gpt-oss-20b"], name=tmp_path.name)
    assert loaded(tmp_path, GPT_OSS) == expected
    short = {name: value for name, value in GPT_OSS.items() if not name.startswith("rope_")}
    assert loaded(tmp_path, {**short, "layer_types": None}) == expected  # its defaults
    rope = {"rope_parameters": {**YARN, "rope_theta": 150000}}
    assert loaded(tmp_path, {**short, **rope}) == expected


def test_any_layer_may_have_a_window(tmp_path):
    kinds = [*KINDS, KINDS[1]]
    found = loaded(tmp_path, {**GPT_OSS, "num_hidden_layers": 3, "layer_types": kinds})
    assert found.window_attn_skip_freq == (1, 0, 0)
    assert found.first(2).window_attn_skip_freq == (1, 0)
    plain = loaded(tmp_path, {**GPT_OSS, "rope_scaling": {"rope_type": "default"}})
    assert plain.rope_scaling is None and plain.rotary_base == 150000


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"attention_bias": False}, "attention_bias False is not supported"),
        ({"swiglu_alpha": 1.0}, r"swiglu_alpha 1\.0 is not supported"),
        ({"layer_types": [*KINDS, "other"] * 8}, "layer_types is not 'full_attention' or"),
        ({"layer_types": KINDS}, "layer_types is not 'full_attention' or"),
        ({"rope_scaling": {**YARN, "mscale": 1.0}}, r"mscale 1\.0 is not supported"),
        ({"rope_scaling": {**YARN, "factor": 0}}, "must be finite numbers above 0"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' is not supported"),
        ({"sliding_window": 0}, "sliding_window is 0"),
    ],
)
def test_what_is_computed_otherwise_is_refused(tmp_path, values, words):
    with pytest.raises(UserError, match=words):
        loaded(tmp_path, {**GPT_OSS, **values})


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


def test_scaling_is_of_finite_numbers():
    with pytest.raises(UserError, match="must be finite numbers above 0"):
        YarnScaling(float("nan"))
