"""ModelSpec, the presets, and Hugging Face configs."""

import dataclasses
import json
import math
import subprocess
import sys

import pytest

from megatron_prefix.errors import UserError
from megatron_prefix.lab.models import hf
from megatron_prefix.lab.models.presets import PRESETS, ModelSpec, RopeScaling, resolve

LLAMA3 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "vocab_size": 128256,
}  # fmt: skip
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 12288, "max_position_embeddings": 40960, "max_window_layers": 36,
    "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 36,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
QWEN3_MOE = {
    **QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1,
    "hidden_size": 2048, "intermediate_size": 6144, "mlp_only_layers": [],
    "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "router_aux_loss_coef": 0.001,
}  # fmt: skip
LLAMA31_ROPE = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3",
}  # fmt: skip


def write(folder, values):
    """A config.json in `folder`."""
    path = folder / "config.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values), encoding="utf-8")
    return path


# The published totals, less the norm weights, which `parameters` leaves out.
@pytest.mark.parametrize(
    ("name", "total", "norms"),
    [
        ("llama3-8b", 8_030_261_248, 65 * 4096),
        ("qwen3-8b", 8_190_735_360, 36 * (2 * 4096 + 2 * 128) + 4096),
        ("qwen3-30b-a3b", 30_532_122_624, 48 * (2 * 2048 + 2 * 128) + 2048),
    ],
)
def test_real_shapes_have_the_published_number_of_parameters(name, total, norms):
    assert PRESETS[name].parameters() == total - norms


@pytest.mark.parametrize(
    ("preset", "config"), [("llama3-8b", LLAMA3), ("qwen3-8b", QWEN3), ("qwen3-30b-a3b", QWEN3_MOE)]
)
def test_a_config_json_gives_the_preset_of_its_model(tmp_path, preset, config):
    path = write(tmp_path, config)
    expected = dataclasses.replace(PRESETS[preset], name=tmp_path.name)
    assert resolve(str(path)) == expected
    assert resolve(str(tmp_path)) == expected


def test_llama31_rope_scaling_in_both_formats(tmp_path):
    old = resolve(str(write(tmp_path, {**LLAMA3, "rope_scaling": LLAMA31_ROPE})))
    assert old.rope_scaling == RopeScaling(8.0)
    assert old.rotary_base == 500000.0
    values = {k: v for k, v in LLAMA3.items() if not k.startswith("rope_")}
    new = {**values, "rope_parameters": {**LLAMA31_ROPE, "rope_theta": 500000.0}}
    assert resolve(str(write(tmp_path, new))) == old


def test_dense_layers_among_experts(tmp_path):
    values = {**QWEN3_MOE, "num_hidden_layers": 6, "mlp_only_layers": [5], "decoder_sparse_step": 2}
    spec = hf.load(write(tmp_path, values))
    assert spec.moe_layer_freq == (0, 1, 0, 1, 0, 0)


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (
            LLAMA3,
            {"model_type": "mistral"},
            ["model_type", "'mistral'", "llama, qwen2, qwen3, qwen3_moe"],
        ),
        (LLAMA3, {"attention_bias": True}, ["attention_bias", "True", "use False"]),
        (LLAMA3, {"mlp_bias": True}, ["mlp_bias", "use False"]),
        (LLAMA3, {"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "use 'silu'"]),
        (LLAMA3, {"sliding_window": 4096}, ["sliding_window", "4096"]),
        (LLAMA3, {"hidden_size": None}, ["hidden_size", "missing"]),
        (LLAMA3, {"hidden_size": "wide"}, ["hidden_size", "'wide'"]),
        (LLAMA3, {"num_attention_heads": 0}, ["num_attention_heads", "0"]),
        (LLAMA3, {"num_hidden_layers": 2.5}, ["num_hidden_layers", "2.5"]),
        (LLAMA3, {"tie_word_embeddings": "no"}, ["tie_word_embeddings", "'no'"]),
        (LLAMA3, {"num_key_value_heads": 5}, ["num_query_groups 5", "32"]),
        (LLAMA3, {"rope_scaling": {"type": "linear", "factor": 2}}, ["rope_type", "'linear'"]),
        (LLAMA3, {"rope_scaling": {"rope_type": "yarn"}}, ["rope_type", "'yarn'"]),
        (
            LLAMA3,
            {"rope_scaling": {**LLAMA31_ROPE, "original_max_position_embeddings": 4096}},
            ["rope_scaling", "4096", "8192"],
        ),
        (LLAMA3, {"rope_scaling": {"rope_type": "llama3"}}, ["rope_scaling", "factor", "missing"]),
        (QWEN3, {"use_sliding_window": True}, ["use_sliding_window", "use False"]),
        (QWEN3, {"layer_types": ["sliding_attention"]}, ["layer_types", "'sliding_attention'"]),
        (QWEN3_MOE, {"num_experts": None}, ["num_experts", "missing"]),
        (QWEN3_MOE, {"mlp_only_layers": "none"}, ["mlp_only_layers", "'none'"]),
        (QWEN3_MOE, {"num_experts_per_tok": 200}, ["moe_router_topk 200", "128"]),
    ],
)
def test_what_is_not_supported_is_refused_with_field_and_mend(tmp_path, config, change, words):
    path = write(tmp_path, {**config, **change})
    with pytest.raises(UserError) as caught:
        resolve(str(path))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("text", ["", "[1]", "{", "\xff"])
