"""Models by name: sizes, checks, names of older releases, and which kernels they ask for."""

import dataclasses
import json
import math

import megatron.core.utils
import pytest
import torch
from megatron.core.transformer.moe import moe_utils
from packaging.version import Version

from megatron_prefix.errors import UserError
from megatron_prefix.lab.models.config import transformer_config
from megatron_prefix.lab.models.old_names import RENAMED, new_name, updated
from megatron_prefix.lab.models.presets import PRESETS, ModelSpec, resolve
from megatron_prefix.lab.rl import routes
from megatron_prefix.lab.runtime import Layout


# The published totals, less the norm weights, which `parameters` leaves out.
@pytest.mark.parametrize(("name", "total", "norms"), [
    ("llama3-8b", 8_030_261_248, 65 * 4096),
    ("qwen3-8b", 8_190_735_360, 36 * (2 * 4096 + 2 * 128) + 4096),
    ("qwen3-30b-a3b", 30_532_122_624, 48 * (2 * 2048 + 2 * 128) + 2048),
])  # fmt: skip
def test_real_shapes_have_the_published_number_of_parameters(name, total, norms):
    assert PRESETS[name].parameters() == total - norms


def test_the_vocabulary_comes_from_the_rollouts_or_holds_them():
    assert resolve("tiny-llama").vocab_size is None
    assert resolve("tiny-llama").with_vocab(97).vocab_size == 97
    assert PRESETS["llama3-8b"].with_vocab(1000).vocab_size == 128256
    with pytest.raises(UserError, match=r"has 128256 tokens .* hold token 128256"):
        PRESETS["llama3-8b"].with_vocab(128257)


@pytest.mark.parametrize(("name", "fields", "words"), [
    *(("tiny-llama", {field: value}, f"tiny-llama.: {field} {value!r} must be an? ")
      for fields, values in (
          (("num_layers", "vocab_size"), (0, 1.5, True)),
          (("init_method_std", "layernorm_epsilon", "rotary_base", "moe_z_loss_coeff"),
           (math.nan, math.inf, -1.0, "1", True)),
      ) for field in fields for value in values),
    ("llama-4000b", {}, r"neither a preset .*tiny-llama.* nor the path"),
    ("tiny-llama", {"width": 3}, "'width' does not exist"),
    ("tiny-llama", {"num_query_groups": 3}, "num_query_groups 3 must divide num_attention_heads 4"),
    ("tiny-llama", {"experimental_attention_variant": "dsa"}, "'dsa' is not supported; use"),
    ("tiny-llama", {"fp8": "e4m3"}, "fp8_recipe 'delayed' is not supported; use one of block"),
    ("tiny-llama", {"fp8": "e5m2", "fp8_recipe": "blockwise"}, "fp8 'e5m2' is not supported"),
    ("tiny-deepseek", {"num_query_groups": 2}, "2 must be num_attention_heads 4"),
    ("tiny-deepseek", {"qk_pos_emb_head_dim": 7}, "7 must be even"),
    ("tiny-deepseek", {"kv_lora_rank": 0}, "0 must be an integer from 1"),
    ("tiny-deepseek", {"rope_type": "linear"}, "'linear' is not supported; use 'rope' or 'yarn'"),
    ("tiny-deepseek", {"rope": False}, "set rope to true"),
    ("tiny-deepseek", {"attention_output_gate": True},
     "multi_latent_attention has no attention_output_gate"),
    ("tiny-deepseek", {"experimental_attention_variant": "gated_delta_net",
                       "linear_attention_freq": 4},
     "multi_latent_attention has no"),
    ("tiny-deepseek", {"mscale": math.nan}, "mscale nan must be a finite number"),
    ("tiny-llama", {"mtp_detach_heads": True}, "mtp_detach_heads goes with mtp_num_layers"),
    ("tiny-nemotron-h", {"num_layers": 8}, "6 symbols for 8 layers"),
    ("tiny-nemotron-h", {"hybrid_override_pattern": "M?M"},
     r"hybrid_override_pattern 'M.M' has .: use M Mamba2, G GatedDeltaNet, "),
    ("tiny-nemotron-h", {"hybrid_override_pattern": "GD*+"}, r"'GD\*.' has \+, D: use M "),
    ("tiny-qwen3-next", {"rotary_percent": 0.0}, "rotary_percent 0.0 must be above 0"),
    ("tiny-qwen3-next", {"hybrid_override_pattern": "GG*-"}, "exclude each other; set the"),
    ("tiny-qwen3-next", {"linear_attention_freq": None}, "freq None must be an integer from"),
])  # fmt: skip
def test_fields_that_no_model_has_are_refused(name, fields, words):
    with pytest.raises(UserError, match=words):
        resolve(name, **fields)


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


