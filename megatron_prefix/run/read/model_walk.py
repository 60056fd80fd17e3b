"""Everything that models hold: a list of holders (dicts, lists, objects, ...), and their tensors.

Looked into are modules with their classes, parameters, buffers and hooks, configs, and below them
dicts, lists, tuples, partials, objects of a trainer's own classes; of a trainer's functions and
methods what they name: their object's attributes, closures and globals.  Not the inside of other
objects of torch's and Megatron's, nor what is larger than `MOST_NAMES`.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import types
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from megatron_prefix.run.read.loss_variables import (
    LIBRARIES,
    MOST_NAMES,
    Place,
    closure,
    named_globals,
    package,
    used_names,
)

DEPTH = 4
"""Of objects and containers in one another, below a module."""
MOST_HOLDERS = 100_000
SAMPLED = 1 << 16
"""Elements of an array that are compared."""
APART = frozenset({
    "training", "is_first_microbatch", "input_tensor", "router_replay", "routing_replay",
})  # fmt: skip
"""Attributes that have a check of their own (read/forward_step_state.py), that Megatron sets around
a call, or that segments set."""
_UNREAD = APART | {
    "_non_persistent_buffers_set", "_is_full_backward_hook", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
}  # fmt: skip
_REGISTERED = {"_parameters", "_buffers"}
OF_MODULE = _REGISTERED | {
    "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
}  # fmt: skip
"""Attributes of every module that are dicts."""
_LIBRARIES = LIBRARIES | {"megatron_prefix", "transformer_engine", "apex", "triton", "numpy", "fla"}
_NAMESPACES = {"SimpleNamespace", "Namespace"}
_ATOMS = frozenset({
    type(None), bool, int, float, complex, str, bytes, range, torch.dtype, torch.device, torch.Size,
    types.BuiltinFunctionType, types.ModuleType,
})  # fmt: skip


class Holder(NamedTuple):
    """Something that holds values.

    Attributes:
        value: a dict (an object's and a class's, too), a list, deque or set, or a `Place`.
        owner: the number of the holder that it is in; -1: none.
        label: its own part of what code would call it.
        has_attributes: whether its names are attributes, and not keys.
        kind: the class, of a module, an object or a class; else None.
    """

    value: Any
    owner: int
    label: str
    has_attributes: bool = True
    kind: type | None = None


class _Entry(NamedTuple):
    """A value that is to be looked into; `names`: of its attributes only these, of all if None."""

    value: Any
    owner: int
    label: str
    depth: int = DEPTH
    names: frozenset[str] | None = None


class ModelWalk:
    """What some models hold.

    Args:
        models: language models, then what is around them.
        num_inner: how many of `models` are language models.
        outer: modules whose submodules are not looked into.

    Attributes:
        holders: all.
        num_inner: those of language models are before this one.
        registered: parameters and buffers of modules, as dicts that are not empty.
        empty: of modules what is empty of these, hooks and submodules, with number and name.
        tensors: all whose writes are counted, with number of a holder, and label.
    """

    def __init__(self, models: Iterable[Any], num_inner: int, outer: Iterable[Any] = ()) -> None:
        self._shallow = {*map(id, outer)}
        self.holders: list[Holder] = []
        self.registered: list[dict[str, Any]] = []
        self.empty: list[tuple[Any, int, str]] = []
        self.tensors: list[tuple[Tensor, int, str]] = []
        self.num_inner = 0
        self._seen: set[int] = set()
        self._opaque: set[type] = set(_ATOMS)
        self._trainers: dict[type, bool] = {}
        self._alive: list[Any] = []  # what has no holder, so that nothing else gets its id
        self._names: dict[types.CodeType, frozenset[str] | None] = {}
        self._left: collections.deque[_Entry] = collections.deque()
        for number, model in enumerate((*models, *outer)):
            self._left.append(_Entry(model, -1, type(model).__name__))
            while self._left and len(self.holders) < MOST_HOLDERS:
                self._enter(self._left.popleft())
            if number < num_inner:
                self.num_inner = len(self.holders)

    def path(self, number: int) -> str:
        """What code would call a holder."""
        label = ""
        while number >= 0:
            _, number, part, *_ = self.holders[number]
            label = part + label
        return label

    def _enter(self, entry: _Entry) -> None:
        value = entry.value
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Module):
            self._module(entry)
        elif isinstance(value, Tensor):
            self._tensor(entry)
        elif isinstance(value, dict | list | collections.deque | set):
            self._container(entry)
        elif isinstance(value, np.ndarray):
            self._array(entry)
        elif entry.depth > 0:
            self._alive.append(value)
            self._object(entry)

    def _hold(self, entry: _Entry, value: Any, **of: Any) -> int:
        self.holders.append(Holder(value, entry.owner, entry.label, **of))
        return len(self.holders) - 1

    def _module(self, entry: _Entry) -> None:
        module, members = entry.value, vars(entry.value)
        number, left = self._hold(entry, members, kind=type(module)), self._left
        seen, opaque = self._seen, self._opaque
        for name, value in members.items():
            if type(value) in opaque or name in _UNREAD:
                continue
            if name not in OF_MODULE:
                if id(value) not in seen:
                    left.append(_Entry(value, number, f".{name}"))
            elif value:
                self._registry(number, name, value, id(module) in self._shallow)
            elif value is not None:
                self.empty.append((value, number, name))
        for kind in type(module).__mro__:
            if id(kind) not in seen and self._is_trainers(kind):
                self._class(kind)

    def _registry(self, owner: int, name: str, registry: dict[Any, Any], shallow: bool) -> None:
        """Parameters, buffers, submodules or hooks of a module."""
        is_hooks = name not in _REGISTERED | {"_modules"}
        number = self._hold(_Entry(None, owner, f".{name}" if is_hooks else ""), registry)
        if name in _REGISTERED:
            self.registered.append(registry)
        if shallow and name == "_modules":
            return
        for key, value in registry.items():
            if type(value) not in self._opaque:
                label = f"[{key!r}]" if is_hooks else f".{key}"
                self._left.append(_Entry(value, number, label))

    def _class(self, kind: type) -> None:
        """Attributes of a trainer's class of modules, and globals that its methods name."""
        self._seen.add(id(kind))
        number = self._hold(_Entry(None, -1, kind.__name__), vars(kind), kind=kind)
        for name, value in vars(kind).items():
            if type(value) not in self._opaque and not name.startswith("__"):
                self._left.append(_Entry(value, number, f".{name}"))

    def _tensor(self, entry: _Entry) -> None:
        if not entry.value.is_inference():
            self.tensors.append((entry.value, entry.owner, entry.label))

    def _container(self, entry: _Entry) -> None:
        value = entry.value
        number = self._hold(entry, value, has_attributes=False)
        if len(value) > MOST_NAMES or entry.depth == 0 or isinstance(value, set):
            return
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if type(item) not in self._opaque:
                left = _Entry(item, number, f"[{key!r}]", entry.depth - 1, entry.names)
                self._left.append(left)

    def _array(self, entry: _Entry) -> None:
        array = entry.value

        def read() -> dict[Any, Any]:
            flat = array.reshape(-1)
            return {...: flat[:: 1 + flat.size // SAMPLED].tobytes()}

        def write(_: Any, value: bytes) -> None:
            if array.size < SAMPLED:
                array[...] = np.frombuffer(value, array.dtype).reshape(array.shape)

        if not array.dtype.hasobject:
            self._hold(entry, Place(read, write))

    def _object(self, entry: _Entry) -> None:
        """A tuple, partial, function, method, or an object with attributes."""
        value, owner, label, depth, names = entry
        if isinstance(value, tuple):
            for number, item in enumerate(value):
                self._left.append(_Entry(item, owner, f"{label}[{number}]", depth - 1, names))
        elif isinstance(value, functools.partial):
            self._left.append(_Entry(value.func, owner, label, depth, names))
            self._left.append(_Entry(value.args, owner, f"{label}.args", depth - 1, names))
            self._left.append(_Entry(value.keywords, owner, f"{label}.keywords", depth - 1, names))
        elif isinstance(value, types.MethodType):
            if (used := self._used(value.__func__)) is not None:
                self._left.append(_Entry(value.__self__, owner, f"{label}.__self__", depth, used))
                self._left.append(_Entry(value.__func__, owner, label, depth))
        elif isinstance(value, types.FunctionType):
            self._function(entry)
        elif holds_state(value):
            self._attributes(entry)
        else:
            self._opaque.add(type(value))

    def _function(self, entry: _Entry) -> None:
        """What a trainer's function names."""
        used = self._used(entry.value)
        if used is None or entry.label.endswith("_func"):  # those of a config: no part of the model
            return
        for place in (closure(entry.value), named_globals(entry.value)):
            number = self._hold(entry, place)
            for name, value in place.read().items():
                if type(value) not in self._opaque and not isinstance(
                    value, type | types.FunctionType
                ):
                    left = _Entry(value, number, f".{name}", entry.depth - 1, used)
                    self._left.append(left)

    def _is_trainers(self, kind: type) -> bool:
        if kind not in self._trainers:
            self._trainers[kind] = is_trainers(kind)
        return self._trainers[kind]

    def _used(self, function: Any) -> frozenset[str] | None:
        """Names in a function's code; None if it is no trainer's."""
        if not isinstance(function, types.FunctionType) or package(function) in _LIBRARIES:
            return None
        if function.__code__ not in self._names:
            names = used_names(function)
            self._names[function.__code__] = None if names is None else frozenset(names)
        return self._names[function.__code__]

    def _attributes(self, entry: _Entry) -> None:
        members, names = members_of(entry.value), entry.names
        plain = members is getattr(entry.value, "__dict__", None) and names is None
        value = members if plain else _some_attributes(entry.value, names)
        number = self._hold(entry, value, kind=type(entry.value))
        items = members.items() if len(members) <= MOST_NAMES else ()
        for name, item in list(items):
            if type(item) not in self._opaque and (names is None or name in names):
                self._left.append(_Entry(item, number, f".{name}", entry.depth - 1, names))


def _some_attributes(value: Any, names: frozenset[str] | None) -> Place:
    """Those with these names; of an object with slots, too."""

    def read() -> dict[Any, Any]:
        members = members_of(value)
        return {n: one for n, one in members.items() if names is None or n in names}

    return Place(read, functools.partial(setattr, value))


def members_of(value: Any) -> dict[str, Any]:
    """Attributes of an object: its own dict where it has no slots."""
    members: dict[str, Any] = getattr(value, "__dict__", {})
    slots = [*_slots(type(value))]
    if slots:
        members = members | {n: getattr(value, n) for n in slots if hasattr(value, n)}
    return members


def _slots(kind: type) -> tuple[str, ...]:
    """Names of slots of a class."""
    return tuple(
        name
        for each in kind.__mro__
        for name, member in vars(each).items()
        if isinstance(member, types.MemberDescriptorType)
    )


def holds_state(value: Any) -> bool:
    """Whether an object's attributes are looked at: a trainer's, or plain data."""
    kind = type(value)
    if isinstance(value, type | enum.Enum):
        return False
    return is_trainers(kind) or kind.__name__ in _NAMESPACES or dataclasses.is_dataclass(kind)


def is_trainers(kind: type) -> bool:
    """Whether a class is a trainer's own; of classes derived from torch's only modules are."""
    if package(kind) in _LIBRARIES:
        return False
    return issubclass(kind, nn.Module) or "torch" not in map(package, kind.__mro__)
