"""Repeats launches of flash-attn-4 forwards for tensors of the same layout.

Its Python looks the compiled kernel up in every call, some 0.2 ms (benchmarks/LOG.md), and the
layers of a model call it with the same layouts one after another. So the first call is recorded: if
it only launches one kernel on its inputs and outputs, later calls launch that kernel with the same
arguments directly.

It relies on this of flash-attn-4 4.0.0b36, in flash_attn.cute: compiled kernels are looked up in
the function's attribute `compile_cache` (interface, `_flash_attn_fwd`; cache_utils, `JITCache`),
and take the current stream. With a version without this attribute no launch is repeated.
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
"""Held while a recorder replaces a function's cache."""


class _Launch(NamedTuple):
    """A compiled kernel, and its arguments.

    Attributes:
        places: of queries, keys, values, output and log-sum-exp in them.
        written: shapes and dtypes of output and log-sum-exp, which are contiguous.
        options: tensors of the call's options, kept alive because their ids are in the key.
    """

    kernel: Callable[..., Any]
    arguments: tuple[Any, ...]
    places: tuple[int, ...]
    written: tuple[tuple[torch.Size, torch.dtype], ...]
    options: tuple[Tensor, ...]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        device, arguments = tensors[0].device, [*self.arguments]
        out, lse = [torch.empty(n, dtype=dtype, device=device) for n, dtype in self.written]
        inputs = *(tensor.detach() for tensor in tensors), out, lse
        for place, tensor in zip(self.places, inputs, strict=True):
            arguments[place] = tensor
        self.kernel(*arguments)
        return out, lse


class Repeated:
    """Recorded launches of one step."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Launch | None] = {}

    def forget(self) -> None:
        """Before a step, as lengths differ from step to step."""
        self._known.clear()

    def __call__(
        self, function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of flash-attn-4's forward `function`."""
        if not hasattr(function, "compile_cache"):
            out, lse, *_ = function(q, k, v, **options)
            return out, lse
        named = ((name, _option_key(value)) for name, value in options.items())
        key = (q.device, *map(_layout, (q, k, v)), *named)
        launch = self._known.get(key)
        if launch is not None:
            return launch(q, k, v)
        if key in self._known:
            out, lse, *_ = function(q, k, v, **options)
            return out, lse
        out, lse, self._known[key] = _watched(function, (q, k, v), options)
        return out, lse


def _layout(x: Tensor) -> Hashable:
    """Equal for tensors of one launch; flash-attn-4 copies misaligned ones (cute_dsl_utils,
    `maybe_contiguous`)."""
    return x.dtype, x.shape, x.stride(), x.data_ptr() % ALIGNED


def _option_key(option: Any) -> Hashable:
    """An option as a key; the launch keeps a tensor alive, so its id is unique."""
    return (id(option), option.data_ptr()) if isinstance(option, Tensor) else option


class _Watched:
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
        """Other uses of the cache, by other versions; launches through these are not recorded."""
        return getattr(self._cache, name)


def _watched(
    function: Any, tensors: Sequence[Tensor], options: dict[str, Any]
) -> tuple[Tensor, Tensor, _Launch | None]:
    with _WATCHING:
        watched = _Watched(function.compile_cache)
        function.compile_cache = watched
        try:
            out, lse, *_ = function(*tensors, **options)
        finally:
            function.compile_cache = watched._cache
    if len(watched.launches) != 1 or not (out.is_contiguous() and lse.is_contiguous()):
        return out, lse, None
    kernel, arguments = watched.launches[0]
    all_places = [_argument_index(tensor, arguments) for tensor in (*tensors, out, lse)]
    places = [place for place in all_places if place is not None]
    if len({*places}) < len(all_places):
        return out, lse, None
    fixed = [None if place in places else value for place, value in enumerate(arguments)]
    option_tensors = [tensor for tensor in options.values() if isinstance(tensor, Tensor)]
    if not all(_stays(value, option_tensors) for value in fixed):
        return out, lse, None
    written = (out.shape, out.dtype), (lse.shape, lse.dtype)
    return out, lse, _Launch(kernel, (*fixed,), (*places,), written, (*option_tensors,))


def _argument_index(tensor: Tensor, arguments: Sequence[Any]) -> int | None:
    for place, argument in enumerate(arguments):
        if isinstance(argument, Tensor) and _identity(argument) == _identity(tensor):
            return place
    return None


def _identity(x: Tensor) -> Hashable:
    return x.data_ptr(), x.shape, x.stride(), x.dtype


def _stays(argument: Any, option_tensors: Sequence[Tensor]) -> bool:
    """Whether an argument depends on the layout only: a number, a tensor of the options, or a tuple
    of such."""
    if isinstance(argument, Tensor):
        return any(argument is item for item in option_tensors)
    if isinstance(argument, tuple):
        return all(_stays(item, option_tensors) for item in argument)
    return isinstance(argument, _PLAIN)
