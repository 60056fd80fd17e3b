"""[pure] What a forward step leaves for its loss in other places than its own variables.

A trainer may write `self.batch = next(iterator)` and read `self.batch` in its loss. Megatron's
schedule calls that loss before the next forward step; ours, and a step that falls back, runs all
forward steps up to their model calls first. So what a step has bound before its model call is
bound again when it goes on, and stays until the next one goes on.

Looked at are the places that a function names: its object's attributes, its closure, globals,
arguments of a partial, and attributes and items of what these hold. Not lists, not attributes of
classes, modules and models, and nothing of torch, Megatron and the standard library.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

DEPTH = 2
"""Of objects and dicts in one another: `self.state["batch"]`."""
MOST_NAMES = 1000
"""Of one place: what is larger is data, and copying it in every step would cost time."""
MOST_PLACES = 300
MOST_LETTERS = 64
"""Of a text in a function that is taken for a key."""
LIBRARIES = {"torch", "megatron", *sys.stdlib_module_names}
_NAMESPACES = {"SimpleNamespace", "Namespace"}
_CODE = types.FunctionType | types.MethodType | functools.partial
_MISSING = object()


class Place(NamedTuple):
    """Something that holds values by name.

    Attributes:
        read: its names and values now, in a dict of their own.
    """

    read: Callable[[], dict[Any, Any]]
    write: Callable[[Any, Any], None]


Changes = list[tuple[Place, Any, Any]]
"""(place, name, value)"""


class LossVariables:
    """The bindings of a schedule call's forward steps; `swap` is one for `SuspendedStep`.

    Args:
        functions: the trainer's `forward_step_func`, and others that it calls for a microbatch.
    """

    def __init__(self, *functions: Callable[..., Any]) -> None:
        self.places = [*places(*functions)]
        self._last: dict[tuple[int, Any], tuple[Place, Any]] = {}
        self._set: dict[tuple[int, Any], Any] = {}
        self._counted: dict[tuple[int, Any], int] = {}

    def swap(self, state: Any, entering: bool) -> Any:
        """Notes what a step binds up to its model call, and binds it when it goes on."""
        if entering and state is None:  # it starts
            return [place.read() for place in self.places]
        if entering:
            self._bind(state)
            return None
        changes: Changes = []
        for place, old in zip(self.places, state, strict=True) if state else ():
            values = place.read()
            if len(values) == len(old) and all(map(operator.is_, values.values(), old.values())):
                continue
            for name, value in values.items():
                if old.get(name, _MISSING) is not value:
                    changes.append((place, name, value))
                    self._last[id(place), name] = place, value
        return changes

    def end(self) -> None:
        """Leaves the bindings of the last step, whichever of them went on last."""
        self._bind(
            (place, name, value)
            for (_, name), (place, value) in self._last.items()
            if self._set.get((id(place), name), _MISSING) is place.read().get(name, _MISSING)
        )

    def _bind(self, changes: Iterable[tuple[Place, Any, Any]]) -> None:
        for place, name, value in changes:
            key = id(place), name
            if type(value) is int:  # a counter: what losses have added so far stays in it
                was = self._set.get(key, self._last[key][1])
                present = place.read().get(name, was)
                added = present - was if type(present) is int and type(was) is int else 0
                self._counted[key] = self._counted.get(key, 0) + added
                value += self._counted[key]
            self._set[key] = value
            place.write(name, value)


def closure(function: types.FunctionType) -> Place:
    """Variables of a function's closure, of those that are bound."""
    names = function.__code__.co_freevars
    cells = dict(zip(names, function.__closure__ or (), strict=True))

    def read() -> dict[str, Any]:
        values = {}
        for name, cell in cells.items():
            try:
                values[name] = cell.cell_contents
            except ValueError:  # an empty cell
                continue
        return values

    return Place(read, lambda name, value: setattr(cells[name], "cell_contents", value))


def named_globals(function: types.FunctionType) -> Place:
    """Globals that a function names."""
    module = function.__globals__
    names = sorted({name for code in _codes(function.__code__) for name in code.co_names})
    return Place(lambda: {n: module[n] for n in names if n in module}, module.__setitem__)


