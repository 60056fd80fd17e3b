"""[pure] Calls a function with a module, now or when it is imported.

Imports nothing itself, so that a trainer's order of imports stays.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls `then(module)` once for the module `name`, unless `end` comes first; the import raises
    what `then` raises."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

    def begin(self) -> None:
        """Calls `then` now, or when the module is imported."""
        if self._name in sys.modules:
            self._then(sys.modules[self._name])
        else:
            sys.meta_path.insert(0, self)

    def end(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """importlib's protocol: other finders find the module, and its loader then calls `then`."""
        if name != self._name:
            return None
        finders = (finder for finder in list(sys.meta_path) if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._call_after(spec)
        return spec

    def _call_after(self, spec: importlib.machinery.ModuleSpec) -> None:
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:  # not ended in the meantime
                sys.meta_path.remove(self)
                self._then(module)

        loader.exec_module = exec_module
