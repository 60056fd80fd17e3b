"""Fields of a spec under the names that older releases gave them."""

import dataclasses
import json

import pytest

from megatron_prefix.lab.models.old_names import RENAMED, new_name, updated
from megatron_prefix.lab.models.presets import PRESETS, ModelSpec

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
