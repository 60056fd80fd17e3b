"""`megatron-prefix bench` with flash-attn-4 as the stock schedule's attention as well.

    python -m benchmarks.stock_fa4 --shapes 10240:2048:8      # arguments of bench

The stock schedule runs transformer-engine's attention, which has no flash-attn-4. Here its core
attention is flash-attn-4's own public functions wherever it runs a model in bfloat16: in the calls
that are timed, their warm-up, the alignment before them, and those that mode "auto" hands over.
Microbatches are one rollout, or packs with `--baseline packed`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from megatron_prefix.lab.bench import steps
from megatron_prefix.lab.cli.main import main
from megatron_prefix.lab.verify import align
from megatron_prefix.layers.attention import window_of
from megatron_prefix.megatron import stock
from megatron_prefix.megatron.install import language_model
from megatron_prefix.megatron.stock import stock_schedule


def attention(
    window: tuple[int, int] | None, query: Any, key: Any, value: Any, *_: Any,
    packed_seq_params: Any = None, **__: Any,
) -> Any:  # fmt: skip
    """Megatron's core attention: [s, 1, heads, dim] -> [s, 1, heads * dim], of packs without 1."""
    library = importlib.import_module("flash_attn.cute")
    seen = {"causal": True, "window_size": window or (None, None)}
    if packed_seq_params is None:
        if query.shape[1] != 1:
            raise SystemExit("benchmarks.stock_fa4 is for microbatches of one rollout and packs")
        rows = (x.transpose(0, 1) for x in (query, key, value))
        return _alone(library.flash_attn_func(*rows, **seen)).flatten(2).transpose(0, 1)
    ends, longest = packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q
    out = library.flash_attn_varlen_func(
        query, key, value, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest,
        max_seqlen_k=longest, **seen,
    )  # fmt: skip
    return _alone(out).flatten(1)


def _alone(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


@contextlib.contextmanager
def with_fa4(chunks: list[Any]) -> Iterator[None]:
    """All core attentions of the models in bfloat16 replaced."""
    layers = [layer for chunk in chunks for layer in language_model(chunk).decoder.layers]
    with contextlib.ExitStack() as stack:
        for layer in layers:
            core = getattr(layer.self_attention, "core_attention", None)
            if core is not None and next(layer.parameters()).dtype == torch.bfloat16:
                # An attribute of the instance, as the prefix schedule's hook is.
                forward = functools.partial(attention, window_of(layer.self_attention))
                stack.enter_context(mock.patch.dict(vars(core), forward=forward))
        yield


def stock_with_fa4() -> Callable[..., Any]:
    """Replaces `stock_schedule` where both schedules are compared."""
    wrapped = stock_schedule()

    def schedule(**arguments: Any) -> Any:
        model = arguments["model"]
        with with_fa4(model if isinstance(model, list) else [model]):
            return wrapped(**arguments)

    return schedule


@contextlib.contextmanager
def replaced() -> Iterator[None]:
    """Where both schedules are compared, and where mode "auto" hands calls over."""
    with contextlib.ExitStack() as stack:
        for module in (steps, align, stock):
            stack.enter_context(mock.patch.object(module, "stock_schedule", stock_with_fa4))
        yield


if __name__ == "__main__":
    with replaced():
        raise SystemExit(main(["bench", *sys.argv[1:]]))
