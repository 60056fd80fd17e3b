"""`align` several times on one model and the same microbatches: the stock schedule runs once."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from torch import Tensor

from megatron_prefix.lab.rl import passes
from megatron_prefix.lab.verify import align
from megatron_prefix.megatron.stock import stock_schedule


@contextlib.contextmanager
def stock_once() -> Iterator[None]:
    """For a while steps and log-probs of the stock schedule are kept, by chunks and microbatches.

    Chunks must live as long. A step leaves a model's weights and buffers as they were.
    """
    kept: dict[Any, Any] = {}

    def once(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(schedule: Any, chunks: list[Any], items: Sequence[Any], **options: Any) -> Any:
            if schedule is not stock_schedule():
                return function(schedule, chunks, items, **options)
            place = function, *map(id, chunks), _digest(items), *options.items()
            if place not in kept:
                kept[place] = function(schedule, chunks, items, **options)
            return kept[place]

        return call

    with (
        mock.patch.object(align, "run_step", once(align.run_step)),
        mock.patch.object(passes, "logprobs", once(passes.logprobs)),
    ):
        yield


def _digest(items: Sequence[Any]) -> str:
    """Of all that the microbatches hold."""
    found = hashlib.sha256()
    for item in items:
        for name, value in sorted(item.items()):
            known = value.cpu().numpy().tobytes() if isinstance(value, Tensor) else repr(value)
            found.update(name.encode())
            found.update(known if isinstance(known, bytes) else known.encode())
    return found.hexdigest()
