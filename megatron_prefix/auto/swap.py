"""[pure] The only file that replaces Megatron's get_forward_backward_func.

Where Megatron's schedules are imported already, every module that has the function gets another in
its place; where they are not, they get it when they are, and whoever imports it from them later
gets it, too. Nothing is imported here, so a trainer's own order of imports stays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from megatron_prefix.auto.after_import import AfterImport
from megatron_prefix.errors import UserError

MODULE = "megatron.core.pipeline_parallel.schedules"
NAME = "get_forward_backward_func"


class Swap(AfterImport):
    """Replaces Megatron's function by `made(stock)` from `begin` until `end`.

    `begin` raises a UserError if Megatron's schedules are there and have no such function.
    """

    def __init__(self, make_ours: Callable[[Any], Any]) -> None:
        self._make_ours = make_ours
        self._stock: Any = None
        self._ours: Any = None
        super().__init__(MODULE, self._swap)

    def end(self) -> None:
        """Puts Megatron's function back, wherever the other one is now."""
        super().end()
        if self._ours is not None:
            _exchange(self._ours, self._stock)
            self._stock = self._ours = None

    def _swap(self, module: ModuleType) -> None:
        if NAME not in vars(module):
            raise UserError(
                f"{MODULE} has no {NAME}: turn the prefix schedule on before or after Megatron is"
                " imported, not during that, and with a version that `megatron-prefix doctor` knows"
            )
        self._stock = vars(module)[NAME]
        self._ours = self._make_ours(self._stock)
        _exchange(self._stock, self._ours)


def _exchange(old: Any, new: Any) -> None:
    """Replaces `old` by `new` in all modules; getattr would wake lazy imports."""
    for module in list(sys.modules.values()):
        try:
            members = object.__getattribute__(module, "__dict__")
        except AttributeError:  # None, or something else without attributes
            continue
        for name in [name for name, value in list(members.items()) if value is old]:
            members[name] = new
