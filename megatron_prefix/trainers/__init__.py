"""[pure] Trainers on Megatron-Core: what is known of each (table.py), and which one runs.

Nothing of a trainer is imported here; it is looked up among the modules of the process.
"""

from __future__ import annotations

from megatron_prefix.trainers.table import TRAINERS, arguments
from megatron_prefix.trainers.trainer import Trainer
from megatron_prefix.tree.cp_layout import Slices

__all__ = ["TRAINERS", "Trainer", "running_trainer", "slices"]


def slices() -> Slices:
    """How the trainer's setting says that model calls are cut for context-parallel ranks: slime's
    flag, which miles has, too, on a command line that both give to Megatron."""
    flag = getattr(arguments(), "allgather_cp", False)
    return Slices.CONTIGUOUS if flag else Slices.ZIGZAG


def running_trainer() -> Trainer | None:
    """The trainer that this process has imported; None if it is a training loop of its own."""
    return next((trainer for trainer in TRAINERS if trainer.is_running()), None)
