"""A call that the stock schedule takes from its begin, after forward steps have gone on.

A suspended forward step cannot go back to its begin. Where the stock schedule has to take a step
whose segments have run, its forward steps begin anew, with the same items of the data iterator and
the same random numbers. What else they have done by then is done twice.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_prefix.errors import refused
from megatron_prefix.megatron.install import intercepted
from megatron_prefix.megatron.stock import run_stock
from megatron_prefix.refusals.table import OTHER_DRAWS
from megatron_prefix.run.rank import Rank
from megatron_prefix.run.read.data_iterators import RepeatedIterators
from megatron_prefix.run.read.random_numbers import saved_generators


class Restart:
    """What a call draws, made when it begins.

    Args:
        data_iterator: the trainer's: one, or a list with one per model chunk; it may be anything.

    Attributes:
        data_iterator: what forward steps are to be given until then.
    """

    def __init__(self, data_iterator: Any, rank: Rank) -> None:
        self._rank, self._restore = rank, saved_generators(rank.device)
        self._iterators = RepeatedIterators(data_iterator)
        self.data_iterator = self._iterators.first

    def close(self) -> None:
        self._iterators.close()

    def run(self, arguments: Mapping[str, Any], tokens: Sequence[Tensor | None]) -> list[Any]:
        """Runs the stock schedule from the call's begin.

        Args:
            tokens: input_ids of the first chunk's calls, if they have been read.

        Raises:
            UserError: forward steps draw something else then.
        """
        self._restore()
        iterator = self._iterators.again()
        calls: contextlib.AbstractContextManager = contextlib.nullcontext()
        if self._rank.is_first and tokens:
            calls = _same_calls(self._rank.models[0], tokens)
        with calls:
            return run_stock(arguments, data_iterator=iterator)


@contextlib.contextmanager
def _same_calls(model: Any, tokens: Sequence[Tensor | None]) -> Iterator[None]:
    """Inside, a model chunk is called with the same tokens again, among other calls perhaps.

    Raises:
        UserError: at the end, if it was not: the forward steps' data come from elsewhere.
    """
    expected = deque(ids for ids in tokens if ids is not None and not ids.is_nested)

    def intercepting(_: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(stock)

        def forward(*args: Any, **kwargs: Any) -> Any:
            ids = signature.bind(*args, **kwargs).arguments.get("input_ids")
            if expected and isinstance(ids, Tensor) and torch.equal(ids, expected[0]):
                expected.popleft()
            return stock(*args, **kwargs)

        return forward

    with intercepted(model, intercepting):
        yield
    if expected:
        raise refused(OTHER_DRAWS, "draw something else then")
