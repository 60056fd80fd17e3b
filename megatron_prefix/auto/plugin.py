"""What verl imports in every process: the entry point of this package in the group `verl.plugins`.

To be installed changes nothing. The schedule is turned on if MEGATRON_PREFIX_MODE, or `mode` in the
settings file, says so; otherwise the first rank logs that the package is there.
"""

from __future__ import annotations

import importlib
import logging
import os

from megatron_prefix import __version__
from megatron_prefix.auto.first_line import first_line
from megatron_prefix.auto.settings import FILE, PREFIX, names_a_mode, variable
from megatron_prefix.errors import UserError

logger = logging.getLogger(__name__)


def start() -> None:
    """Turns the schedule on if it is asked for.

    Raises:
        SystemExit: settings that are wrong; verl goes on without a plugin that raises an Exception.
    """
    try:
        is_asked = names_a_mode()
    except UserError as error:
        first_line(f"megatron_prefix: {error}")
        raise SystemExit(2) from None
    if is_asked:
        importlib.import_module("megatron_prefix.auto.on_import")
    elif int(os.environ.get("RANK", 0)) == 0:
        names = [name for name in os.environ if name.startswith(PREFIX) and os.environ[name]]
        logger.log(
            logging.WARNING if names else logging.INFO,
            "megatron_prefix %s is installed and off%s: %s=auto turns it on (or `mode` in the file"
            " of %s)",
            __version__, f", whatever {names[0]} says" if names else "", variable("mode"), FILE,
        )  # fmt: skip


start()
