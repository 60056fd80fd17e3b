"""Final hidden states of spans that several data-parallel ranks have in common, on the last stage.

Losses of several ranks look at such a span. One of them computes it, its owner. The others get what
its decoder gives, run their own output layers and losses on that, and send the gradient back, with
which the owner's backward begins as with those of its own losses: the superposition of losses at
outputs ("Schedule-Level Shared-Prefix Reuse for LLM RL Training", appendix A.5), one step earlier.
Logits never cross.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_prefix.sidecar.arena import Payload, wider
from megatron_prefix.sidecar.cache import SidecarCache


class FinalStates:
    """What crosses of a last stage's decoder outputs in one step.

    Hidden states are [positions of this rank, 1, hidden_size]. Ranks of sequence parallelism share
    them; each of them sends and gets those of all.

    Args:
        cache: of the stage, which knows how long spans are.
        group: of tensor-parallel ranks.
        sequence_parallel: whether these share the positions.
        wanted: segments whose states other ranks get.

    Attributes:
        received: by segment what another rank's decoder gives, of this rank's share of positions.
        head_backward: runs the output layer backward on a received segment, once all its losses
            are there; the executor sets it.
    """

    def __init__(
        self, cache: SidecarCache, group: Any, sequence_parallel: bool, wanted: Container[int]
    ) -> None:
        self._cache, self._group, self._wanted = cache, group, wanted
        self._parts = group.size() if sequence_parallel else 1
        self.head_backward: Callable[[int], None] | None = None
        self.received: dict[int, Tensor] = {}
        self._fresh: list[int] = []
        self._gathered: tuple[int, Tensor] | None = None
        self._computed: dict[int, Tensor] = {}
        self._sent_back: dict[int, Tensor] = {}

    def of(self, index: int) -> tuple[Tensor | None, Callable[[Tensor], None] | None]:
        """What the decoder gives for a segment if another rank has computed it; and what takes it
        if other ranks want it."""
        taker = functools.partial(self._keep, index) if index in self._wanted else None
        return self.received.get(index), taker

    # On the owner ---------------------------------------------------------------------------------

    def _keep(self, index: int, hidden: Tensor) -> None:
        """Keeps what the decoder gives for a segment, until its backward."""
        self._computed[index] = hidden

    def leaving(self, index: int, spans: Sequence[int]) -> Payload:
        """Those of some spans, detached; gathered once for all ranks that get some."""
        if self._gathered is None or self._gathered[0] != index:
            self._gathered = index, self._whole(self._computed[index].detach())
        full = self._gathered[1]
        if len(spans) == len(self._cache.map.lengths[index]):
            return (full,)
        return (torch.cat([full[begin:end] for begin, end in self._bounds(index, spans)]),)

    def row(self, index: int) -> Tensor:
        """The first row of a segment's states, for its shape and dtype."""
        return self._computed[index][:1]

    def add_to(self, index: int, spans: Sequence[int], gradients: Payload) -> None:
        """Adds what another rank's losses send to some spans of a segment."""
        [gradient] = gradients
        if index not in self._sent_back:
            num = self._parts * len(self._computed[index])
            self._sent_back[index] = gradient.new_zeros((num, *gradient.shape[1:]))
        parts = gradient.split([end - begin for begin, end in self._bounds(index, spans)])
        for (begin, end), part in zip(self._bounds(index, spans), parts, strict=True):
            self._sent_back[index][begin:end] += part

    def gradients(self, index: int) -> tuple[list[Tensor], list[Tensor]]:
        """What the backward of a computed segment begins with besides its own losses: its final
        states, and what other ranks have sent to them; only once."""
        hidden, sent = self._computed.pop(index, None), self._sent_back.pop(index, None)
        if hidden is None or sent is None:
            return [], []
        local = sent.chunk(self._parts)[self._group.rank() if self._parts > 1 else 0]
        return [hidden], [local.to(hidden.dtype)]

    # On the others --------------------------------------------------------------------------------

    def arrived(self, index: int, payload: Payload) -> None:
        """Takes the states of a segment that another rank computes."""
        [full] = payload
        local = full if self._parts == 1 else full.chunk(self._parts)[self._group.rank()].clone()
        self.received[index] = local.requires_grad_(torch.is_grad_enabled())
        self._fresh.append(index)

    def fresh(self) -> Iterator[int]:
        """Segments whose states have arrived and for which the output layer has not run yet."""
        while self._fresh:
            yield self._fresh.pop(0)

    def sums(self, index: int) -> Payload:
        """Runs the output layer backward on a received segment, and so whatever of its losses has
        not run; gives what they send to its states. Only once."""
        if self.head_backward is None:
            raise RuntimeError("nothing runs the output layer backward")
        self.head_backward(index)
        hidden = self.received.pop(index)
        gradient = torch.zeros_like(hidden) if hidden.grad is None else hidden.grad
        return (self._whole(gradient).to(wider(gradient.dtype)),)

    def drop(self, index: int) -> None:
        """Drops what is left of a segment."""
        self.received.pop(index, None)
        self._computed.pop(index, None)
        self._gathered = None

    def clear(self) -> None:
        """Drops everything, at the end of a step, also of a failed one."""
        self.head_backward = self._gathered = None
        for one in (self.received, self._computed, self._sent_back, self._fresh):
            one.clear()

    def _whole(self, hidden: Tensor) -> Tensor:
        """All positions, of those that this rank of sequence parallelism has."""
        if self._parts == 1:
            return hidden
        return gather_from_sequence_parallel_region(hidden, group=self._group)

    def _bounds(self, index: int, spans: Sequence[int]) -> list[tuple[int, int]]:
        lengths, parts = self._cache.map.lengths[index], self._cache.map.parts
        ends = [*itertools.accumulate((length // parts for length in lengths), initial=0)]
        return [(ends[span], ends[span + 1]) for span in spans]
