"""Checkpoints of a training run, through Megatron's dist_checkpointing.

A run's folder holds `checkpoints/step-NNNNNN/` with Megatron's files and `train.json`, and
`checkpoints/latest`, the name of the newest one. A checkpoint is written under another name and
gets its own when it is complete, and `latest` is replaced after that: so a process that is killed
at any moment leaves the last complete checkpoint to resume from.

`train.json` is read first and decides whether the checkpoint fits. Only then are Megatron's files
read, whose index torch.distributed.checkpoint keeps as a pickle: resume only from checkpoints that
you trust.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_prefix.errors import UserError
from megatron_prefix.models.build import unwrap
from megatron_prefix.rl.trainer import Trainer

logger = logging.getLogger(__name__)

FOLDER, LATEST, STATE = "checkpoints", "latest", "train.json"
FORMAT = 1
# The distributed optimizer's state as of whole parameters: any layout can read it.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


@dataclass(frozen=True)
class Identity:
    """What a run must have in common with the one it resumes.

    Attributes:
        model: every field of the ModelSpec.
        dtype: of the weights.
        seed: of the initial weights, which the reference model keeps.
        rollouts: fingerprint of the RolloutSet.
        distributed_optimizer: which of Megatron's optimizers.
    """

    model: Mapping[str, Any]
    dtype: str
    seed: int
    rollouts: str
    distributed_optimizer: bool


def holds_checkpoints(output: Path) -> bool:
    """Whether a run's folder has checkpoints."""
    return (output / FOLDER / LATEST).exists()


def find(path: Path) -> Path | None:
    """The newest complete checkpoint of a run's folder; None when it has none.

    Args:
        path: a run's folder, its `checkpoints` folder, or one checkpoint.

    Raises:
        UserError: `path` does not exist, is an incomplete checkpoint, or `latest` names none.
    """
    if (path / STATE).is_file():
        return path
    for folder in (path / FOLDER, path):
        if (folder / LATEST).is_file():
            found = folder / (folder / LATEST).read_text(encoding="utf-8").strip()
            if not (found / STATE).is_file():
                raise UserError(f"{folder / LATEST}: names {found.name}, which is not there")
            return found
    if not path.exists():
        raise UserError(f"--resume {path}: no such folder")
    if path.parent.name == FOLDER:
        raise UserError(f"--resume {path}: not a complete checkpoint ({STATE} is missing)")
    return None


def save(trainer: Trainer, folder: Path, identity: Identity) -> Path:
    """Writes a checkpoint of the run; every rank of the job calls this.

    Args:
        folder: the run's.

    Returns:
        The checkpoint's folder.
    """
    if importlib.util.find_spec("psutil") is None:
        raise UserError("saving needs psutil, or Megatron's writers hang: pip install psutil")
    target = folder / FOLDER / f"step-{trainer.num_steps:06d}"
    part = target.with_name(target.name + ".part")
    if dist.get_rank() == 0:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(_sharded_state(trainer, loading=False), str(part))
    dist.barrier()
    if dist.get_rank() == 0:
        state = {"format": FORMAT, **_progress(trainer), "identity": asdict(identity)}
        settings = asdict(trainer.settings)
        _write(part / STATE, json.dumps({**state, "settings": settings}, indent=2) + "\n")
        _replace_folder(part, target)
        _write(target.parent / LATEST, target.name + "\n")
    dist.barrier()
    logger.info("saved %s", target)
    return target


def load(trainer: Trainer, checkpoint: Path, identity: Identity) -> None:
    """Puts a run where a checkpoint left it; every rank of the job calls this.

    The layout may be another one. Random generators then start from their seeds: what they were on
    ranks that are no more means nothing.

    Args:
        checkpoint: as `find` returned it.
        identity: of the run that resumes.

    Raises:
        UserError: the checkpoint is of another model or of other rollouts.
    """
    state = _read(checkpoint / STATE)
    _check(checkpoint, state, identity)
    changed = _changes(state["settings"], json.loads(json.dumps(asdict(trainer.settings))))
    if changed:
        logger.warning("resumed with other settings than before: %s", ", ".join(changed))
    same_world = state["world_size"] == dist.get_world_size()
    wanted = _sharded_state(trainer, loading=True, rng=same_world)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch about its own functions
        loaded = dist_checkpointing.load(wanted, str(checkpoint))
    for number, chunk in enumerate(trainer.chunks):
        unwrap(chunk).load_state_dict(loaded[f"model{number}"])
    trainer.optimizer.load_state_dict(loaded["optimizer"])
    if same_world:
        _set_rng(loaded["rng"])
    else:
        logger.warning("resumed on another number of ranks: random generators start anew")
    trainer.num_steps, trainer.position = state["step"], state["position"]
    trainer.updater.skipped = state["skipped"]
    trainer.updater.skipped_in_a_row = state["skipped_in_a_row"]


def _progress(trainer: Trainer) -> dict[str, int]:
    return {
        "step": trainer.num_steps,
        "position": trainer.position,
        "skipped": trainer.updater.skipped,
        "skipped_in_a_row": trainer.updater.skipped_in_a_row,
        "world_size": dist.get_world_size(),
    }


def _sharded_state(trainer: Trainer, *, loading: bool, rng: bool = True) -> dict[str, Any]:
    """Model, optimizer and random generators as Megatron's sharded state."""
    models = {
        f"model{number}": unwrap(chunk).sharded_state_dict()
        for number, chunk in enumerate(trainer.chunks)
    }
    optimizer = trainer.optimizer.sharded_state_dict(models, loading, metadata=_METADATA)
    state = {**models, "optimizer": optimizer}
    if rng:
        rank, size = dist.get_rank(), dist.get_world_size()
        state["rng"] = ShardedObject("rng", _get_rng(), (size,), (rank,))
    return state


def _get_rng() -> dict[str, Any]:
    """States of this rank's generators: torch's, the GPU's, and Megatron's forks of it."""
    return {
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def _set_rng(states: dict[str, Any]) -> None:
    get_cuda_rng_tracker().set_states(states["tracker"])
    torch.cuda.set_rng_state(states["device"])
    torch.set_rng_state(states["torch"])


def _read(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); resume from another one") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise UserError(f"{path}: not of format {FORMAT}; resume with the release that wrote it")
    return state


def _check(checkpoint: Path, state: dict[str, Any], identity: Identity) -> None:
    wanted = json.loads(json.dumps(asdict(identity)))
    for name, value in wanted.items():
        found = state["identity"].get(name)
        if found == value:
            continue
        if name == "model":
            fields = [f"{f} {found.get(f)} there, {value[f]} here" for f in _changes(found, value)]
            raise UserError(f"{checkpoint}: of another model ({'; '.join(fields)}); give the same")
        what = (
            "was made from other rollouts (or another --max-tokens)"
            if name == "rollouts"
            else (f"has {name} {found}, this run {value}")
        )
        raise UserError(f"{checkpoint}: {what}; give the same, or start anew without --resume")


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [name for name in after if before.get(name) != after[name]]


def _write(path: Path, text: str) -> None:
    """Writes a small file in one go."""
    part = path.with_name(path.name + ".part")
    with open(part, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def _replace_folder(part: Path, target: Path) -> None:
    """Gives a complete folder its name; an older one of that name goes."""
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.rename(target, old)
    os.rename(part, target)
    shutil.rmtree(old, ignore_errors=True)
