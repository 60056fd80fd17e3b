"""[pure] The prefix schedule in a trainer whose code stays as it is.

`on()` puts it in the place of Megatron's `get_forward_backward_func`, configured by variables or a
TOML file (settings.py); `off()` takes it away. Importing this package does neither; importing
`megatron_prefix.auto.on_import` turns it on.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
import sys
from typing import Any

from megatron_prefix import __version__
from megatron_prefix.auto.settings import described, read_config
from megatron_prefix.auto.swap import Swap
from megatron_prefix.config import PrefixConfig

__all__ = ["init", "off", "on"]
logger = logging.getLogger(__name__)

_TRAINERS = {
    "verl": "verl", "slime": "slime", "nemo_rl": "NeMo-RL", "areal": "AReaL",
    "megatron.training": "Megatron-LM",
}  # fmt: skip
"""Modules and what they belong to; the last is imported by some of the others."""
_running: list[Swap] = []


def on(config: PrefixConfig | None = None) -> None:
    """Turns the prefix schedule on in this process, wherever Megatron is or will be imported.

    Once more: with the new configuration.

    Args:
        config: default: what variables and file say, in mode "auto" where they say nothing of it.

    Raises:
        UserError: a variable, or the file, that is wrong.
    """
    config = read_config() if config is None else config
    off()
    swap = Swap(functools.partial(_replacement, config=config))
    swap.begin()
    _running.append(swap)


def off() -> None:
    """Puts Megatron's own function back, in every module that has the other one."""
    while _running:
        _running.pop().end()


def init(*_: Any) -> None:
    """`on()`, for trainers that call a function of one's own at their start.

    slime calls that of `--custom-megatron-init-path` with its arguments, which are not needed.
    """
    on()


def _replacement(stock: Any, *, config: PrefixConfig) -> Any:
    """What takes the place of `stock`, Megatron's function."""
    told: list[bool] = []

    @functools.wraps(stock)
    def get_forward_backward_func(*args: Any, **options: Any) -> Any:
        if not told:
            told.append(True)
            _tell(config)
        if config.mode == "off":
            return stock(*args, **options)
        from megatron_prefix.run.schedule import get_forward_backward_func as ours

        return ours(*args, prefix_config=config, **options)

    get_forward_backward_func.stock = stock  # type: ignore[attr-defined]  # megatron/stock.py asks
    return get_forward_backward_func


def _tell(config: PrefixConfig) -> None:
    """Logs on the first rank what was found and what is on.

    As a warning: nobody has written into the trainer that it runs another schedule.
    """
    import torch

    if torch.distributed.is_initialized():
        rank = torch.distributed.get_rank()
    else:
        rank = int(os.environ.get("RANK", 0))
    if rank == 0:
        logger.warning(
            "megatron_prefix %s in %s (megatron-core %s, torch %s): %s",
            __version__, _trainer(), _version("megatron.core", "megatron-core"),
            torch.__version__, described(config),
        )  # fmt: skip


def _trainer() -> str:
    """The trainer that this process has imported, with its version where it has one."""
    for module, name in _TRAINERS.items():
        if module in sys.modules:
            version = _version(module, name)
            return f"{name} {version}" if version else name
    return "a loop of its own"


def _version(module: str, package: str) -> str:
    """The version of an imported module, or of its package; "" where neither says."""
    found = getattr(sys.modules.get(module), "__version__", None)
    if found is not None:
        return str(found)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