def test_a_file_that_is_no_config_is_refused_by_name(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"config\.json"):
        hf.load(path)


def test_a_folder_without_config_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"config\.json.*check the path"):
        hf.load(tmp_path)


def test_qwen_window_size_without_the_switch_is_no_window(tmp_path):
    assert hf.load(write(tmp_path, {**QWEN3, "sliding_window": 4096})).qk_layernorm


def test_qwen2_has_biases_on_queries_keys_and_values(tmp_path):
    values = {k: v for k, v in QWEN3.items() if k not in ("head_dim", "attention_bias")}
    spec = hf.load(write(tmp_path, {**values, "model_type": "qwen2"}))
    assert spec.add_qkv_bias and not spec.qk_layernorm
    assert spec.kv_channels == 128


def test_transformers_5_names_the_number_of_experts_otherwise(tmp_path):
    values = {k: v for k, v in QWEN3_MOE.items() if k != "num_experts"}
    expected = hf.load(write(tmp_path, QWEN3_MOE))
    assert hf.load(write(tmp_path, {**values, "num_local_experts": 128})) == expected


def test_overrides_change_fields_and_are_checked():
    wide = resolve("tiny-llama", hidden_size=512, num_attention_heads=8, kv_channels=64)
    assert (wide.hidden_size, wide.num_attention_heads, wide.num_query_groups) == (512, 8, 2)
    with pytest.raises(UserError, match="'width' does not exist"):
        resolve("tiny-llama", width=3)
    with pytest.raises(UserError, match="num_query_groups 3 must divide num_attention_heads 4"):
        resolve("tiny-llama", num_query_groups=3)


def test_an_unknown_model_lists_the_presets():
    with pytest.raises(UserError, match=r"neither a preset .*tiny-llama.* nor the path"):
        resolve("llama-4000b")


def test_the_vocabulary_comes_from_the_rollouts_or_holds_them():
    assert resolve("tiny-llama").vocab_size is None
    assert resolve("tiny-llama").with_vocab(97).vocab_size == 97
    assert PRESETS["llama3-8b"].with_vocab(1000).vocab_size == 128256
    with pytest.raises(UserError, match=r"has 128256 tokens .* hold token 128256"):
        PRESETS["llama3-8b"].with_vocab(128257)


@pytest.mark.parametrize("field", ["num_layers", "vocab_size"])
@pytest.mark.parametrize("value", [0, 1.5, True])
def test_sizes_are_whole_numbers_from_one(field, value):
    values = dataclasses.asdict(PRESETS["tiny-llama"])
    with pytest.raises(UserError, match=f"{field} {value!r}"):
        ModelSpec(**{**values, field: value})


@pytest.mark.parametrize(
    "field", ["init_method_std", "layernorm_epsilon", "rotary_base", "moe_z_loss_coeff"]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, "1", True])
def test_numbers_are_finite_and_of_one_sign(field, value):
    with pytest.raises(UserError, match=f"tiny-llama.: {field} .*must be a finite number"):
        dataclasses.replace(PRESETS["tiny-llama"], **{field: value})


