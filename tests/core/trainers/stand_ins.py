"""Modules that a trainer imports and that its steps do not use; torch is not imported."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import typing


def for_megatron():
    """What importing megatron.training wants on the CPU; call it before Megatron is imported.

    From 0.18 that is triton, even on the CPU (unpacked it takes 0.7 GB), and from 0.19
    `typing.override`, which Python has from 3.12.
    """
    if not hasattr(typing, "override"):
        typing.override = lambda method: method
    if importlib.util.find_spec("triton") is None:
        StandIns("triton", "megatron.core.transformer.custom_layers.batch_invariant_kernels")
        importlib.import_module("triton").__version__ = "3.7.1"


def where_missing(*names):
    """Stand-ins for those of the packages that are not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        StandIns(*missing)


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Lets a trainer import packages that its steps do not use and that need not be installed."""

    def __init__(self, *names):
        self._names = names
        sys.meta_path.insert(0, self)

    def find_spec(self, name, path=None, target=None):
        """The finder's part; see importlib."""
        if any(name == one or name.startswith(f"{one}.") for one in self._names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        """The loader's part: an ordinary module."""

    def exec_module(self, module):
        """The loader's part; see importlib."""
        module.__getattr__ = _Anything.__getattr__.__get__(_Anything)


def _nothing(*_, **__):
    """Does nothing."""


def _as_it_is(self, function=None, *_, **__):
    """What a decorator gives back that changes nothing."""
    return function


class _Anything(type):
    """Classes whose attributes are such classes."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {"__init__": _nothing, "__call__": _as_it_is})

    def __getitem__(cls, _):
        return cls
