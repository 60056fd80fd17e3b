"""[pure] What this package knows about a trainer."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_prefix.errors import Refusal


def version_of(module: str, package: str) -> str:
    """The version of an imported module, or of its package; "" if neither says."""
    version = getattr(sys.modules.get(module), "__version__", None)
    if version is not None:
        return str(version)
    if not package:
        return ""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@dataclass(frozen=True)
class Trainer:
    """A trainer, as read in its sources and run from them; docs/trainers has a page on each.

    Attributes:
        module: imported where it runs.
        package: its name on PyPI, for its version.
        tried: versions and commits whose code ran with the prefix schedule; (): read only.
        on: what turns the schedule on without a change of its code.
        loss: which positions of a model call count as trained.
        together: what keeps the rollouts of a group on one data-parallel rank.
        refused: its options that are refused, on top of what the model itself is refused for.
        samples: where a microbatch has its trained positions (`Samples` in run/calls.py);
            None: nowhere, or not in a form that can be relied on.
        passes_together: whether data-parallel ranks make equally many calls without gradients;
            read in its sources.
        masks_tokens: whether the loss_mask of its model calls is over tokens, not over the
            positions that predict them, or for multi-token prediction alone; all positions then
            count.
        losses_set: names that its losses set for themselves, and that no forward step of the
            versions that were tried reads, though its code has them for something else; read in
            its sources.
        is_used: whether it runs where `module` is imported.
        refusal: why this process, as it is set up, cannot be right; None if nothing is wrong. The
            model and its calls are looked at elsewhere (megatron/features.py, run/calls.py).
    """

    name: str
    module: str
    package: str
    tried: tuple[str, ...]
    on: str
    loss: str
    together: str
    refused: tuple[Refusal, ...] = ()
    samples: Callable[[Any], Any] | None = None
    passes_together: bool = False
    masks_tokens: bool = False
    losses_set: frozenset[str] = frozenset()
    is_used: Callable[[], bool] = lambda: True
    refusal: Callable[[], Refusal | None] = lambda: None

    def is_running(self) -> bool:
        return self.module in sys.modules and self.is_used()

    @property
    def version(self) -> str:
        """Of what is imported or installed; "" if it does not say."""
        return version_of(self.module, self.package)