@pytest.mark.parametrize("fields", [{"num_layers": 10_001}, {"hidden_size": 10**9 + 1}])
def test_sizes_have_an_end(fields):
    with pytest.raises(UserError, match=r"(num_layers|hidden_size) 1000+1 (is more|must be)"):
        resolve("tiny-llama", **fields)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("num_query_groups", 2, "2 must be num_attention_heads 4"),
        ("qk_pos_emb_head_dim", 7, "7 must be even"),
        ("kv_lora_rank", 0, "0 must be an integer from 1"),
        ("rope_type", "linear", "'linear' is not supported; use 'rope' or 'yarn'"),
        ("rope", False, "set rope to true"),
        ("attention_output_gate", True, "multi_latent_attention has no attention_output_gate"),
        ("experimental_attention_variant", "gated_delta_net", "multi_latent_attention has no"),
        ("mscale", math.nan, "mscale nan must be a finite number"),
    ],
)
def test_what_latent_attention_lacks_is_refused(field, value, words):
    fields = {"linear_attention_freq": 4, field: value}
    with pytest.raises(UserError, match=words):
        resolve("tiny-deepseek", **fields)


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "two\nlines"])
def test_a_name_that_no_file_has_is_an_unknown_model(name):
    with pytest.raises(UserError, match="is neither a preset") as caught:
        resolve(name)
    told = len(str(caught.value)) - len(", ".join(PRESETS))
    assert told < 200 and "\n" not in str(caught.value)


def test_specs_and_configs_need_no_torch():
    code = (
        "import sys; from megatron_prefix.lab.models import hf, presets; "
        "from megatron_prefix.lab.runtime.layout import Layout; Layout(); "
        "sys.exit('torch' in sys.modules or 'megatron' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


QWEN3_NEXT = {
    **QWEN3_MOE, "architectures": ["Qwen3NextForCausalLM"], "full_attention_interval": 4,
    "head_dim": 256, "hidden_size": 2048, "intermediate_size": 5120, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "max_position_embeddings": 262144, "model_type": "qwen3_next",
    "moe_intermediate_size": 512, "num_attention_heads": 16, "num_experts": 512,
    "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25, "rope_theta": 10000000, "shared_expert_intermediate_size": 512,
}  # fmt: skip
QWEN3_5 = {
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
    "linear_num_value_heads": 32,
    "max_position_embeddings": 262144,
    "model_type": "qwen3_5_text",
    "num_attention_heads": 16,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
        "rope_theta": 10000000, "rope_type": "default",
    },
    "vocab_size": 248320,
}  # fmt: skip
NEMOTRON_H = {
    "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "conv_kernel": 4,
    "head_dim": 128, "hidden_size": 4096, "hybrid_override_pattern": "M-M-M-M*-M",
    "intermediate_size": 21504, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64,
    "mamba_num_heads": 128, "mlp_bias": False, "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h", "n_groups": 8, "num_attention_heads": 32, "num_key_value_heads": 8,
    "ssm_state_size": 128, "tie_word_embeddings": False, "use_conv_bias": True,
    "vocab_size": 131072,
}  # fmt: skip


def test_qwen3_next_is_its_preset(tmp_path):
    found = hf.load(write(tmp_path, QWEN3_NEXT))
    assert dataclasses.replace(found, name="qwen3-next-80b-a3b") == PRESETS["qwen3-next-80b-a3b"]
    assert found.parameters() == pytest.approx(79.67e9, rel=1e-3)  # "80B", without MTP
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    listed = {**QWEN3_NEXT, "layer_types": kinds * 12, "full_attention_interval": None}
    assert hf.load(write(tmp_path, listed)) == found


def test_qwen3_5_is_its_preset_whether_it_sees_or_not(tmp_path):
    found = hf.load(write(tmp_path, QWEN3_5))
    assert dataclasses.replace(found, name="qwen3.5-9b") == PRESETS["qwen3.5-9b"]
    assert found.parameters() == pytest.approx(9e9, rel=1e-2)
    larger = {
        **QWEN3_5, "hidden_size": 5120, "intermediate_size": 17408, "layer_types": None,
        "linear_num_value_heads": 48, "num_attention_heads": 24, "num_hidden_layers": 64,
    }  # fmt: skip
    other = hf.load(write(tmp_path, larger))
    assert dataclasses.replace(other, name="qwen3.5-27b") == PRESETS["qwen3.5-27b"]
    assert other.parameters() == pytest.approx(27e9, rel=1e-2)
    seeing = {"model_type": "qwen3_5", "text_config": QWEN3_5, "vision_config": {"depth": 27}}
    assert hf.load(write(tmp_path, seeing)) == found
    tied = hf.load(write(tmp_path, {**seeing, "tie_word_embeddings": True}))
    assert tied == dataclasses.replace(found, tie_embeddings=True)


