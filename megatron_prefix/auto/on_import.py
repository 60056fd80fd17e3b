"""Importing this module turns the prefix schedule on, as variables and file say.

For trainers that import what they are told to, such as RLinf's `RLINF_EXT_MODULE` and verl's
`VERL_USE_EXTERNAL_MODULES`. verl's plugin (plugin.py) imports it if a mode is set.
"""

from __future__ import annotations

from megatron_prefix.auto import on
from megatron_prefix.auto.first_line import first_line
from megatron_prefix.errors import UserError

try:
    on()
except UserError as error:
    # verl goes on without a plugin that raises an Exception, and says nothing.
    first_line(f"megatron_prefix: {error}")
    raise SystemExit(2) from None
