"""[pure] The prefix schedule in a trainer whose code stays as it is.

`on()` replaces Megatron's `get_forward_backward_func` with it, configured by variables or a TOML
file (settings.py); `off()` puts Megatron's back. Importing this package does neither; importing
`megatron_prefix.auto.on_import` turns it on. To be installed changes nothing (plugin.py).
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from megatron_prefix import __version__, trainers
from megatron_prefix.auto.settings import described_config, read_config
from megatron_prefix.auto.swap import Swap
from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import Refusal
from megatron_prefix.trainers import versions
from megatron_prefix.trainers.trainer import Trainer, version_of

__all__ = ["init", "off", "on"]
logger = logging.getLogger(__name__)
_running: list[Swap] = []


def on(config: PrefixConfig | None = None) -> None:
    """Puts the prefix schedule in place of Megatron's in this process, in every module that has
    imported or will import `get_forward_backward_func`. A second call replaces the settings.

    Call it in every process that trains, before the trainer asks for its schedule.

    Args:
        config: the settings; default: from the `MEGATRON_PREFIX_` variables and the TOML file that
            `MEGATRON_PREFIX_CONFIG` names, in mode "auto" if they name no mode.

    Raises:
        UserError: a variable or the file has an unknown name or an invalid value.
    """
    config = read_config() if config is None else config
    off()
    swap = Swap(functools.partial(_replacement, config=config))
    swap.begin()
    _running.append(swap)


def off() -> None:
    """Puts Megatron's own function back in every module of this process. Schedules that the trainer
    already holds stay as they are."""
    while _running:
        _running.pop().end()


def init(*_: Any) -> None:
    """Calls `on()`, for trainers that call a function of yours at their start: slime and miles with
    `--custom-megatron-init-path megatron_prefix.auto.init`. The trainer's arguments are not used.

    Raises:
        UserError: as `on()`.
    """
    on()


def _replacement(stock: Any, *, config: PrefixConfig) -> Any:
    """The function that replaces `stock`, Megatron's."""

    @functools.cache
    def decided() -> tuple[Refusal | None, dict[str, Any]]:
        """Why the trainer gets `stock`, and where its masks are; once: then it is imported."""
        trainer = trainers.running_trainer()
        refusal = trainer.refusal() if trainer and config.mode != "off" else None
        _tell(config, trainer, refusal)
        masks = trainer.samples if trainer and config.trainer_masks else None
        says = {name: getattr(trainer, name, False) for name in ("passes_together", "masks_tokens")}
        return refusal, {"samples": masks, "slices": trainers.slices(), **says}

    @functools.wraps(stock)
    def get_forward_backward_func(*args: Any, **options: Any) -> Any:
        refusal, says = decided()
        if config.mode == "off" or refusal:
            return stock(*args, **options)
        from megatron_prefix.run.schedule import get_forward_backward_func as ours

        return ours(*args, prefix_config=config, **{**says, **options})

    get_forward_backward_func.stock = stock  # type: ignore[attr-defined]  # megatron/stock.py asks
    return get_forward_backward_func


def _tell(config: PrefixConfig, trainer: Trainer | None, refusal: Refusal | None) -> None:
    """Logs on the first rank which trainer runs and what is on.

    As a warning: nothing in the trainer's own code says that it runs another schedule.

    Raises:
        CannotShare: the trainer is set to what the schedule cannot run, in mode "on"; on all ranks.
    """
    import torch

    named = f"{trainer.name} {trainer.version}".rstrip() if trainer else "a custom training loop"
    if refusal and config.mode == "on":
        raise refusal.given().error(f"the prefix schedule cannot run {named} with ")
    if versions.is_first_rank():
        stock = f"stock schedule in every step: {refusal.given().text}" if refusal else ""
        logger.warning(
            "megatron_prefix %s in %s (megatron-core %s, torch %s): %s",
            __version__, named, version_of("megatron.core", "megatron-core"),
            torch.__version__, stock or described_config(config),
        )  # fmt: skip
