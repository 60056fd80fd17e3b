"""`megatron-prefix bench` with flash-attn-4 in the stock schedule's attention, too.

    python -m benchmarks.stock_fa4 --baseline rollout ...     # arguments of bench

The stock schedule runs transformer-engine's attention, which has no flash-attn-4. Here its core
attention is flash-attn-4's own public function, in the calls that are timed and their warm-up; the
alignment before them is with transformer-engine's. For microbatches of one rollout.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from megatron_prefix.bench import steps
from megatron_prefix.cli.main import main
from megatron_prefix.megatron.install import language_model
from megatron_prefix.run.schedule import PrefixSchedule


def attention(query: Any, key: Any, value: Any, *_: Any, packed_seq_params: Any = None, **__: Any):  # noqa: ANN201
    """Megatron's core attention of one rollout: [s, 1, heads, dim] -> [s, 1, heads * dim]."""
    if packed_seq_params is not None or query.shape[1] != 1:
        raise SystemExit("benchmarks.stock_fa4 is for one rollout a microbatch: --baseline rollout")
    library = importlib.import_module("flash_attn.cute")
    rows = (x.transpose(0, 1) for x in (query, key, value))
    out = library.flash_attn_func(*rows, causal=True)
    out = out[0] if isinstance(out, tuple) else out
    return out.flatten(2).transpose(0, 1)


@contextlib.contextmanager
def with_fa4(chunks: list[Any]) -> Iterator[None]:
    """All core attentions of the models replaced."""
    layers = [layer for chunk in chunks for layer in language_model(chunk).decoder.layers]
    with contextlib.ExitStack() as stack:
        for layer in layers:
            core = layer.self_attention.core_attention
            # An attribute of the instance, as the prefix schedule's hook is.
            stack.enter_context(mock.patch.dict(vars(core), forward=attention))
        yield


class _Run(steps._Run):
    def timed(self, *arguments: Any) -> Any:
        """See bench; with flash-attn-4 where the schedule is Megatron's."""
        prefix = isinstance(self._schedule, PrefixSchedule)
        with contextlib.nullcontext() if prefix else with_fa4(self._chunks):
            return super().timed(*arguments)


if __name__ == "__main__":
    steps._Run = _Run  # type: ignore[misc]
    raise SystemExit(main(["bench", *sys.argv[1:]]))
