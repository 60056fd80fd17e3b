"""Forwards of flash-attn-4 that are made again for tensors of the same layout.

Its Python finds the compiled kernel of a call anew each time, some 0.2 ms (benchmarks/LOG.md), and
the layers of a model call it for the same layouts one after another.  So the first call is watched:
if all it does is to launch one kernel on the tensors that it was given and those that it returns,
later ones launch that.  What it launches is the same kernel with the same arguments.

It relies on this of flash-attn-4 4.0.0b36, in flash_attn.cute: compiled kernels are looked up in
the function's attribute `compile_cache` (interface, `_flash_attn_fwd`; cache_utils, `JITCache`),
and take the current stream.  With a version that has no such attribute every call is its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_PLAIN = (bool, int, float, str, type(None))
ALIGNED = 16
"""Bytes to which flash-attn-4 wants tensors aligned."""
_WATCHING = threading.Lock()
"""One at a time: else a thread would put back the cache that another has put there."""


class _Launch(NamedTuple):
    """A compiled kernel, and its arguments.

    Attributes:
        kernel: takes `arguments`.
        arguments: those that stay.
        places: of queries, keys, values, output and log-sum-exp in them.
        written: shapes and dtypes of output and log-sum-exp, which are contiguous.
        held: tensors of the call's options, whose ids tell calls apart.
    """

    kernel: Callable[..., Any]
    arguments: tuple[Any, ...]
    places: tuple[int, ...]
    written: tuple[tuple[torch.Size, torch.dtype], ...]
    held: tuple[Tensor, ...]

    def __call__(self, *given: Tensor) -> tuple[Tensor, Tensor]:
        device, arguments = given[0].device, [*self.arguments]
        out, lse = [torch.empty(n, dtype=dtype, device=device) for n, dtype in self.written]
        tensors = *(one.detach() for one in given), out, lse
        for place, one in zip(self.places, tensors, strict=True):
            arguments[place] = one
        self.kernel(*arguments)
        return out, lse


class Repeated:
    """Launches of one step; see the file."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Launch | None] = {}

    def forget(self) -> None:
        """Before a step: lengths are others."""
        self._known.clear()

    def __call__(
        self, function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """What `function` returns first, and second.

        Args:
            function: flash-attn-4's forward.
            q, k, v: its tensors.
            options: its other arguments; tensors among them are those of earlier calls.
        """
        if not hasattr(function, "compile_cache"):
            out, lse, *_ = function(q, k, v, **options)
            return out, lse
        named = ((name, _told(one)) for name, one in options.items())
        key = (q.device, *map(_layout, (q, k, v)), *named)
        known = self._known.get(key)
        if known is not None:
            return known(q, k, v)
        if key in self._known:
            out, lse, *_ = function(q, k, v, **options)
            return out, lse
        out, lse, self._known[key] = _watched(function, (q, k, v), options)
        return out, lse


def _layout(x: Tensor) -> Hashable:
    """What tells a tensor from others for which another kernel would be launched, or on a copy:
    flash-attn-4 copies one whose place is not aligned (cute_dsl_utils, `maybe_contiguous`)."""
    return x.dtype, x.shape, x.stride(), x.data_ptr() % ALIGNED


def _told(option: Any) -> Hashable:
    """What tells an option from others; a tensor is kept by the launch, so its id is its own."""
    return (id(option), option.data_ptr()) if isinstance(option, Tensor) else option


class _Watched:
    """A cache of compiled kernels that notes what is launched."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.launches: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def __contains__(self, key: Hashable) -> bool:
        return key in self._cache

    def __setitem__(self, key: Hashable, kernel: Callable[..., Any]) -> None:
        self._cache[key] = kernel

    def __getitem__(self, key: Hashable) -> Callable[..., Any]:
        kernel: Callable[..., Any] = self._cache[key]

        def launch(*arguments: Any, **named: Any) -> Any:
            self.launches.append((kernel, (*arguments, named) if named else arguments))
            return kernel(*arguments, **named)

        return launch

    def __getattr__(self, name: str) -> Any:
        """What another version asks its cache for; what that launches is not noted."""
        return getattr(self._cache, name)


def _watched(
    function: Any, given: Sequence[Tensor], options: dict[str, Any]
) -> tuple[Tensor, Tensor, _Launch | None]:
    """A call, and its launch; None if it cannot be made again."""
    with _WATCHING:
        watched = _Watched(function.compile_cache)
        function.compile_cache = watched
        try:
            out, lse, *_ = function(*given, **options)
        finally:
            function.compile_cache = watched._cache
    if len(watched.launches) != 1 or not (out.is_contiguous() and lse.is_contiguous()):
        return out, lse, None
    kernel, arguments = watched.launches[0]
    found = [_place(one, arguments) for one in (*given, out, lse)]
    places = [one for one in found if one is not None]
    if len({*places}) < len(found):
        return out, lse, None
    kept = [None if place in places else one for place, one in enumerate(arguments)]
    known = [one for one in options.values() if isinstance(one, Tensor)]
    if not all(_stays(one, known) for one in kept):
        return out, lse, None
    written = (out.shape, out.dtype), (lse.shape, lse.dtype)
    return out, lse, _Launch(kernel, (*kept,), (*places,), written, (*known,))


def _place(tensor: Tensor, arguments: Sequence[Any]) -> int | None:
    """Which argument is a tensor: one of its place and layout."""
    for place, one in enumerate(arguments):
        if isinstance(one, Tensor) and (one.data_ptr(), one.shape, one.stride(), one.dtype) == (
            tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype,
        ):  # fmt: skip
            return place
    return None


def _stays(argument: Any, known: Sequence[Tensor]) -> bool:
    """Whether an argument is the same for all tensors of a layout: a number, a tensor that was
    given with the options, or a group of such."""
    if isinstance(argument, Tensor):
        return any(argument is one for one in known)
    if isinstance(argument, tuple):
        return all(_stays(one, known) for one in argument)
    return isinstance(argument, _PLAIN)