def test_what_hybrid_configs_leave_out_is_transformers_default(tmp_path):
    """Of its Qwen3NextConfig and NemotronHConfig (5.20)."""
    short = {name: value for name, value in QWEN3_NEXT.items() if name != "norm_topk_prob"}
    assert hf.load(write(tmp_path, short)) == hf.load(write(tmp_path, QWEN3_NEXT))
    unlimited = {**NEMOTRON_H, "time_step_limit": [0.0, math.inf]}  # JSON's Infinity
    assert hf.load(write(tmp_path, unlimited)) == hf.load(write(tmp_path, NEMOTRON_H))


def test_qwen3_5_moe_is_qwen3_next_with_other_sizes(tmp_path):
    """Its config says less: all layers have experts, whose weights add up to one."""
    said = ("decoder_sparse_step", "intermediate_size", "mlp_only_layers", "norm_topk_prob")
    text = {name: value for name, value in QWEN3_NEXT.items() if name not in said}
    text |= {"model_type": "qwen3_5_moe_text", "num_experts": 256}
    found = hf.load(write(tmp_path, {"model_type": "qwen3_5_moe", "text_config": text}))
    next_ = hf.load(write(tmp_path, QWEN3_NEXT))
    assert found == dataclasses.replace(next_, num_moe_experts=256, ffn_hidden_size=512)


NEMOTRON_MOE = {
    "hybrid_override_pattern": "MEM-M-M*-E", "moe_intermediate_size": 96, "n_routed_experts": 16,
    "num_experts_per_tok": 6, "moe_shared_expert_intermediate_size": 192,
    "routed_scaling_factor": 2.5,
}  # fmt: skip


def test_nemotron_h_may_have_experts(tmp_path):
    """As Nemotron 3: sigmoid scores with a bias, and a shared expert; all without a gate."""
    found = hf.load(write(tmp_path, {**NEMOTRON_H, **NEMOTRON_MOE}))
    assert found.is_moe and [n for n in range(10) if found.has_experts(n)] == [1, 9]
    assert (found.moe_router_topk, found.moe_router_score_function) == (6, "sigmoid")
    assert found.moe_shared_expert_intermediate_size == 192 and not found.moe_shared_expert_gate
    assert found.moe_router_num_groups is None and not found.gated_linear_unit