OLD = {
    "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2,
    "kv_channels": 16, "ffn_hidden_size": 128, "vocab_size": None, "max_position": 32768,
    "rotary_base": 10000.0, "rope_scaling": None, "qk_layernorm": True, "tie_embeddings": False,
    "norm_eps": 1e-06, "add_qkv_bias": False, "init_std": 0.1, "num_experts": None,
    "moe_ffn_hidden_size": None, "moe_top_k": 2, "moe_normalize_top_k": True,
    "moe_load_balancing": "aux_loss", "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None,
    "moe_layers": None, "moe_shared_width": None, "rope": True, "rotary_percent": 1.0,
    "output_gate": False, "squared_relu": False, "recurrent": None,
}  # fmt: skip
"""What train.json held of the presets below, but for what follows."""
CHANGES = {
    "tiny-moe": {"num_experts": 8, "moe_ffn_hidden_size": 32, "moe_aux_loss_coeff": 0.01},
    "tiny-qwen3-next": {
        "ffn_hidden_size": 96, "rotary_percent": 0.25, "output_gate": True,
        "recurrent": {
            "key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 8, "attention_every": 4,
            "conv_width": 4, "pattern": "",
        },
    },
    "tiny-nemotron-h": {
        "num_layers": 6, "qk_layernorm": False, "rope": False, "squared_relu": True,
        "recurrent": {
            "pattern": "M-M*-M", "heads": 8, "head_dim": 16, "state_dim": 8, "groups": 2,
            "conv_width": 4,
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_saved_spec_is_that_of_its_preset(name):
    wanted = json.loads(json.dumps(dataclasses.asdict(PRESETS[name])))
    assert updated({"name": name, **OLD, **CHANGES[name]}) == wanted
    assert updated(wanted) == wanted


def test_other_values_of_a_saved_spec_are_kept():
    saved = {"name": "x", **OLD, **CHANGES["tiny-moe"], "new": 7}
    saved |= {"moe_normalize_top_k": False, "moe_layers": [True, False, True, True]}
    found = updated(saved)
    assert found["moe_router_pre_softmax"] is True and found["moe_layer_freq"] == [1, 0, 1, 1]
    assert found["new"] == 7


def test_fields_that_came_later_have_what_was_before():
    saved = dataclasses.asdict(PRESETS["qwen3-next-80b-a3b"])
    earlier = {name: value for name, value in saved.items() if name != "moe_shared_expert_gate"}
    assert updated(earlier) == saved
    del saved["kv_lora_rank"]
    assert updated(saved)["kv_lora_rank"] == 512


def test_old_names_lead_to_fields():
    fields = {field.name for field in dataclasses.fields(ModelSpec)}
    assert {new_name(name) for name in RENAMED} <= fields
    assert not RENAMED.keys() & fields


@pytest.mark.parametrize(("model", "release", "overrides", "fused"), [
    ("tiny-moe", "2.7.0", {}, (True, True)),
    ("tiny-moe", "2.6.0", {}, (False, True)),
    ("tiny-moe", "2.0.0", {}, (False, False)),
    ("tiny-moe", "2.7.0", routes.CONFIG, (False, True)),  # which fused routers do not follow
    ("tiny-llama", "2.7.0", {}, (False, False)),
])  # fmt: skip
def test_routers_and_permutation_are_fused_where_they_can_be(
    monkeypatch, model, release, overrides, fused
):
    monkeypatch.setattr(megatron.core.utils, "get_te_version", lambda: Version(release))
    for name in ("permute", "permute_with_probs", "unpermute", "sort_chunks_by_index"):
        monkeypatch.setattr(moe_utils, f"fused_{name}", name, raising=False)
    monkeypatch.setattr(moe_utils, "fused_sort_chunks_by_index_with_probs", "", raising=False)
    config = transformer_config(
        resolve(model), Layout(), torch.bfloat16, torch.device("cuda"), transformer_engine=True,
        overrides={"apply_rope_fusion": False, **overrides},
    )  # fmt: skip
    assert (config.moe_router_fusion, config.moe_permute_fusion) == fused
