"""ModelSpec, the presets, and Hugging Face configs."""

import dataclasses
import math

import pytest

from megatron_prefix.errors import UserError
from megatron_prefix.lab.models.presets import PRESETS, ModelSpec, resolve


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
