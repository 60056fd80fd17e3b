"""What a config.json leaves out: the default of the family's class in transformers, or refused."""

import importlib
import json

import pytest

from megatron_prefix.errors import UserError
from megatron_prefix.lab.models import hf

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


def loaded(folder, values):
    path = folder / "config.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    return hf.load(path)


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
