"""The forward of a parent class, replaced for one model.

ROLL's vision-language models make embeddings in their forward, and call `super().forward` with
them.  That is looked up in classes, so an attribute of the instance does not catch it.  While it is
replaced, the instance has a class in which another one stands between the two; other instances
keep theirs.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

_REPLACEMENT = "_megatron_prefix_parents_forward"


def forward(model: Any, owner: Any) -> Callable[..., Any]:
    """What `super().forward` is for a model, in the forward that class `owner` defines: at the
    moment, so replaced if it is."""
    replacement: Callable[..., Any] | None = vars(model).get(_REPLACEMENT)
    return super(owner, model).forward if replacement is None else replacement


@contextlib.contextmanager
def replaced(model: Any, owner: Any, replacement: Callable[..., Any]) -> Iterator[None]:
    """Inside, `super().forward` of one model, in the forward of class `owner`, is another; it may
    be replaced again."""
    before = vars(model).get(_REPLACEMENT)
    kind: Any = type(model)
    if before is None:
        model.__class__ = _with_one_between(kind, owner)
    vars(model)[_REPLACEMENT] = replacement
    try:
        yield
    finally:
        if before is None:
            del vars(model)[_REPLACEMENT]
            model.__class__ = kind
        else:
            vars(model)[_REPLACEMENT] = before


@functools.cache
def _with_one_between(kind: type, owner: type) -> type:
    """A class like `kind`, in which one more follows `owner` where methods are looked up."""
    place = kind.__mro__.index(owner)

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return vars(self)[_REPLACEMENT](*args, **kwargs)

    inserted = types.new_class(
        "Between", (kind.__mro__[place + 1],), {}, lambda space: space.update(forward=called)
    )
    own = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    derived = types.new_class(kind.__name__, (kind, inserted), {}, lambda space: space.update(own))
    if derived.__mro__.index(inserted) != derived.__mro__.index(owner) + 1:
        raise TypeError(f"no class can stand between {owner.__name__} and its parent")
    return derived
