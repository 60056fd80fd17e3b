"""The merge of attention blocks as one pass on a GPU, compiled before the first step.

torch.compile makes a version of a function for every kind of call. Left to itself it finds the
kinds during training: another number of parts, other dtypes, a single query, as many queries as
heads, autocast on or off. Each takes about a second, and after eight of one function the others run
unfused. So here the kinds are named (`Pass`), each is a function of its own, whose only size that
is not fixed is the number of queries, and all are compiled when the attention kernel is chosen.
A Triton kernel of our own takes half the time (0.05 for 0.10 ms of 8,192 queries on an H200,
benchmarks/LOG.md), 0.3 % of a wave; torch.compile needs no code of ours, and is what the tests on
the CPU can run.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

Merge = Callable[[list[Tensor], list[Tensor], torch.dtype], tuple[Tensor, Tensor]]
"""(outs [s, h, dv], lses [h, s], dtype of the sum) -> (out, lse)."""

ROWS = 1024
"""Queries of the call that compiles: enough to be taken for a large one."""


class Pass(NamedTuple):
    """A kind of call; the number of queries is free.

    Attributes:
        num: parts.
        first: dtype of the first part, which may be a sum of others.
        rest: dtype of the other parts.
        out: dtype of the sum.
        lse: dtype of the log-sum-exps.
        heads, width: of the outputs.
        device: of all.
        inference: whether the tensors were made in inference mode.
    """

    num: int
    first: torch.dtype
    rest: torch.dtype
    out: torch.dtype
    lse: torch.dtype
    heads: int
    width: int
    device: torch.device
    inference: bool = False


class Fused:
    """A merge, compiled once for every `Pass`, or as it is if compiling fails.

    Args:
        merge: the formula.
        backend: of torch.compile.
    """

    def __init__(self, merge: Merge, backend: str | Callable[..., Any] = "inductor") -> None:
        self._merge, self._backend = merge, backend
        self._compiled: dict[Pass, Merge] = {}
        self._failed = False

    def __call__(
        self, outs: list[Tensor], lses: list[Tensor], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """The merge; a single query, which would be compiled by itself, is merged unfused."""
        out, lse = outs[0], lses[0]
        if self._failed or lse.shape[1] == 1:
            return self._merge(outs, lses, dtype)
        heads, width = out.shape[1:]
        kind = Pass(
            len(outs), out.dtype, outs[1].dtype, dtype, lse.dtype, heads, width, out.device,
            out.is_inference(),
        )  # fmt: skip
        outs, lses = [out.contiguous() for out in outs], [lse.contiguous() for lse in lses]
        _free_rows(outs, lses)  # a trainer may call torch._dynamo.reset()
        if kind not in self._compiled:
            self.prepare([kind])
        if kind in self._compiled:
            with self._or_unfused(), _plain_state(kind.device.type):
                return self._compiled[kind](outs, lses, dtype)
        return self._merge(outs, lses, dtype)

    def prepare(self, kinds: Iterable[Pass]) -> None:
        """Compiles what has not been, and says so."""
        new, begin = [kind for kind in kinds if kind not in self._compiled], time.perf_counter()
        if self._failed or not new:
            return
        if torch._dynamo.config.disable:
            logger.info("attention blocks are merged unfused: torch.compile is disabled")
            self._failed = True
            return
        with self._or_unfused():
            for kind in new:
                self._compiled[kind] = self._compile(kind)
            if not self._failed:
                logger.warning(
                    "the merge of attention blocks compiled for %s, %d heads of %d: %d versions in"
                    " %.0f s, once a process (torch keeps the result on disk)",
                    *(new[0].rest, new[0].heads, new[0].width, len(new)),
                    time.perf_counter() - begin,
                )

    def _compile(self, kind: Pass) -> Merge:
        # Code of its own: versions of one function are found one by one, and are counted.
        name = "_".join(map(str, ("merge", len(self._compiled), kind.num)))
        code = self._merge.__code__.replace(co_name=name)
        merge = types.FunctionType(code, self._merge.__globals__)
        compiled = torch.compile(merge, dynamic=False, fullgraph=True, backend=self._backend)
        with torch.inference_mode(kind.inference):
            dtypes = [kind.first, *[kind.rest] * (kind.num - 1)]
            make = functools.partial(torch.zeros, device=kind.device)
            outs = [make(ROWS, kind.heads, kind.width, dtype=dtype) for dtype in dtypes]
            lses = [make(kind.heads, ROWS, dtype=kind.lse) for _ in dtypes]
            _free_rows(outs, lses)
            with _plain_state(kind.device.type):
                compiled(outs, lses, kind.out)
        return compiled

    @contextlib.contextmanager
    def _or_unfused(self) -> Iterator[None]:
        """Logs an error of compiling once; later calls are unfused."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - no compiler, no Triton, ...
            self._failed = True
            reason = next(iter(str(error).strip().splitlines()), "")
            logger.warning(
                "attention blocks are merged without fusion, which is slower: "
                "torch.compile failed with %s: %s",
                type(error).__name__,
                reason,
            )


def _free_rows(outs: list[Tensor], lses: list[Tensor]) -> None:
    """Says that one version is for any number of queries."""
    for tensors, dim in ((outs, 0), (lses, 1)):
        for tensor in tensors:
            torch._dynamo.mark_dynamic(tensor, dim)


@contextlib.contextmanager
def _plain_state(device_type: str) -> Iterator[None]:
    """Neither gradients nor autocast, whatever the caller has: each would be a version more."""
    with torch.no_grad():
        if torch.is_autocast_enabled(device_type):
            with torch.autocast(device_type, enabled=False):
                yield
        else:
            yield
