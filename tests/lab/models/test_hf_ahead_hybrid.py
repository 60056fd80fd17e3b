"""Hugging Face weights of multi-token prediction in Nemotron-H, by a newer Megatron-Core: its loss
with transformers' own layers between the parts that are added.

Run as a script it prints the loss in whatever release is installed, and by transformers.
"""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    from tests.core.trainers import stand_ins

    stand_ins.for_megatron()

import pytest
import torch
from torch import nn

from megatron_prefix.errors import UserError
from megatron_prefix.lab.models.hf_weights import HFWeights
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.runtime import Layout
from tests.core.trainers.registry import printed_by_newer
from tests.harness import hf_checkpoints
from tests.harness.ranks import run_ranks
from tests.lab.models.test_hf_ahead import joined, loss_of, on_rank, sample, shorten

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
PATTERN, FURTHER = "MEM*-E", "*E"
DEPTHS = 2
FIELDS = {"mtp_num_layers": DEPTHS, "mtp_hybrid_override_pattern": FURTHER}


def checkpoint(folder):
    """Saves one with two layers of multi-token prediction; their losses on `sample()`."""
    kind, options = hf_checkpoints.FAMILIES["nemotron-h-moe"]
    deeper = {**options, "hybrid_override_pattern": PATTERN + FURTHER * DEPTHS}
    hf_checkpoints.FAMILIES["deeper"] = kind, deeper
    model = hf_checkpoints.make(folder, "deeper", shard_size="1GB")
    width, draw = model.config.hidden_size, torch.Generator().manual_seed(3)
    tensors, parts = {}, []
    for name, one in safetensors.load_file(folder / "model.safetensors").items():
        number = int(name.split(".")[2]) if name.startswith("backbone.layers.") else 0
        own = number - len(PATTERN)
        if own >= 0:
            name = name.replace(f"backbone.layers.{number}.", f"mtp.layers.{own}.")
        tensors[name] = one
    for depth in range(DEPTHS):
        first, last = (depth * len(FURTHER) + place for place in (0, len(FURTHER) - 1))
        norms = [1 + torch.randn(width, generator=draw) / 10 for _ in range(3)]
        both = torch.randn(width, 2 * width, generator=draw) / 10
        names = f"{first}.enorm", f"{first}.hnorm", f"{first}.eh_proj", f"{last}.final_layernorm"
        parts.append([*norms[:2], both, norms[2]])
        own = zip(names, parts[-1], strict=True)
        tensors |= {f"mtp.layers.{name}.weight": one for name, one in own}
    safetensors.save_file(tensors, folder / "model.safetensors")
    shorten(folder, len(PATTERN), num_nextn_predict_layers=DEPTHS)
    return expected(model, parts)


@torch.no_grad()
def expected(model, parts):
    """The losses by transformers: its decoder, then later layers as decoders of their own."""
    inputs, labels = sample()
    inner, layers, norm, losses = model.model, [*model.model.layers], model.model.norm_f, []

    def run(start, num, **given):
        inner.layers = nn.ModuleList(layers[start : start + num])
        return inner(**given, use_cache=False).last_hidden_state

    hidden, tokens = run(0, len(PATTERN), input_ids=inputs), inputs
    for depth, weights in enumerate(parts):
        tokens = torch.cat([tokens[:, 1:], tokens[:, :1] * 0], 1)
        both = joined(norm, inner.embeddings(tokens), hidden, *weights)
        start = len(PATTERN) + depth * len(FURTHER)
        hidden = run(start, len(FURTHER), inputs_embeds=both)
        losses.append(loss_of(model.lm_head(hidden), labels, 1 + depth))
    return losses


def test_every_tensor_has_its_place(tmp_path):
    checkpoint(tmp_path)
    for fields in ({}, FIELDS | {"mtp_num_layers": 1}, FIELDS):
        weights = HFWeights(tmp_path, resolve(str(tmp_path), **fields))
    read = {rows.name for source in weights.sources.values() for rows in source.parts}
    assert read >= safetensors.load_file(tmp_path / "model.safetensors").keys()


@pytest.mark.parametrize(("change", "name"), [
    ({"mtp_num_layers": 3}, r"mtp\.layers\.4\.eh_proj"),
    ({"mtp_hybrid_override_pattern": "*-"}, r"mtp\.layers\.1\.mixer\.down"),
])  # fmt: skip
def test_what_is_not_there_is_named(tmp_path, change, name):
    checkpoint(tmp_path)
    with pytest.raises(UserError, match=rf"missing tensors.*{name}"):
        HFWeights(tmp_path, resolve(str(tmp_path), **FIELDS | change))


@pytest.mark.slow
def test_the_losses_are_those_of_the_parts():
    ours, theirs = json.loads(printed_by_newer("tests.lab.models.test_hf_ahead_hybrid"))
    assert ours == pytest.approx(theirs, rel=1e-6)


def main():
    with tempfile.TemporaryDirectory() as made:
        theirs = checkpoint(Path(made))
        run = partial(on_rank, made, Layout(), "loss_values", **FIELDS)
        [ours] = run_ranks(1, run)
    sys.stdout.write(json.dumps([ours, theirs]) + "\n")


if __name__ == "__main__":
    main()
