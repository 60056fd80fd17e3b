"""Checkpoints of a training run, through Megatron's dist_checkpointing.

A run's folder has `checkpoints/step-NNNNNN/` with Megatron's files and `train.json`, and
`checkpoints/latest`, the name of the newest one. A checkpoint is written under a temporary name, is
renamed when it is complete, and only then `latest` is replaced. So a process that is killed at any
moment leaves the last complete checkpoint to resume from.

`train.json` is read first and decides whether the checkpoint fits. checkpoint_files.py reads the
other files without running code from them.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from megatron_prefix.errors import UserError
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.models.old_names import updated
from megatron_prefix.lab.rl import checkpoint_files
from megatron_prefix.lab.rl.checkpoint_state import CheckpointError, State, read_state, reason
from megatron_prefix.lab.rl.run_folder import FOLDER, LATEST, STATE, newest
from megatron_prefix.lab.rl.trainer import Trainer
from megatron_prefix.lab.runtime.folders import check_folder_writable
from megatron_prefix.plan.files import write_text

logger = logging.getLogger(__name__)

# The distributed optimizer's state as of whole parameters: any layout can read it.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


# What torch's writers say in a RuntimeError when the system refuses to write.
_UNWRITTEN = ("iostream error", "inline_container", "PytorchStreamWriter")


@dataclass(frozen=True)
class Identity:
    """The properties that a run must share with the one it resumes.

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


def check_saving(folder: Path) -> None:
    """Refuses a run that could not save, before its first step.

    Raises:
        UserError: a package is missing, or the place cannot be written.
    """
    if importlib.util.find_spec("psutil") is None:
        raise UserError("saving needs psutil, or Megatron's writers hang: pip install psutil")
    check_folder_writable(folder / FOLDER)


def save(trainer: Trainer, folder: Path, identity: Identity) -> Path:
    """Writes a checkpoint of the run; every rank of the job calls this.

    Args:
        folder: the run's.

    Returns:
        The checkpoint's folder.

    Raises:
        UserError: it cannot be written; the last one is still there.
    """
    target = folder / FOLDER / f"step-{trainer.num_steps:06d}"
    part = target.with_name(target.name + ".part")
    try:
        _write(trainer, part, identity)
        if dist.get_rank() == 0:
            _replace_folder(part, target)
            write_text(target.parent / LATEST, target.name + "\n")
        dist.barrier()
    except (OSError, RuntimeError, UserError, CheckpointException) as error:
        if isinstance(error, RuntimeError) and not any(said in str(error) for said in _UNWRITTEN):
            raise
        if dist.get_rank() == 0:  # its space may be what is missing
            shutil.rmtree(part, ignore_errors=True)
        last = newest(target.parent)
        kept = f"{last.name} is there to --resume from" if last else "there is none before it"
        raise UserError(
            f"{target}: the checkpoint cannot be written ({reason(error)}); {kept}; make space"
        ) from None
    logger.info("saved %s", target)
    return target


def _write(trainer: Trainer, part: Path, identity: Identity) -> None:
    """A checkpoint under another name."""
    if dist.get_rank() == 0:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(_sharded_state(trainer, loading=False), str(part))
    dist.barrier()
    if dist.get_rank() == 0:
        state = State(
            step=trainer.num_steps,
            position=trainer.position,
            skipped=trainer.updater.skipped,
            skipped_in_a_row=trainer.updater.skipped_in_a_row,
            world_size=dist.get_world_size(),
            identity=asdict(identity),
            settings=asdict(trainer.settings),
        )
        write_text(part / STATE, state.as_json())


def load(trainer: Trainer, checkpoint: Path, identity: Identity) -> None:
    """Puts a run where a checkpoint left it; every rank of the job calls this.

    The layout may be another one. Random generators then start from their seeds: what they were on
    ranks that are no more means nothing.

    Args:
        checkpoint: as `find` returned it.
        identity: of the run that resumes.

    Raises:
        UserError: the checkpoint is of another model or of other rollouts, or one of its files
            cannot be used.
    """
    state = read_state(checkpoint)
    _check(checkpoint, state, identity, len(trainer.rollouts.groups))
    same_world = state.world_size == dist.get_world_size()
    loaded = checkpoint_files.load(
        _sharded_state(trainer, loading=True, rng=same_world), checkpoint
    )
    try:
        for number, chunk in enumerate(trainer.chunks):
            unwrap(chunk).load_state_dict(loaded[f"model{number}"])
        trainer.optimizer.load_state_dict(loaded["optimizer"])
        if same_world:
            _set_rng(loaded["rng"])
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as e:
        raise CheckpointError(checkpoint, f"does not fit this run ({reason(e)})") from e
    if not same_world:
        logger.warning("resumed on a different number of ranks: random generators are seeded anew")
    trainer.num_steps, trainer.position = state.step, state.position
    trainer.updater.skipped = state.skipped
    trainer.updater.skipped_in_a_row = state.skipped_in_a_row
    _tell_changes(state, trainer.settings)


def _tell_changes(state: State, settings: Any) -> None:
    """Says what the run that goes on does otherwise."""
    now = json.loads(json.dumps(asdict(settings)))
    unknown = [*state.unknown, *(name for name in state.settings if name not in now)]
    for what, names in (
        ("resumed with other settings than before", _changes(state.settings, now)),
        ("the checkpoint has options that this release does not know", unknown),
    ):
        if names:
            logger.warning("%s: %s", what, ", ".join(names)[:200])


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


def _check(checkpoint: Path, state: State, identity: Identity, num_groups: int) -> None:
    wanted = json.loads(json.dumps(asdict(identity)))
    for name, value in wanted.items():
        stored = state.identity.get(name)
        if name == "model" and isinstance(stored, dict):
            stored = updated(stored)
        if stored == value:
            continue
        if name == "model":
            fields = _differences(stored if isinstance(stored, dict) else {}, value)
            raise UserError(
                f"{checkpoint}: was made with another model ({'; '.join(fields)}); use the same"
                " --model and --set as that run"
            )
        what = (
            "was made from other rollouts, or with another --max-tokens"
            if name == "rollouts"
            else (f"has {name} {str(stored)[:40]}, this run {value}")
        )
        raise UserError(
            f"{checkpoint}: {what}; use the same as that run, or start again without --resume"
        )
    if state.position >= num_groups:
        path = checkpoint / STATE
        raise CheckpointError(path, f"position {state.position} of rollouts of {num_groups} groups")


def _differences(stored: Mapping[str, Any], value: Mapping[str, Any]) -> list[str]:
    """What distinguishes two models; what only a newer release knows of a model, too."""
    names = [*_changes(stored, value), *(name for name in stored if name not in value)]
    return [
        f"{name[:40]} {str(stored.get(name))[:40]} there, {value.get(name, 'unknown')} here"
        for name in names[:8]
    ]


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [name for name in after if before.get(name) != after[name]]


def _replace_folder(part: Path, target: Path) -> None:
    """Gives a complete folder its name; an older one of that name goes."""
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.rename(target, old)
    os.rename(part, target)
    shutil.rmtree(old, ignore_errors=True)
