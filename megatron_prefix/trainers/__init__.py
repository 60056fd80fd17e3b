"""[pure] Trainers on Megatron-Core, one small file each: what is known of it, and which one runs.

Nothing of a trainer is imported here; it is looked up among the modules of the process.
"""

from __future__ import annotations

from megatron_prefix.trainers import (
    areal,
    megatron_bridge,
    megatron_lm,
    megatron_rl,
    miles,
    ms_swift,
    nemo_rl,
    rlinf,
    roll,
    skyrl,
    slime,
    verl,
)
from megatron_prefix.trainers.trainer import Trainer
from megatron_prefix.tree.cp_layout import Slices

__all__ = ["TRAINERS", "Trainer", "running", "slices"]

TRAINERS: tuple[Trainer, ...] = (
    verl.TRAINER, slime.TRAINER, miles.TRAINER, nemo_rl.TRAINER, ms_swift.TRAINER,
    skyrl.TRAINER, rlinf.TRAINER, areal.TRAINER, roll.TRAINER,
    megatron_bridge.TRAINER, megatron_rl.TRAINER, megatron_lm.TRAINER,
)  # fmt: skip
"""The last three are imported by some of the others."""


def slices() -> Slices:
    """How the trainer's setting says that model calls are cut for context-parallel ranks: slime's
    flag, which miles has, too, on a command line that both give to Megatron."""
    flag = getattr(megatron_lm.arguments(), "allgather_cp", False)
    return Slices.CONTIGUOUS if flag else Slices.ZIGZAG


def running() -> Trainer | None:
    """The trainer that this process has imported; None if it is a training loop of its own."""
    return next((one for one in TRAINERS if one.is_running()), None)