def places(*functions: Callable[..., Any]) -> Iterator[Place]:
    """Places whose values functions may change, each once, the nearest first."""
    waiting: deque[tuple[Any, int]] = deque()
    for function in functions:
        called = inspect.getattr_static(type(function), "__call__", None)  # of an object
        waiting += [(function, 0), (called, 0)]
    seen: set[int] = set()
    num = 0
    while waiting and num < MOST_PLACES:
        value, depth = waiting.popleft()
        if id(value) in seen or depth > DEPTH:
            continue
        seen.add(id(value))
        if isinstance(value, functools.partial):
            waiting += [
                (member, depth) for member in (value.func, *value.args, *value.keywords.values())
            ]
        elif isinstance(value, types.MethodType):
            waiting += [(value.__self__, depth), (value.__func__, depth)]
        for place in _places_in(value):
            num += 1
            yield place
            waiting += [(member, depth + 1) for member in place.read().values()]


def code_name(function: Any) -> tuple[str, int] | None:
    """Where the code of a function is written; the same for partials of it, made anew every step,
    and on all ranks."""
    code = code_of(function)
    return None if code is None else (code.co_filename, code.co_firstlineno)


def code_of(function: Any) -> types.CodeType | None:
    """The code of a function, of a partial of one, or of an object that is called."""
    while isinstance(function, functools.partial):
        function = function.func
    called = inspect.getattr_static(type(function), "__call__", None)
    return getattr(function, "__code__", getattr(called, "__code__", None))


def used_names(function: Any) -> set[str] | None:
    """Names of variables, attributes and items in a function's code and in that of the functions
    and methods that it names; None if it has no code of its own."""
    waiting, used, has_code = [function], set[str](), False
    owners: dict[int, Any] = {}  # each once, though many of its methods are met
    seen: set[int] = set()
    while waiting:
        called = waiting.pop()
        if isinstance(called, functools.partial):
            waiting.append(called.func)
            continue
        if isinstance(called, types.MethodType):
            owners[id(called.__self__)] = called.__self__
            called = called.__func__
        elif not isinstance(called, types.FunctionType):
            called = inspect.getattr_static(type(called), "__call__", None)
        if not isinstance(called, types.FunctionType) or id(called) in seen:
            continue
        if package(called) in LIBRARIES:
            continue
        seen.add(id(called))
        has_code = True
        names = {*called.__code__.co_freevars}
        for code in _codes(called.__code__):
            texts = (text for text in code.co_consts if isinstance(text, str))  # keys of a dict?
            names |= {*code.co_names, *(text for text in texts if len(text) < MOST_LETTERS)}
        used |= names
        near = [
            value
            for place in (closure(called), named_globals(called))
            for value in place.read().values()
        ]
        waiting += [value for value in near if isinstance(value, _CODE)]
        for owner, name in itertools.product(owners.values(), names):
            # Statically: a property would run.
            method = inspect.getattr_static(type(owner), str(name), None)
            if isinstance(method, types.FunctionType):
                waiting.append(types.MethodType(method, owner))
    return used if has_code else None


def _places_in(value: Any) -> Iterator[Place]:
    kind = type(value)
    if isinstance(value, types.FunctionType):
        if package(value) not in LIBRARIES:
            yield closure(value)
            yield named_globals(value)
        return
    members = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    if not isinstance(members, dict) or len(members) > MOST_NAMES:
        return
    # What derives from torch's is a model, which is not state of a step.
    is_library = package(kind) in LIBRARIES or "torch" in map(package, kind.__mro__)
    is_plain = isinstance(value, dict) or kind.__name__ in _NAMESPACES
    if is_plain or not (is_library or isinstance(value, type | types.ModuleType)):
        yield Place(functools.partial(dict, members), members.__setitem__)


def package(value: Any) -> str:
    """The package that a class or function is of."""
    return (getattr(value, "__module__", None) or "").partition(".")[0]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
