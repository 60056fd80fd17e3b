"""Megatron-Bridge's own training step (train_step) with its forward step for GPT models, two steps.

"thd" in a layout's name: packed rows, as its fine-tuning packs them; "dp2": each rank has every
other row.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.core.trainers import stand_ins

stand_ins.for_megatron()

from megatron.core import num_microbatches_calculator  # noqa: E402
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # noqa: E402
from megatron.core.utils import get_model_config  # noqa: E402

from megatron_prefix.lab import runtime  # noqa: E402
from megatron_prefix.lab.models.build import build_model  # noqa: E402
from megatron_prefix.lab.models.optimizer import build_optimizer  # noqa: E402
from megatron_prefix.lab.models.presets import resolve  # noqa: E402
from tests.core.trainers import worker  # noqa: E402
from tests.core.trainers.both import Both, Step, config_of  # noqa: E402
from tests.core.trainers.cpu_training import run_on_cpu  # noqa: E402
from tests.core.trainers.verl_steps import PROMPT, SIZE, VOCAB, mine  # noqa: E402

BRIDGE = "megatron.bridge"
MODULES = [f"{BRIDGE}.training.{name}" for name in ("gpt_step", "train", "utils.pg_utils")]
ALIGN = 4
"""Padded rows have a multiple of it: two slices for each of two context-parallel ranks."""
UNUSED = (
    *(f"{BRIDGE}.training.{name}" for name in (
        "checkpointing", "config", "eval", "fault_tolerance", "initialize", "nvrx_straggler",
        "post_training", "profiling", "state", "tensor_inspect", "utils.log_utils",
        "utils.mlflow_utils", "utils.train_utils",
    )),
    *(f"{BRIDGE}.{name}" for name in ("models", "peft", "data.builders", "data.base")),
    "modelopt", "nvidia_resiliency_ext",
)  # fmt: skip
"""What the two modules import besides; the rest of Megatron-Bridge builds models and data."""


def without_its_start() -> None:
    """Lets megatron.bridge's modules be imported without its package, which imports all models."""
    import megatron
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as newer

    newer.is_gated_delta_net_variant = lambda *_: False  # of a newer core; to count FLOPs
    for name in (BRIDGE, f"{BRIDGE}.data"):
        folders = (Path(one, *name.split(".")) for one in sys.path)
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = [str(one) for one in folders if one.is_dir()]
    megatron.bridge = sys.modules[BRIDGE]  # type: ignore[attr-defined]


def microbatches(*, packed: bool) -> Iterator[dict[str, Any]]:
    """What its data loader gives, of `SIZE` rollouts each: padded rows, or a packed one."""
    ids, mask = mine()
    for start in range(0, len(ids), SIZE):
        members = range(start, min(start + SIZE, len(ids)))
        rows = [ids[row][mask[row].bool()] for row in members]
        lengths = torch.tensor([len(row) for row in rows])
        width = -(-int(lengths.max()) // ALIGN) * ALIGN
        columns: dict[str, list[torch.Tensor]] = {}
        for row, prompt in zip(rows, mask[members, :PROMPT].sum(1), strict=True):
            tokens = row if packed else torch.nn.functional.pad(row, (0, width - len(row)))
            place = torch.arange(len(tokens))
            trained = (place >= prompt - 1) & (place < len(row) - 1)
            own = {
                "tokens": tokens, "labels": tokens.roll(-1), "loss_mask": trained.float(),
                "position_ids": place,
            }  # fmt: skip
            for name, value in own.items():
                columns.setdefault(name, []).append(value)
        joined = torch.cat if packed else torch.stack
        batch: dict[str, Any] = {name: joined(own) for name, own in columns.items()}
        if packed:
            ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
            batch = {name: value[None] for name, value in batch.items()}
            for side in "q", "kv":
                batch[f"cu_seqlens_{side}"], batch[f"max_seqlen_{side}"] = ends, lengths.max()
        yield batch | {"attention_mask": None}


def state() -> Any:
    """What its loop has of a run, as far as the two functions read it."""
    off = SimpleNamespace(start=lambda **_: None, stop=lambda **_: None)
    settings = {
        "train": {
            "micro_batch_size": SIZE, "empty_unused_memory_level": 0,
            "check_optimizer_step_success": False, "skip_sync_grad_norm_across_mp": True,
        },
        "optimizer": {
            "reuse_grad_buf_for_mxfp8_param_ag": False, "barrier_with_L1_time": False,
            "log_num_zeros_in_grad": False,
        },
        "ddp": {"overlap_param_gather": False}, "dist": {"use_decentralized_pg": False},
        "dataset": {"dataloader_type": "single", "enable_in_batch_packing": True},
        "model": {"seq_length": 64, "virtual_pipeline_model_parallel_size": None},
        "rerun_state_machine": {"check_for_nan_in_loss": True, "check_for_spiky_loss": False},
    }  # fmt: skip
    parts = {name: SimpleNamespace(**values) for name, values in settings.items()}
    config = SimpleNamespace(**parts, data_parallel_size=1)
    return SimpleNamespace(cfg=config, timers=lambda *_, **__: off, straggler_timer=_Off())


class _Off:
    """A straggler detector that is off."""

    def __call__(self, **_: Any) -> Any:
        return self

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(self, *_: Any) -> None:
        """Does nothing."""


def steps(name: str) -> list[Step]:
    """Two steps, on one rank."""
    gpt_step, train, pg_utils = map(importlib.import_module, MODULES)
    layout = worker.layout_of(name)
    runtime.initialize(layout)
    spec = resolve("tiny-qwen3", num_layers=2).with_vocab(VOCAB)
    overrides = {"variable_seq_lengths": True, "calculate_per_token_loss": True}
    (chunk,) = build_model(spec, layout=layout, config_overrides=overrides)
    # What ModelOpt gives where there is no teacher.
    train.get_tensor_shapes_adjust_fn_for_distillation = lambda *_, **__: None
    given = [*microbatches(packed="thd" in name)]
    calculator = SimpleNamespace(get=lambda: len(given))
    num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR = calculator
    both, groups, run = Both(config_of(name)), pg_utils.get_pg_collection(chunk), state()
    optimizer, scheduler = build_optimizer([chunk]), SimpleNamespace(step=lambda increment: None)
    for _ in range(2):
        train.train_step(
            functools.partial(gpt_step.forward_step, run), iter(given), [chunk], optimizer,
            scheduler, run, groups, both(), P2PCommunicator(groups.pp, get_model_config(chunk)),
        )  # fmt: skip
    return both.steps


if __name__ == "__main__":
    run_on_cpu()
    sys.path += sys.argv[1].split(os.pathsep)
    worker.StandIns(*UNUSED)
    without_its_start()
    worker.main(MODULES, steps)
