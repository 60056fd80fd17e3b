"""The real GatedDeltaNet of slime, miles and ms-swift, from sources that are there already.

The variable TRAINER_SOURCES names a folder with checkouts `slime`, `miles` and `mcore-bridge`, as
run_sources.py takes it; without it the tests are skipped. flash-linear-attention has stand-ins, and
what of the modules computes in fp32 does so in fp64.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.trainers import own_gdn
from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab import runtime
from megatron_prefix.lab.data.rollouts import dense_vocabulary
from megatron_prefix.lab.models.build import build_model, unwrap
from megatron_prefix.lab.models.local import keep_float64
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.platforms import cpu
from megatron_prefix.lab.rl.baseline import Baseline
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import align
from megatron_prefix.lab.verify.matrix import SHAPES
from megatron_prefix.megatron.stock import stock_schedule
from tests.core.trainers.stand_ins import where_missing
from tests.harness import own_delta
from tests.harness.own_delta import FULL, LINEAR
from tests.harness.ranks import run_ranks

TYPES = (LINEAR, LINEAR, LINEAR, FULL)
MODULES = {
    f"{trainer}, {model}": (trainer, f"{trainer}_plugins.models.{model}", kind)
    for trainer in ("slime", "miles")
    for model, kind in (("qwen3_next", "qwen3_next"), ("qwen3_5", "qwen3_5_text"))
}
LAYOUTS = {"1": Layout(), "TP2+SP": Layout(tp=2, sequence_parallel=True), "PP2": Layout(pp=2)}
WITH_CP = {
    "CP2": Layout(cp=2), "CP2+TP2+SP": Layout(cp=2, tp=2, sequence_parallel=True),
    "CP2+PP2": Layout(cp=2, pp=2),
}  # fmt: skip
RAN = [
    *((name, layout) for name in MODULES for layout in LAYOUTS),
    *((name, layout) for name in MODULES for layout in WITH_CP if name.startswith("miles")),
]
"""slime's context parallelism is refused; see the last test."""


def _import(folder: str, trainer: str, module: str) -> Any:
    """A trainer's module."""
    own_gdn.put_kernels()
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
    groups, vocab, _ = dense_vocabulary(SHAPES["tree"].groups(2, "float64")[:2])
    spec = resolve("tiny-llama", num_layers=len(TYPES)).with_vocab(vocab)
    given = {"hf_checkpoint": checkpoint, "allgather_cp": False, "linear_attention_backend": "fla"}
    parallel = layout.sequence_parallel
    with own_delta.own_layers(TYPES, "global", parallel, attention, **given):
        chunks = build_model(spec, layout=layout, dtype="float64")
    if layout.cp > 1:
        own_gdn.pass_states(chunks)
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


@pytest.mark.parametrize(("name", "layout"), RAN)
def test_real_modules(name: str, layout: str, tmp_path: Path) -> None:
    folder = os.environ.get("TRAINER_SOURCES", "")
    trainer, _, kind = MODULES[name]
    if not folder:
        pytest.skip("TRAINER_SOURCES names no folder with checkouts of slime and miles")
    if not (Path(folder) / trainer).is_dir():
        pytest.skip(f"no checkout of {trainer} in the folder that TRAINER_SOURCES names")
    own_gdn.write_config(tmp_path, kind, TYPES, "tiny-llama")
    ranks = {**LAYOUTS, **WITH_CP}[layout]
    for ran, failures in run_ranks(ranks.world_size, _aligned, folder, name, ranks, str(tmp_path)):
        assert "GatedDeltaNet" in ran and failures == []


