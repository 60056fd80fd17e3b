"""Ranks: their layout, their process groups, and starting them.

Importing this costs no torch; the functions import it when they run.
"""

from __future__ import annotations

from megatron_prefix.lab.runtime.groups import (
    World,
    env_world_size,
    first_rank,
    initialize,
    shutdown,
)
from megatron_prefix.lab.runtime.launch import RankError, launch, run_ranks
from megatron_prefix.lab.runtime.layout import Layout

__all__ = [
    "Layout",
    "RankError",
    "World",
    "env_world_size",
    "first_rank",
    "initialize",
    "launch",
    "run_ranks",
    "shutdown",
]
