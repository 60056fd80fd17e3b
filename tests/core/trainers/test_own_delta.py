"""The real GatedDeltaNet of slime and miles under the prefix schedule, from sources that are there.

The variable TRAINER_SOURCES names a folder with checkouts `slime` and `miles`, as run_sources.py
takes it; without it the tests are skipped. flash-linear-attention has stand-ins, and what of the
modules computes in fp32 does so in fp64.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab import runtime
from megatron_prefix.lab.data.rollouts import dense_vocabulary
from megatron_prefix.lab.models.build import build_model, unwrap
from megatron_prefix.lab.models.local import keep_float64
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.rl.baseline import Baseline
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import align
from megatron_prefix.lab.verify.matrix import SHAPES
from megatron_prefix.layers.recurrent.definition import chunk_gated_delta_rule
from tests.core.trainers.stand_ins import where_missing
from tests.harness import own_delta
from tests.harness.own_delta import FULL, LINEAR, SIZES
from tests.harness.ranks import run_ranks

TYPES = (LINEAR, LINEAR, LINEAR, FULL)
MODULES = {
    f"{trainer}, {model}": (trainer, f"{trainer}_plugins.models.{model}", kind)
    for trainer in ("slime", "miles")
    for model, kind in (("qwen3_next", "qwen3_next"), ("qwen3_5", "qwen3_5_text"))
}
LAYOUTS = {"1": Layout(), "TP2+SP": Layout(tp=2, sequence_parallel=True), "PP2": Layout(pp=2)}


def _import(folder: str, trainer: str, module: str) -> Any:
    """A trainer's module; the rank is a process of its own, so nothing is left of it."""
    kernels = types.ModuleType("fla.ops.gated_delta_rule")
    kernels.chunk_gated_delta_rule = chunk_gated_delta_rule  # type: ignore[attr-defined]
    modules = types.ModuleType("fla.modules")
    vars(modules).update(
        ShortConvolution=own_delta.ShortConvolution,
        FusedRMSNormGated=own_delta.FusedRMSNormGated,
    )
    for one in (types.ModuleType("fla"), modules, types.ModuleType("fla.ops"), kernels):
        sys.modules[one.__name__] = one
    sys.path.insert(0, str(Path(folder) / trainer))
    where_missing("ray", "sglang", "wandb", "omegaconf", "httpx")
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    found = importlib.import_module(module)
    if hasattr(found, "accelerator"):
        found.accelerator = types.SimpleNamespace(current_device=torch.cuda.current_device)
    return found


def _aligned(folder: str, name: str, layout: Layout, checkpoint: str) -> tuple[str, list[str]]:
    """A rank's part: the class that ran, and what differs from the stock schedule on packs."""
    runtime.initialize(layout)
    attention = _import(folder, *MODULES[name][:2]).Attention
    groups, vocab, _ = dense_vocabulary(SHAPES["tree"].groups(2, "float64"))
    spec = resolve("tiny-llama", num_layers=len(TYPES)).with_vocab(vocab)
    given = {"hf_checkpoint": checkpoint, "allgather_cp": False, "linear_attention_backend": "fla"}
    parallel = layout.sequence_parallel
    with own_delta.own_layers(TYPES, "global", parallel, attention, **given):
        chunks = build_model(spec, layout=layout, dtype="float64")
    layers = unwrap(chunks[0]).decoder.layers
    for layer in layers:
        keep_float64(layer)
    config = PrefixConfig(segment_tokens=64, min_gain=0, kernel="math", chunk_tokens=8)
    packs = Baseline("packed", pack_tokens=150)
    mine = align.align(chunks, groups, config, multiple=layout.alignment, baseline=packs)
    everyone = align.over_ranks(mine)
    runtime.shutdown()
    assert everyone.executed_tokens < everyone.raw_tokens
    assert everyone.grad_max_rel_diff <= everyone.tolerance < 1e-12
    return type(layers[0].self_attention.linear_attn).__name__, list(everyone.failures)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODULES)
def test_real_modules(name: str, layout: str, tmp_path: Path) -> None:
    folder = os.environ.get("TRAINER_SOURCES", "")
    trainer, _, kind = MODULES[name]
    if not folder:
        pytest.skip("TRAINER_SOURCES names no folder with checkouts of slime and miles")
    if not (Path(folder) / trainer).is_dir():
        pytest.skip(f"no checkout of {trainer} in the folder that TRAINER_SOURCES names")
    spec = resolve("tiny-llama")
    config = {
        **SIZES, "model_type": kind, "hidden_size": spec.hidden_size, "layer_types": [*TYPES],
        "num_hidden_layers": len(TYPES), "hidden_act": "silu", "dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    size = LAYOUTS[layout].world_size
    for ran, failures in run_ranks(size, _aligned, folder, name, LAYOUTS[layout], str(tmp_path)):
        assert "GatedDeltaNet" in ran and failures == []
