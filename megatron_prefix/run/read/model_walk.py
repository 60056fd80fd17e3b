"""Everything that models hold: a list of holders (dicts, lists, objects, ...), and their tensors.

Looked into are modules with their classes, parameters, buffers and hooks, configs, and below them
dicts, lists, tuples, partials, objects of a trainer's own classes; of a trainer's functions and
methods what they name: their object's attributes, closures and globals.  Not the inside of other
objects of torch's and Megatron's, nor what is larger than `MOST_NAMES`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import itertools
import logging
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from megatron_prefix.errors import shown
from megatron_prefix.megatron.install import WALK
from megatron_prefix.run.read.loss_variables import (
    LIBRARIES,
    MOST_NAMES,
    Place,
    closure,
    named_globals,
    package,
    used_names,
)

logger = logging.getLogger(__name__)

DEPTH = 4
"""Of objects and containers in one another, below a module."""
MOST_HOLDERS = 100_000
SAMPLED = 1 << 16
"""Elements of an array that are compared."""
SMALL = 4096
"""Elements of a tensor that may be kept although nothing but a walk needs it."""
WHOLE = object()
"""The key of what has one value and no keys."""
APART = frozenset({
    "training", "is_first_microbatch", "input_tensor", "router_replay", "routing_replay",
})  # fmt: skip
"""Attributes that have a check of their own (forward_step_state.py), that Megatron sets around
a call, or that segments set."""
_WEIGHTS = {"_parameters", "_buffers"}
OF_MODULE = _WEIGHTS | {
    "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
}  # fmt: skip
"""Attributes of every module that are dicts."""
NOT_OWN = APART | OF_MODULE | {
    WALK,
    "_non_persistent_buffers_set", "_is_full_backward_hook", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
}  # fmt: skip
_LIBRARIES = LIBRARIES | {"megatron_prefix", "transformer_engine", "apex", "triton", "numpy", "fla"}
_MAPPINGS = dict, types.MappingProxyType
_COLLECTIONS = list, collections.deque, set
_NAMESPACES = {"SimpleNamespace", "Namespace"}
_ATOMS = frozenset({
    type(None), bool, int, float, complex, str, bytes, range, torch.dtype, torch.device, torch.Size,
    types.BuiltinFunctionType, types.ModuleType,
})  # fmt: skip


class Holder(NamedTuple):
    """Something that holds values.

    Attributes:
        value: a dict (an object's and a class's, too), list, deque, set or `Place`; or what cannot
            be written itself, as a tuple.
        owner: the number of the holder that it is in; -1: none.
        key: its attribute, key or index there; None: code leaves this level out.
        has_attributes: whether its own keys are attributes.
        kind: the class, of a module, an object or a class; else None.
    """

    value: Any
    owner: int
    key: Any
    has_attributes: bool = True
    kind: type | None = None


class Row(NamedTuple):
    """A module's own attributes, read all at once."""

    names: tuple[str, ...]
    get: Callable[[dict[str, Any]], tuple[Any, ...]]
    members: dict[str, Any]


class _ToVisit(NamedTuple):
    """A value that is to be looked into; `names`: of its attributes only these, of all if None."""

    value: Any
    owner: int
    key: Any
    depth: int = DEPTH
    names: frozenset[str] | None = None