def _gradients(folder: str, layout: Layout, checkpoint: str) -> dict[str, torch.Tensor]:
    """A rank's part: of a step of the stock schedule on packs, with slime's own layers."""
    runtime.initialize(layout)
    attention = _import(folder, *MODULES["slime, qwen3_5"][:2]).Attention
    groups, vocab, _ = dense_vocabulary(SHAPES["tree"].groups(2, "float64")[:2])
    spec = resolve("tiny-llama", num_layers=3).with_vocab(vocab)
    given = {"hf_checkpoint": checkpoint, "allgather_cp": False, "linear_attention_backend": "fla"}
    with own_delta.own_layers((LINEAR, LINEAR, FULL), "global", False, attention, **given):
        chunks = build_model(spec, layout=layout, dtype="float64")
    model = unwrap(chunks[0])
    for layer in model.decoder.layers:
        keep_float64(layer)
    model.config.calculate_per_token_loss = True  # one divisor for all ranks
    items = align.made(groups, Baseline("packed", pack_tokens=150), 4, 1, 1234)
    trace = align.run_step(stock_schedule(), chunks, items, optimize=False)
    runtime.shutdown()
    return trace.gradients


def test_slimes_context_parallel_ranks_drop_gradients(tmp_path: Path) -> None:
    """Why it is refused: with two ranks all below the last of these layers is wrong in slime."""
    folder = os.environ.get("TRAINER_SOURCES", "")
    if not (Path(folder) / "slime").is_dir() or not folder:
        pytest.skip("no checkout of slime in a folder that TRAINER_SOURCES names")
    own_gdn.write_config(tmp_path, "qwen3_5_text", (LINEAR, LINEAR, FULL), "tiny-llama")
    expected, found = (
        run_ranks(layout.world_size, _gradients, folder, layout, str(tmp_path))
        for layout in (Layout(), Layout(cp=2))
    )
    errors = {
        name: float((sum(rank[name] for rank in found) - one).abs().max() / one.abs().max())
        for name, one in expected[0].items()
    }
    below = {n: e for n, e in errors.items() if "layers.0." in n or "embedding" in n}
    assert min(below.values()) > 0.1
    assert max(error for name, error in errors.items() if name not in below) < 1e-12


def _bridges(folder: str) -> Any:
    """mcore-bridge's class, from its file alone."""
    own_gdn.put_kernels()
    for name in ("transformer_engine", "mcore_bridge", "mcore_bridge.config"):
        sys.modules[name] = types.ModuleType(name)
    vars(sys.modules["mcore_bridge.config"])["ModelConfig"] = object
    name = "mcore_bridge.model.modules.gated_delta_net"
    path = Path(folder) / "mcore-bridge" / "src" / f"{name.replace('.', '/')}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    del sys.modules["transformer_engine"]
    return module.GatedDeltaNet


def _aligned_bridge(folder: str, layout: Layout) -> list[str]:
    """A rank's part: what differs from the stock schedule, one rollout a microbatch."""
    runtime.initialize(layout)
    cpu.load_recurrent_layers()
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_prefix.lab.models import hybrid

    own = _bridges(folder)
    TransformerConfig.linear_decoupled_in_proj = False  # type: ignore[attr-defined]
    groups, vocab, _ = dense_vocabulary(SHAPES["tree"].groups(2, "float64")[:2])
    with mock.patch.object(hybrid, "GatedDeltaNet", own):
        spec = resolve("tiny-qwen3-next").with_vocab(vocab)
        chunks = build_model(spec, layout=layout, dtype="float64")
    assert any(type(module) is own for module in unwrap(chunks[0]).modules())
    config = PrefixConfig(segment_tokens=64, min_gain=0, kernel="math", chunk_tokens=8)
    mine = align.align(chunks, groups, config, multiple=layout.alignment)
    everyone = align.over_ranks(mine)
    runtime.shutdown()
    assert everyone.executed_tokens < everyone.raw_tokens
    assert everyone.grad_max_rel_diff <= everyone.tolerance < 1e-12
    return list(everyone.failures)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_subclass_of_mcore_bridge(layout: str) -> None:
    folder = os.environ.get("TRAINER_SOURCES", "")
    if not folder or not (Path(folder) / "mcore-bridge").is_dir():
        pytest.skip("no checkout of mcore-bridge in a folder that TRAINER_SOURCES names")
    for failures in run_ranks(LAYOUTS[layout].world_size, _aligned_bridge, folder, LAYOUTS[layout]):
        assert failures == []