def test_nemotron_h_has_layers_of_three_kinds(tmp_path):
    found = hf.load(write(tmp_path, NEMOTRON_H))
    assert [kind.symbol for (kind,) in found.layers] == [*"M-M-M-M*-M"]
    assert not found.rope and not found.gated_linear_unit and found.num_layers == 10
    kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    pattern = NEMOTRON_H["hybrid_override_pattern"]
    listed = {**NEMOTRON_H, "layers_block_type": [kinds[one] for one in pattern]}
    del listed["hybrid_override_pattern"]
    assert hf.load(write(tmp_path, listed)) == found


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**QWEN3_NEXT, "layer_types": ["linear_attention"] * 48}, "layer_types are not supported"),
        (
            {**QWEN3_NEXT, "linear_num_key_heads": 3},
            "key_heads 3 must divide linear_num_value_heads 32",
        ),
        (
            {**NEMOTRON_H, "hybrid_override_pattern": "MXM*"},
            "hybrid_override_pattern 'MXM.' is not",
        ),
        ({**NEMOTRON_H, **NEMOTRON_MOE, "moe_latent_size": 64}, "moe_latent_size 64 is not"),
        ({**NEMOTRON_H, **NEMOTRON_MOE, "n_shared_experts": 2}, "n_shared_experts 2 is not"),
        ({**NEMOTRON_H, "hybrid_override_pattern": "MEM*-M-M-M"}, "moe_intermediate_size is miss"),
        ({**QWEN3_5, "attn_output_gate": False}, "attn_output_gate False is not supported"),
        ({**QWEN3_5, "num_key_value_heads": None}, "num_key_value_heads is missing"),
        ({**QWEN3_NEXT, "model_type": "qwen3_5_moe_text", "mlp_only_layers": [1]}, "mlp_only_l"),
        ({**QWEN3_NEXT, "model_type": "qwen3_5_moe_text", "norm_topk_prob": False}, "norm_topk"),
        ({"model_type": "qwen3_5"}, "text_config is missing"),
        ({"model_type": "qwen3_5_moe", "text_config": {"model_type": "t5"}}, "unknown family"),
        ({**NEMOTRON_H, "conv_kernel": 3}, "conv_kernel 3 is not supported"),
        ({**NEMOTRON_H, "layer_norm_epsilon": 1e-3}, "layer_norm_epsilon 0.001 is not supported"),
        ({**NEMOTRON_H, "time_step_limit": [0.0, 0.1]}, "time_step_limit .* is not supported"),
        ({**NEMOTRON_H, "num_hidden_layers": 7}, "num_hidden_layers 7 is not .*use 10"),
        ({**NEMOTRON_H, "hybrid_override_pattern": "--"}, "no layer that mixes positions"),
        (
            {**NEMOTRON_H, "hybrid_override_pattern": None, "layers_block_type": [["a"]]},
            "not a list of names",
        ),
        (
            {**QWEN3_NEXT, "linear_conv_kernel_dim": 1},
            "linear_conv_kernel_dim 1 sees no other position",
        ),
        ({**QWEN3_NEXT, "layer_types": 5}, "layer_types is 5, not a list of names"),
        ({**QWEN3_5, "model_type": "qwen3", "layer_types": 5}, "layer_types is 5, not a list"),
        ({**QWEN3_NEXT, "rope_parameters": [1]}, "rope_parameters is .1., not an object"),
        (
            {**QWEN3_5, "rope_parameters": {"partial_rotary_factor": "a"}},
            "partial_rotary_factor is 'a', not a number",
        ),
        ({**QWEN3_5, "model_type": ["a"]}, "model_type .'a'. is not supported"),
        ({"model_type": "qwen3_5", "text_config": {"model_type": [1]}}, "unknown family"),
        ({**NEMOTRON_H, "mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' is not supported"),
        ({**NEMOTRON_H, "use_conv_bias": False}, "use_conv_bias False is not supported"),
        ({**NEMOTRON_H, "hybrid_override_pattern": 3}, "hybrid_override_pattern is missing"),
        ({**NEMOTRON_H, "hybrid_override_pattern": ""}, "hybrid_override_pattern is missing"),
    ],
)
def test_other_hybrid_models_are_refused(tmp_path, values, message):
    with pytest.raises(UserError, match=message) as caught:
        hf.load(write(tmp_path, values))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("tiny-nemotron-h", {"num_layers": 8}, "6 symbols for 8 layers"),
        ("tiny-qwen3-next", {"rotary_percent": 0.0}, "rotary_percent 0.0 must be above 0"),
        ("tiny-qwen3-next", {"hybrid_override_pattern": "GG*-"}, "exclude each other; set the"),
        ("tiny-qwen3-next", {"linear_attention_freq": None}, "freq None must be an integer from"),
        ("tiny-llama", {"experimental_attention_variant": "dsa"}, "'dsa' is not supported; use"),
    ],
)
def test_hybrid_fields_that_contradict_are_refused(name, fields, message):
    with pytest.raises(UserError, match=message):
        resolve(name, **fields)


def test_unknown_symbols_of_a_pattern_are_refused():
    for pattern, message in (
        ("M?M", r"'M.M' has .: use M Mamba2, G GatedDeltaNet, "),
        ("GD*+", r"'GD\*.' has \+, D: use M "),
    ):
        with pytest.raises(UserError, match=f"hybrid_override_pattern {message}"):
            resolve("tiny-nemotron-h", hybrid_override_pattern=pattern)


def test_first_layers_of_models_whose_layers_differ():
    """`--set num_layers=N`, and the small model that `bench` aligns."""
    hybrid = resolve("tiny-nemotron-h", num_layers=4)
    assert hybrid.hybrid_override_pattern == "M-M*"
    moe = dataclasses.replace(resolve("tiny-moe"), moe_layer_freq=(0, 1, 1, 1)).first(2)
    assert moe.moe_layer_freq == (0, 1) and moe.num_layers == 2
    assert moe.first(9) == moe
    expected = {"tiny-llama": 1, "tiny-moe": 1, "tiny-nemotron-h": 4, "tiny-qwen3-next": 4}
    assert {name: resolve(name).num_different for name in expected} == expected
    assert moe.num_different == 2
