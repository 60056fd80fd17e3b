"""Forwards of flash-attn-4 that are made again, on a stand-in with its cache of kernels."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_prefix.layers.blocks.repeated import Repeated


class Aux(NamedTuple):
    """As flash_attn.cute's, without tensors of a mask."""

    tensors: Any = None


class Library:
    """`_flash_attn_fwd`: a function that finds its kernel in an attribute of its own.

    Attributes:
        calls: of the function.
        launches: of kernels.
        change: of the arguments, before a launch.
    """

    def __init__(self) -> None:
        self.calls = self.launches = 0
        self.change: Callable[[list[Any]], Any] = lambda arguments: None

        def function(q: Tensor, k: Tensor, v: Tensor, *, scale: float, starts: Any = None) -> Any:
            self.calls += 1
            out, lse = torch.empty(q.shape), torch.empty(q.shape[::-1][1:])
            arguments = [*(x.detach() for x in (q, k, v)), out.detach(), lse, scale, starts, Aux()]
            again = self.change(arguments)
            if "key" not in function.compile_cache:
                function.compile_cache["key"] = self.kernel
            for _ in range(2 if again else 1):
                function.compile_cache["key"](*arguments)
            return out, lse, None

        function.compile_cache = {}  # type: ignore[attr-defined]
        self.function: Any = function

    def kernel(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *more: Any) -> None:
        """Something of all that it gets."""
        self.launches += 1
        scale, starts, aux = more
        assert aux == Aux() and not any(x.requires_grad for x in (q, k, v))
        torch.mul(q + 2 * k + 3 * v, scale, out=out)
        torch.add(out.sum(-1).T, 0 if starts is None else starts.sum(), out=lse)


def tensors(seed: int, **options: Any) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(5, 2, 4, generator=draw).requires_grad_() for _ in range(3)]


def compare(repeated: Repeated, library: Library, given: list[Tensor], **options: Any) -> None:
    """With what the function gives when nobody watches it."""
    wanted = Library().function(*given, **options)
    got = repeated(library.function, *given, **options)
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=False))
    assert type(library.function.compile_cache) is dict


def test_calls_of_a_layout_are_made_once() -> None:
    library, repeated, starts = Library(), Repeated(), torch.tensor([0, 5])
    for number in range(4):
        compare(repeated, library, tensors(number), scale=0.5, starts=starts)
    assert (library.calls, library.launches) == (1, 4)


def test_other_layouts_and_options_are_other_calls() -> None:
    library, repeated, starts = Library(), Repeated(), torch.tensor([0, 5])
    wide = [torch.randn(5, 2, 8)[..., ::2] for _ in range(3)]
    for _ in range(2):
        compare(repeated, library, tensors(0), scale=0.5)
        compare(repeated, library, tensors(1), scale=0.25)
        compare(repeated, library, tensors(2), scale=0.5, starts=starts)
        compare(repeated, library, tensors(3), scale=0.5, starts=starts.clone())
        compare(repeated, library, [x[:3] for x in tensors(4)], scale=0.5)
        compare(repeated, library, wide, scale=0.5)
    # A tensor of options is told by which it is: the clone is another one each time.
    assert (library.calls, library.launches) == (7, 12)


def test_a_tensor_that_the_library_copies_is_another_layout() -> None:
    """It copies one whose place is not aligned to 16 bytes; a launch would read it as it lies."""
    library, repeated = Library(), Repeated()

    def copied(arguments: list[Any]) -> None:
        for place in range(3):
            if arguments[place].data_ptr() % 16:
                arguments[place] = arguments[place].clone()

    library.change = copied
    launched: list[Tensor] = []
    kernel = library.kernel
    library.kernel = lambda *given: (launched.extend(given[:3]), kernel(*given))[1]  # type: ignore
    for offset in (0, 0, 1, 1, 0):
        given = [torch.randn(41)[offset : offset + 40].view(5, 2, 4) for _ in range(3)]
        compare(repeated, library, given, scale=0.5)
    assert not any(one.data_ptr() % 16 for one in launched)
    assert library.calls == 3


def test_a_step_begins_anew() -> None:
    library, repeated = Library(), Repeated()
    for _ in range(2):
        compare(repeated, library, tensors(0), scale=0.5)
        repeated.forget()
    assert library.calls == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda arguments: True,  # two launches
        lambda arguments: arguments.__setitem__(0, arguments[0].clone()),
        lambda arguments: arguments.__setitem__(7, Aux(torch.ones(1))) or None,
        lambda arguments: arguments.__setitem__(6, torch.zeros(2)),
    ],
    ids=["launches", "a copy", "a tensor inside", "a tensor of its own"],
)
def test_what_cannot_be_made_again_is_called(change: Any) -> None:
    library, repeated = Library(), Repeated()
    library.change = change
    library.kernel = lambda *arguments: None  # type: ignore[method-assign]
    for number in range(3):
        repeated(library.function, *tensors(number), scale=0.5)
    assert library.calls == 3


def test_a_call_that_fails_is_watched_no_more() -> None:
    library, repeated = Library(), Repeated()
    cache = library.function.compile_cache
    with pytest.raises(TypeError):
        repeated(library.function, *tensors(0), scale=None)
    assert library.function.compile_cache is cache
    compare(repeated, library, tensors(0), scale=0.5)


def test_another_version_is_called_as_it_is() -> None:
    calls: list[Any] = []

    def function(*given: Tensor, **options: Any) -> Any:
        calls.append((given, options))
        return (*given[:2], None)

    given = tensors(0)
    for _ in range(2):
        assert Repeated()(function, *given, scale=0.5) == (given[0], given[1])
    assert len(calls) == 2 and calls[0][1] == {"scale": 0.5}


def test_a_version_with_another_cache_is_called_as_it_is() -> None:
    """By another method of its cache, or with arguments by name."""
    for get in (lambda cache: cache.get("key"), lambda cache: cache["key"]):

        def function(*given: Tensor, scale: float, get: Any = get) -> Any:
            out, lse = torch.empty(given[0].shape), torch.empty(given[0].shape[::-1][1:])
            get(function.compile_cache)(*given, out, lse, scale=scale)  # type: ignore[attr-defined]
            return out, lse, None

        launches: list[Any] = []
        kernel = lambda *_, **__: launches.append(1)  # noqa: B023, E731
        function.compile_cache = {"key": kernel}  # type: ignore[attr-defined]
        repeated, calls = Repeated(), 3
        for number in range(calls):
            repeated(function, *tensors(number), scale=0.5)
        assert len(launches) == calls


def test_threads_leave_the_cache_that_was_there() -> None:
    """Each of them has watched a call that was under way when the other's began."""
    library = Library()
    cache, both = library.function.compile_cache, threading.Barrier(2, timeout=0.5)

    def meet(arguments: list[Any]) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait()  # is broken where one call waits for the other
        time.sleep(0.2 * (threading.current_thread().name == "later"))

    library.change = meet
    threads = [
        threading.Thread(
            target=lambda: Repeated()(library.function, *tensors(0), scale=0.5), name=name
        )
        for name in ("first", "later")
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert library.function.compile_cache is cache
