"""[pure] Versions of packages that ran, and one line about what is here and did not.

Trainers have theirs in table.py. A test compares both with the recorded runs, of which
docs/support.md has a table; nothing is looked up in a registry.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from megatron_prefix.trainers.trainer import Trainer, version_of

logger = logging.getLogger(__name__)

TESTED = {
    "torch": ("2.8.0 to 2.15.0",),
    "megatron-core": ("0.16.0rc0", "0.16.1 to 0.19.2"),  # the first is what slime brings
    "transformer-engine": ("2.11.0",),
    "flash-attn-4": ("4.0.0b36",),
    "fla-core": ("0.4.2",),
}
"""Packages, and their versions and ranges of versions that ran."""


def is_tested(package: str, version: str) -> bool:
    """Whether a version ran, or lies between two that did."""
    ranges = (one.partition(" to ") for one in TESTED[package])
    sets = (SpecifierSet(f">={first},<={last or first}") for first, _, last in ranges)
    try:
        return any(one.contains(version, prereleases=True) for one in sets)
    except InvalidVersion:  # somebody's own name; newer packaging says False
        return False


def untested(trainers: Iterable[Trainer]) -> list[str]:
    """Trainers of these and packages that are here in a version that did not run: "torch 2.16"."""
    # As it was imported, which may be a checkout: megatron.core.
    here = {name: version_of(name.replace("-", "."), name) for name in TESTED}
    return [
        *(f"{one.name} {one.version}" for one in trainers if one.version not in ("", *one.tried)),
        *(f"{name} {new}" for name, new in here.items() if new and not is_tested(name, new)),
    ]


def is_first_rank() -> bool:
    """Of the job; before torch knows its ranks, as the environment says."""
    from torch import distributed as dist

    return dist.get_rank() == 0 if dist.is_initialized() else os.environ.get("RANK", "0") == "0"


@functools.cache
def warn_untested(trainer: Trainer | None) -> None:
    """Says on the first rank, once, what of this process did not run with the prefix schedule."""
    names = untested([trainer] if trainer else [])
    if names and is_first_rank():
        logger.warning("%s: not tested; run with verify=2", ", ".join(names))