class ModelWalk:
    """What some models hold: where, and not which values.

    Args:
        models: language models, then what is around them.
        num_inner: how many of `models` are language models.
        outer: modules whose submodules are not looked into.

    Attributes:
        num_inner: those of language models are before this one.
        rows: of the holders that are modules, by number.
        weights: parameters and buffers of modules, as dicts that are not empty.
        empty: of modules what is empty of these, hooks and submodules, with number and name;
            `registries` has these alone.
        holds_memory: whether it holds large tensors that are neither parameters nor buffers.
    """

    def __init__(self, models: Sequence[Any], num_inner: int, outer: Sequence[Any] = ()) -> None:
        self.roots = [*models, *outer]
        self.holders: list[Holder] = []
        self.rows: dict[int, Row] = {}
        self.weights: list[dict[str, Any]] = []
        self.empty: list[tuple[Any, int, str]] = []
        self.tensors: list[tuple[Tensor, int, Any]] = []
        self.num_inner = 0
        self._shallow = {*map(id, outer)}
        self._seen: set[int] = set()
        self._opaque: set[type] = set(_ATOMS)
        self._alive: list[Any] = []  # so that nothing else gets the id of what was met
        self._names: dict[types.CodeType, frozenset[str] | None] = {}
        self._left: collections.deque[_ToVisit] = collections.deque()
        self._types: list[type] = []  # of all values, which are followed, and their identities
        self._followed: list[int] = []
        self._ids: list[int] = []
        for number, model in enumerate(self.roots):
            self._left.append(_ToVisit(model, -1, type(model).__name__))
            while self._left and len(self.holders) < MOST_HOLDERS:
                entry = self._left.popleft()
                try:
                    self._enter(entry)
                except Exception:  # odd classes: looking must not end a step
                    logger.debug("cannot look into %s", type(entry.value), exc_info=True)
            if number < num_inner:
                self.num_inner = len(self.holders)
        self._note()

    # What is there now ----------------------------------------------------------------------------

    def now(self) -> list[Any]:
        """What each holder holds now: containers themselves, of a module the values of its row."""
        held = self._values.copy()
        for number, get, members in self._getters:
            held[number] = get(members)
        for number, place in self._places.items():
            held[number] = place.read()
        return held

    def read(self) -> list[Any]:
        held = self.now()
        for number in self._containers:
            held[number] = copied(held[number])
        return held

    def sizes(self) -> list[int]:
        return [*map(len, self._members)]

    def is_current(self, read: list[Any]) -> bool:
        """Whether a new walk would meet the same, where `read` has given this."""
        values = _flat(read)
        return (
            [*map(type, values)] == self._types
            and [id(values[number]) for number in self._followed] == self._ids
            and self.sizes() == self._sizes
            and not any(self.registries)
        )

    def path(self, number: int, key: Any = None) -> str:
        path = self._part(number, key)
        while number >= 0:
            _, owner, key, *_ = self.holders[number]
            path = self._part(owner, key) + path
            number = owner
        return path

    def _part(self, owner: int, key: Any) -> str:
        if key is None or key is WHOLE:
            return ""
        if owner < 0:
            return str(key)
        if self.holders[owner].has_attributes:
            return f".{key}"
        # A tensor as a key is not printed: the host would wait for the device.
        return f"[{type(key).__name__ if isinstance(key, Tensor) else shown(key)}]"

    def _note(self) -> None:
        self._values = [holder.value for holder in self.holders]
        self._places = {n: v for n, v in enumerate(self._values) if isinstance(v, Place)}
        self._getters = [(number, row.get, row.members) for number, row in self.rows.items()]
        self._members = [row.members for row in self.rows.values()]
        others = ((n, v) for n, v in enumerate(self._values) if n not in self.rows)
        self._containers = [number for number, value in others if copied(value) is not value]
        self.registries = [registry for registry, _, _ in self.empty]
        values = _flat(self.read())
        self._types = [*map(type, values)]
        # Others are not kept alive: what is in the place of a `forward` holds a whole step.
        self._followed = [n for n, value in enumerate(values) if self._is_followed(value)]
        self._alive += [values[number] for number in self._followed]
        self._ids = [id(values[number]) for number in self._followed]
        self._sizes = self.sizes()
        weights = {id(weight) for registry in self.weights for weight in registry.values()}
        self.holds_memory = any(
            tensor.numel() > SMALL and id(tensor) not in weights for tensor, _, _ in self.tensors
        )

    def _is_followed(self, value: Any) -> bool:
        function = value.func if isinstance(value, functools.partial) else value
        function = getattr(function, "__func__", function)
        if isinstance(function, types.FunctionType):  # Megatron's, and ours, made anew every step
            return package(function) not in _LIBRARIES
        is_own = type(value).__module__.partition(".")[0] == "megatron_prefix"
        return type(value) not in self._opaque and not is_own

    # The walk -------------------------------------------------------------------------------------

    def _enter(self, entry: _ToVisit) -> None:
        value = entry.value
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Module):
            self._module(entry)
        elif isinstance(value, Tensor):
            if not value.is_inference():
                self.tensors.append((value, entry.owner, entry.key))
        elif isinstance(value, (dict, *_COLLECTIONS)):
            self._container(entry)
        elif isinstance(value, np.ndarray):
            self._array(entry)
        elif entry.depth > 0:
            if self._is_followed(value):
                self._alive.append(value)
            self._object(entry)

    def _hold(self, entry: _ToVisit, value: Any, **of: Any) -> int:
        self.holders.append(Holder(value, entry.owner, entry.key, **of))
        return len(self.holders) - 1

    def _module(self, entry: _ToVisit) -> None:
        module, members = entry.value, vars(entry.value)
        number, left, seen = self._hold(entry, members, kind=type(module)), self._left, self._seen
        own = []
        for name, value in members.items():
            if name not in NOT_OWN:
                own.append(name)
                if type(value) not in self._opaque and id(value) not in seen:
                    left.append(_ToVisit(value, number, name))
            elif name in OF_MODULE and value:
                self._registry(number, name, value, id(module) in self._shallow)
            elif name in OF_MODULE and value is not None:
                self.empty.append((value, number, name))
        # Of two names at least it makes a tuple.
        get = operator.itemgetter(*own, own[0]) if own else _nothing
        self.rows[number] = Row(tuple(own), get, members)
        for kind in type(module).__mro__:
            if id(kind) not in seen and is_trainers(kind):
                self._class(kind)

    def _registry(self, owner: int, name: str, registry: dict[Any, Any], shallow: bool) -> None:
        is_plain = name == "_modules" or name in _WEIGHTS
        entry = _ToVisit(None, owner, None if is_plain else name)
        number = self._hold(entry, registry, has_attributes=is_plain)
        if name in _WEIGHTS:
            self.weights.append(registry)
        if shallow and name == "_modules":
            return
        for key, value in registry.items():
            if type(value) not in self._opaque:
                self._left.append(_ToVisit(value, number, key))

    def _class(self, kind: type) -> None:
        self._seen.add(id(kind))
        number = self._hold(_ToVisit(None, -1, kind.__name__), vars(kind), kind=kind)
        for name, value in vars(kind).items():
            if type(value) not in self._opaque and not name.startswith("__"):
                self._left.append(_ToVisit(value, number, name))

    def _container(self, entry: _ToVisit) -> None:
        value = entry.value
        number = self._hold(entry, value, has_attributes=False)
        if len(value) > MOST_NAMES or entry.depth == 0 or isinstance(value, set):
            return
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if type(item) not in self._opaque:
                self._left.append(_ToVisit(item, number, key, entry.depth - 1, entry.names))

    def _array(self, entry: _ToVisit) -> None:
        array = entry.value

        def read() -> dict[Any, Any]:
            flat = array.reshape(-1)
            return {WHOLE: flat[:: 1 + flat.size // SAMPLED].tobytes()}

        def write(_: Any, value: bytes) -> None:
            if array.size < SAMPLED:
                array[...] = np.frombuffer(value, array.dtype).reshape(array.shape)

        if not array.dtype.hasobject:
            self._hold(entry, Place(read, write))

    def _object(self, entry: _ToVisit) -> None:
        value, _, _, depth, names = entry
        parts: dict[Any, Any] = {}
        if isinstance(value, tuple):
            parts = dict(enumerate(value))
        elif isinstance(value, functools.partial):
            parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
        elif isinstance(value, types.MethodType):
            if (used := self._used(value.__func__)) is not None:
                parts, names = {"__self__": value.__self__, "__func__": value.__func__}, used
        elif isinstance(value, types.FunctionType):
            self._function(entry)
        elif holds_state(value):
            self._attributes(entry)
        else:
            self._opaque.add(type(value))
        if parts:
            number = self._hold(entry, value, has_attributes=not isinstance(value, tuple))
            for key, part in parts.items():
                if type(part) not in self._opaque:
                    self._left.append(_ToVisit(part, number, key, depth - 1, names))

    def _function(self, entry: _ToVisit) -> None:
        used = self._used(entry.value)
        if used is None or str(entry.key).endswith("_func"):  # a config's: no part of the model
            return
        for place in (closure(entry.value), named_globals(entry.value)):
            number = self._hold(entry, place)
            for name, value in place.read().items():
                if type(value) not in self._opaque and not isinstance(
                    value, type | types.FunctionType
                ):
                    self._left.append(_ToVisit(value, number, name, entry.depth - 1, used))

    def _attributes(self, entry: _ToVisit) -> None:
        members, names = members_of(entry.value), entry.names
        is_dict = members is getattr(entry.value, "__dict__", None) and names is None
        value = members if is_dict else _some_attributes(entry.value, names)
        number = self._hold(entry, value, kind=type(entry.value))
        for name, item in [*members.items()] if len(members) <= MOST_NAMES else ():
            if type(item) not in self._opaque and (names is None or name in names):
                self._left.append(_ToVisit(item, number, name, entry.depth - 1, names))

    def _used(self, function: Any) -> frozenset[str] | None:
        if not isinstance(function, types.FunctionType) or package(function) in _LIBRARIES:
            return None
        if function.__code__ not in self._names:
            names = used_names(function)
            self._names[function.__code__] = None if names is None else frozenset(names)
        return self._names[function.__code__]

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of the model that it is an attribute of has none."""

    def __reduce__(self) -> Any:
        return type(None), ()


def walk_of(
    models: Sequence[Any], num_inner: int, outer: Sequence[Any] = ()
) -> tuple[ModelWalk, list[Any]]:
    """A walk of models, and what it reads now; that of a step before, if it is current.

    See `ModelWalk`.
    """
    kept = vars(models[0]).get(WALK)
    if kept is not None and [*map(id, kept.roots)] == [*map(id, (*models, *outer))]:
        with contextlib.suppress(KeyError):  # an attribute is gone
            read = kept.read()
            if kept.is_current(read):
                return kept, read
    vars(models[0])[WALK] = None  # it is an attribute of what is walked
    walk = ModelWalk(models, num_inner, outer)
    if not walk.holds_memory:
        vars(models[0])[WALK] = walk
    return walk, walk.read()


def _flat(read: list[Any]) -> list[Any]:
    unwritten = functools.partial, types.MethodType  # of these the parts are holders, too
    written = [value for value in read if not isinstance(value, unwritten)]
    contents = [value.values() if isinstance(value, dict) else value for value in written]
    return [*itertools.chain.from_iterable(contents)]


def _nothing(_: Any) -> tuple[Any, ...]:
    return ()


def copied(value: Any) -> Any:
    """A container that can be written as it is now; anything else itself."""
    if isinstance(value, _MAPPINGS):
        return dict(value)
    return value.copy() if isinstance(value, _COLLECTIONS) else value


def _some_attributes(value: Any, names: frozenset[str] | None) -> Place:
    def read() -> dict[Any, Any]:
        members = members_of(value)
        return {n: member for n, member in members.items() if names is None or n in names}

    return Place(read, functools.partial(setattr, value))


def members_of(value: Any) -> dict[str, Any]:
    """Attributes of an object: its own dict where it has no slots."""
    members: dict[str, Any] = getattr(value, "__dict__", {})
    slots = [
        name
        for kind in type(value).__mro__
        for name, member in vars(kind).items()
        if isinstance(member, types.MemberDescriptorType) and hasattr(value, name)
    ]
    return members | {name: getattr(value, name) for name in slots} if slots else members


def holds_state(value: Any) -> bool:
    """Whether an object's attributes are looked at: a trainer's, or plain data."""
    kind = type(value)
    if isinstance(value, type | enum.Enum):
        return False
    is_own = is_trainers(kind)  # type: ignore[arg-type]
    return is_own or kind.__name__ in _NAMESPACES or dataclasses.is_dataclass(kind)


@functools.lru_cache(maxsize=4096)
def is_trainers(kind: type) -> bool:
    """Whether a class is a trainer's own; of classes derived from torch's only modules are."""
    if package(kind) in _LIBRARIES:
        return False
    return issubclass(kind, nn.Module) or "torch" not in map(package, kind.__mro__)
