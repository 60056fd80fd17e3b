"""Hugging Face checkpoints: what is refused, by name, and that only slices are read."""

import json

import pytest
import torch

from megatron_prefix.errors import UserError
from megatron_prefix.lab.models import hf_weights, weights
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.models.hf_tensors import shapes
from megatron_prefix.lab.models.hf_weights import HFWeights
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.models.shards import Shards
from tests.harness import hf_checkpoints

pytestmark = pytest.mark.usefixtures("on_one_rank")
safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tied Qwen3 checkpoint in one file, as its folder; not to be changed."""
    folder = tmp_path_factory.mktemp("tied")
    hf_checkpoints.make(folder, "qwen3-tied", shard_size="1GB")
    return folder


@pytest.fixture
def copy(made, tmp_path):
    """A folder to damage, its tensors and a function that saves them again."""
    tensors = safetensors.load_file(made / "model.safetensors")
    (tmp_path / "config.json").write_bytes((made / "config.json").read_bytes())

    def save():
        safetensors.save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return tensors, save


def refused(folder, **changes):
    with pytest.raises(UserError) as caught:
        HFWeights(folder, resolve(str(folder), **changes))
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    return message


def model(folder, **options):
    from megatron_prefix.lab.models.build import build_model

    [chunk] = build_model(resolve(str(folder)), load_hf=str(folder), wrap_ddp=False, **options)
    return chunk


def test_missing_and_extra_tensors_are_named_and_counted(copy):
    tensors, save = copy
    gone = [name for name in tensors if "layers.1." in name]
    kept = {name: tensors.pop(name) for name in gone}
    message = refused(save())
    assert "missing tensors" in message and f"and {len(gone) - 3} more;" in message
    assert "model.layers.1.input_layernorm.weight" in message
    tensors.update(kept)
    tensors["model.layers.4.mlp.up_proj.weight"] = torch.zeros(2)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(2)
    message = refused(save())
    assert "unknown tensors" in message
    assert "model.layers.0.self_attn.q_proj.bias, model.layers.4.mlp.up_proj.weight;" in message


def test_wrong_shapes_and_dtypes_are_refused(copy):
    tensors, save = copy
    tensors["model.norm.weight"] = torch.ones(65)
    assert "model.norm.weight [65] instead of [64]" in refused(save())
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    assert "dtype I8, which is not read: model.norm.weight;" in refused(save())


def test_folders_without_usable_files_are_refused(copy, tmp_path):
    _, save = copy
    assert "neither model.safetensors nor model.safetensors.index.json" in refused(tmp_path)
    (save() / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{}")
    assert "cannot be read as safetensors" in refused(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}", encoding="utf-8")
    assert "is not an index of safetensors files" in refused(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        HFWeights(tmp_path / "absent", resolve("tiny-llama"))


def logged(caplog):
    """What was said of tensors that are left out, once."""
    [told] = [text for text in caplog.messages if "are not loaded" in text]
    return told


@pytest.mark.parametrize(("family", "extra"), [
    ("deepseek", "model.layers.4.eh_proj.weight"), ("qwen3-next", "mtp.fc.weight"),
])  # fmt: skip
def test_heads_that_the_model_has_not_are_left_out_and_said(tmp_path, caplog, family, extra):
    hf_checkpoints.make(tmp_path, family, shard_size="1GB")
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    safetensors.save_file({**tensors, extra: torch.ones(2)}, tmp_path / "model.safetensors")
    caplog.set_level("WARNING", hf_weights.__name__)
    assert model(tmp_path).decoder.final_layernorm.weight.any()
    assert "1 tensors are not loaded" in (told := logged(caplog)) and extra in told
    tensors["model.layers.4.mlp.other.weight" if family == "qwen3-next" else "mtp"] = torch.ones(2)
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    assert "unknown tensors" in refused(tmp_path)


def test_a_model_that_sees_has_its_text_model_one_level_deeper(tmp_path, caplog):
    """Also where the experts of a layer are in two tensors, as in the published files."""
    text = hf_checkpoints.make(tmp_path, "qwen3.5-moe", shard_size="1GB").state_dict()
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    plain = model(tmp_path)
    seeing = {"model_type": "qwen3_5_moe", "text_config": config, "vision_config": {"depth": 1}}
    (tmp_path / "config.json").write_text(json.dumps(seeing), encoding="utf-8")
    deeper = {
        name.replace("model.", "model.language_model.", 1): tensor.clone().contiguous()
        for name, tensor in text.items()
    }
    assert any(name.endswith("experts.gate_up_proj") for name in deeper)
    deeper["model.visual.pos_embed.weight"] = torch.ones(2)
    safetensors.save_file(deeper, tmp_path / "model.safetensors")
    caplog.set_level("WARNING", hf_weights.__name__)
    found = dict(model(tmp_path).named_parameters())
    assert "model.visual.pos_embed.weight" in logged(caplog)
    assert all(torch.equal(found[name], one) for name, one in plain.named_parameters())


@pytest.mark.parametrize(
    "family", ["llama-tied", "moe-unscaled", "glm-lite", "qwen3.5-moe", "gpt-oss", "nemotron-h-moe"]
)
def test_the_table_has_every_tensor_once(tmp_path, family):
    hf_checkpoints.make(tmp_path, family)
    found = Shards(tmp_path)
    sources = HFWeights(tmp_path, resolve(str(tmp_path))).sources
    assert shapes(sources) == {name: found.shape(name) for name in found.names}
    one = model(tmp_path)
    names = [weights.global_name(one, name) for name, _ in one.named_parameters()]
    names += [name for name, _ in weights.expert_biases(one)]
    used = [rows for name in names for rows in sources[name].parts]
    assert len(used) == len(set(used)) and {rows.name for rows in used} == found.names


@pytest.mark.parametrize(("change", "words"), [
    ({"rotary_base": 10000.0}, "rotary_base 10000.0 instead of 50.0"),
    ({"num_layers": 5}, "num_layers 5 instead of 4"),
    ({"qk_layernorm": False, "tie_embeddings": False}, "qk_layernorm False instead of True"),
])  # fmt: skip
def test_another_model_is_refused(made, change, words):
    assert words in refused(made, **change)


def test_a_tied_output_layer_must_be_the_embedding(copy):
    tensors, save = copy
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    model(save())
    tensors["lm_head.weight"][-1, -1] += 1
    with pytest.raises(UserError, match="ties the embeddings, but"):
        model(save())


def test_16_bit_files_are_cast(tmp_path):
    saved = hf_checkpoints.make(tmp_path, "llama", dtype="bfloat16").state_dict()
    found = model(tmp_path, dtype="float64").decoder.final_layernorm.weight
    assert found.dtype == torch.float64
    assert torch.equal(found, saved["model.norm.weight"].double())


def test_biases_of_experts_stay_in_float32(tmp_path):
    saved = hf_checkpoints.make(tmp_path, "deepseek").state_dict()
    wanted = saved["model.layers.1.mlp.gate.e_score_correction_bias"]
    router = unwrap(model(tmp_path, dtype="bfloat16")).decoder.layers[1].mlp.router
    assert router.expert_bias.dtype == torch.float32 and torch.equal(router.expert_bias, wanted)


def test_fingerprints_tell_checkpoints_apart(copy):
    tensors, save = copy

    def fingerprint():
        folder = save()
        return HFWeights(folder, resolve(str(folder))).fingerprint()

    first = fingerprint()
    assert fingerprint() == first
    tensors["model.norm.weight"][3] += 1e-3
    assert fingerprint() != first
