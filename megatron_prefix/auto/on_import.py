"""Importing this module turns the prefix schedule on, as variables and file say.

For trainers that import what they are told to: verl's plugins (the entry point of this package in
the group `verl.plugins`) and its `VERL_USE_EXTERNAL_MODULES`.
"""

from __future__ import annotations

from megatron_prefix.auto import on
from megatron_prefix.errors import UserError

try:
    on()
except UserError as error:
    # verl goes on without a plugin that raises an Exception, and says nothing.
    raise SystemExit(f"megatron_prefix: {error}") from None
