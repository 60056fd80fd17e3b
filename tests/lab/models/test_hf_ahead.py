"""Hugging Face weights of multi-token prediction, of which transformers has no model: its loss with
transformers' own layer between the parts that are added."""

import json
from functools import partial

import pytest
import torch
from torch import nn

from megatron_prefix.errors import UserError
from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import build_model, unwrap
from megatron_prefix.lab.models.hf_weights import HFWeights
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.models.weights import padded_vocab
from megatron_prefix.lab.runtime import Layout
from tests.harness import hf_checkpoints
from tests.harness.ranks import run_ranks

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
LAYERS = 4
NAMES = {
    "deepseek": ("model.layers.4", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "glm-lite": ("model.layers.4", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "qwen3.5-moe": ("mtp", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
}
LAYOUTS = {"deepseek": Layout(tp=2, sequence_parallel=True)}


def checkpoint(folder, family):
    """Saves one with a layer of multi-token prediction; its loss on `tokens()[:1]`."""
    inside = 2 * LAYERS - 1  # of the kind of the last
    changes = {"num_hidden_layers": 2 * LAYERS}
    kind, options = hf_checkpoints.FAMILIES[family]
    hf_checkpoints.FAMILIES["deeper"] = kind, {**options, **changes}
    model = hf_checkpoints.make(folder, "deeper", shard_size="1GB")
    draw = torch.Generator().manual_seed(3)
    width = model.config.hidden_size
    centered = kind in hf_checkpoints.CENTERED
    parts = [torch.randn(width, generator=draw) / 10 + (not centered) for _ in range(2)]
    parts.append(torch.randn(width, 2 * width, generator=draw) / 10)
    parts.append(torch.randn(width, generator=draw) / 10 + (not centered))
    at, *names = NAMES[family]
    own = f"{at}.layers.0" if at == "mtp" else at
    tensors = {f"{at}.{name}.weight": one for name, one in zip(names, parts, strict=True)}
    for name, one in safetensors.load_file(folder / "model.safetensors").items():
        number = int(name.split(".")[2]) if name.startswith("model.layers.") else 0
        if number == inside:
            tensors[name.replace(f"model.layers.{inside}", own)] = one
        elif number < LAYERS:
            tensors[name] = one
    if at != "mtp":
        tensors[f"{at}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{at}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    safetensors.save_file(tensors, folder / "model.safetensors")
    shorten(folder, LAYERS)
    return expected(model, parts, inside)


def shorten(folder, num, **changes):
    """Makes the last layers of a checkpoint's configuration no part of its decoder."""
    path = folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    for name in ("layer_types", "mlp_layer_types", "layers_block_type", "hybrid_override_pattern"):
        if name in values:
            values[name] = values[name][:num]
    path.write_text(json.dumps({**values, "num_hidden_layers": num, **changes}), encoding="utf-8")


@torch.no_grad()
def expected(model, parts, inside):
    """The loss by transformers: its decoder, then its layer `inside` as a decoder of its own."""
    inputs, labels = sample()
    inner, layers, norm = model.model, model.model.layers, model.model.norm

    def only(some):
        inner.layers = nn.ModuleList([layers[one] for one in some])
        inner.config.num_hidden_layers = len(some)
        if kinds:
            inner.config.layer_types = [kinds[one] for one in some]

    kinds = getattr(inner.config, "layer_types", None)
    only([*range(LAYERS)])
    hidden = inner(input_ids=inputs, use_cache=False).last_hidden_state
    following = inner.embed_tokens(torch.cat([inputs[:, 1:], inputs[:, :1] * 0], 1))
    both = joined(norm, following, hidden, *parts)
    only([inside])
    return loss_of(model(inputs_embeds=both, use_cache=False).logits, labels, 1)


def joined(norm, rows, hidden, of_rows, of_hidden, both, last):
    """What goes into a layer of multi-token prediction, whose last norm `norm` then is."""
    halves = []
    for x, weight in ((rows, of_rows), (hidden, of_hidden)):
        norm.weight.copy_(weight)
        halves.append(norm(x))
    norm.weight.copy_(last)
    return torch.cat(halves, -1) @ both.T


def loss_of(logits, labels, ahead):
    """That of `logits` [1, positions, V] for labels `ahead` of them."""
    more = padded_vocab(hf_checkpoints.VOCAB, 1) - hf_checkpoints.VOCAB  # their logits are zero
    padded = nn.functional.pad(logits[0, :-ahead], (0, more))
    return float(nn.functional.cross_entropy(padded, labels[0, ahead:]))


def sample():
    tokens = hf_checkpoints.tokens()[:1]
    tokens = torch.cat([tokens, tokens[:, :1]], 1)
    return tokens[:, :-1], tokens[:, 1:]


def on_rank(folder, layout, logged="values", **fields):
    """The losses of layers of multi-token prediction; Megatron logs them under that name."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    runtime.initialize(layout)
    MTPLossLoggingHelper.tracker.clear()  # a rank begins with what this process has logged
    spec = resolve(str(folder), **{"mtp_num_layers": 1, **fields})
    [model] = build_model(spec, layout=layout, load_hf=str(folder), wrap_ddp=False)
    inputs, labels = sample()
    places, mask = torch.arange(inputs.shape[1])[None], torch.ones_like(labels)
    unwrap(model)(inputs, places, None, labels=labels, loss_mask=mask)
    return MTPLossLoggingHelper.tracker[logged].tolist()


@pytest.mark.parametrize("family", NAMES)
def test_the_loss_is_that_of_the_parts(tmp_path, family):
    wanted, layout = checkpoint(tmp_path, family), LAYOUTS.get(family, Layout())
    for [found] in run_ranks(layout.world_size, partial(on_rank, tmp_path, layout)):
        assert found == pytest.approx(wanted, rel=1e-6)


def test_copies_must_be_copies_and_all_must_be_there(tmp_path):
    checkpoint(tmp_path, "deepseek")
    spec, file = resolve(str(tmp_path), mtp_num_layers=1), tmp_path / "model.safetensors"
    tensors = safetensors.load_file(file)
    copy = "model.layers.4.shared_head.head.weight"
    safetensors.save_file({**tensors, copy: tensors[copy] + 1}, file)
    with pytest.raises(UserError, match=f"{copy} and lm_head.weight differ"):
        run_ranks(1, partial(on_rank, tmp_path, Layout()))
    del tensors["model.layers.4.eh_proj.weight"]
    safetensors.save_file(tensors, file)
    with pytest.raises(UserError, match=r"missing tensors.*: model.layers.4.eh_proj.weight;"):
        HFWeights(tmp_path, spec)
    HFWeights(tmp_path, resolve(str(tmp_path)))
    with pytest.raises(UserError, match=r"missing tensors.*model.layers.5.enorm"):
        HFWeights(tmp_path, resolve(str(tmp_path), mtp_num_layers=2))


def test_every_depth_has_its_own_weights(tmp_path):
    checkpoint(tmp_path, "deepseek")
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    first = {name: one for name, one in tensors.items() if name.startswith("model.layers.4.")}
    second = {name.replace("layers.4.", "layers.5."): one.clone() for name, one in first.items()}
    second["model.layers.5.eh_proj.weight"] = tensors["model.layers.4.eh_proj.weight"] + 1
    safetensors.save_file(tensors | second, tmp_path / "model.safetensors")

    def on_rank():
        runtime.initialize(Layout())
        spec = resolve(str(tmp_path), mtp_num_layers=2)
        [model] = build_model(spec, layout=Layout(), load_hf=str(tmp_path), wrap_ddp=False)
        return [layer.eh_proj.weight.detach().tolist() for layer in unwrap(model).mtp.layers]

    [found] = run_ranks(1, on_rank)
    wanted = first["model.layers.4.eh_proj.weight"]
    assert found == [wanted.tolist(), (wanted + 1).tolist()]


REFUSED = [
    ("qwen3.5-moe", {"mtp_num_layers": 2}, "this model family has one MTP layer"),
    ("llama", {"mtp_num_layers": 1}, "MTP weights of this model family cannot be read"),
    ("deepseek", {"num_layers": 1, "mtp_num_layers": 1}, "a different last layer"),
]


@pytest.mark.parametrize(("family", "fields", "message"), REFUSED)
def test_layers_that_a_checkpoint_cannot_have_are_refused(tmp_path, family, fields, message):
    (checkpoint if family in NAMES else hf_checkpoints.make)(tmp_path, family)
    if family == "deepseek":  # its second layer is of the kind
        HFWeights(tmp_path, resolve(str(tmp_path), num_layers=2, mtp_num_layers=1))
    with pytest.raises(UserError, match=message):
        HFWeights(tmp_path, resolve(str(tmp_path), **fields))
