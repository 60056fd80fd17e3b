"""Messages among data-parallel ranks, apart from all others, and what ranks know of them.

A communicator is made of the ranks of a trainer's group, and kept. A payload is several tensors
whose rows only its sender knows; it says so once, before the first payload of a model.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_prefix.device.clock import wait_for
from megatron_prefix.features.across.carried import Row
from megatron_prefix.features.across.ranges import distances, leaving
from megatron_prefix.sidecar.arena import Payload

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_PROBE_BYTES = 1 << 23
"""Of a message that measures how fast ranks exchange."""
_DIMENSIONS = 6
"""Most dimensions of a row of a payload."""


@dataclass
class Message:
    """Tensors between this rank and another.

    Attributes:
        way: `dist.isend` or `dist.irecv`.
        peer: the other's place in the group.
        tensors: contiguous; sent or filled.
        works: of the tensors, once the message has begun; wait for them.
    """

    way: Any
    peer: int
    tensors: list[Tensor]
    works: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.way is dist.isend:
            self.tensors = [tensor.contiguous() for tensor in self.tensors]


@dataclass
class Known:
    """What ranks have said of a model chunk's payloads, by place in the group.

    Attributes:
        told: who has heard what this rank sends, and what that is.
        rows: of every layer, what others send.
    """

    told: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)
    rows: dict[int, list[list[Row]]] = field(default_factory=dict)


class Communicator:
    """Messages among the ranks of a group, apart from all others.

    Args:
        group: the trainer's; all of its ranks make this together.
        device: where its tensors live.

    Attributes:
        ranks: their numbers in the job.
        rank: this one's place among them.
        bytes_per_second: that a rank sends while it gets as much, of the slowest; measured once.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.ranks, self._device = dist.get_process_group_ranks(group), device
        timeout = group._get_backend(device).options._timeout  # torch has no public name for it
        self.rank = group.rank()
        self._group = dist.new_group(self.ranks, timeout=timeout, use_local_synchronization=True)
        # NCCL connects at first use, and for messages in batches all ranks must take part in it.
        dist.all_reduce(torch.zeros(1, device=device), group=self._group)
        self.bytes_per_second = self.measured()
        self._known: weakref.WeakKeyDictionary[Any, dict[Any, Known]] = weakref.WeakKeyDictionary()

    def measured(self) -> float:
        """See `bytes_per_second`: all ranks send to the next one in a ring."""
        num = len(self.ranks)
        if num == 1:
            return math.inf
        after, before = (self.rank + 1) % num, (self.rank - 1) % num
        provided = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=self._device)
        got, seconds = torch.empty_like(provided), []
        for _ in range(3):  # the first connects
            wait_for(self._device)
            begin = time.perf_counter()
            for work in self._begun([(dist.isend, after, provided), (dist.irecv, before, got)]):
                work.wait()
            wait_for(self._device)
            seconds.append(time.perf_counter() - begin)
        slowest = torch.tensor(min(seconds[1:]), dtype=torch.float64, device=self._device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self._group)
        return _PROBE_BYTES / float(slowest)

    def exchange(self, messages: Sequence[Message]) -> None:
        """Begins all messages at once, so that none holds up another, and sets their works.

        NCCL runs what is begun at once side by side, in one kernel, and what is begun one by one in
        this order, each after the one before it.
        """
        works = iter(
            self._begun([(one.way, one.peer, tensor) for one in messages for tensor in one.tensors])
        )
        for message in messages:
            message.works.extend(itertools.islice(works, len(message.tensors)))

    def numbers(
        self,
        told: Sequence[tuple[int, np.ndarray]],
        wanted: Sequence[tuple[int, tuple[int, ...], torch.dtype]],
    ) -> list[np.ndarray]:
        """Arrays that other ranks tell this one; waits for all.

        Args:
            told: peers, and what each of them gets.
            wanted: peers, shapes and dtypes, in the order in which the peers tell them.
        """
        sent = [
            Message(dist.isend, peer, [torch.from_numpy(one).to(self._device)])
            for peer, one in told
        ]
        coming = [
            Message(dist.irecv, peer, [torch.empty(shape, dtype=dtype, device=self._device)])
            for peer, shape, dtype in wanted
        ]
        self.exchange([one for one in sent + coming if one.tensors[0].numel()])
        for one in sent + coming:
            for work in one.works:
                work.wait()
        return [one.tensors[0].cpu().numpy() for one in coming]

    def known(self, model: Any, forward_only: bool, scored: bool) -> Known:
        """What ranks know of one another's payloads of a model chunk. They are others where routers
        count nothing, in passes without gradients and in evaluation mode, and where segments with
        loss leave final states."""
        kind = forward_only, model.training, scored
        return self._known.setdefault(model, {}).setdefault(kind, Known())

    def tell_rows(self, peer: int, known: Known, payload: Sequence[Payload]) -> Message | None:
        """Says what rows of a model chunk's payloads are, before the first one that a peer gets.

        Returns:
            What is sent, to be kept until it has left; None if the peer knows.

        Raises:
            RuntimeError: they are others than the peer has heard.
        """
        numbers = []
        for tensor in itertools.chain.from_iterable(payload):
            shape = list(tensor.shape[1:])
            numbers += [_DTYPES.index(tensor.dtype), len(shape), *shape]
            numbers += [0] * (_DIMENSIONS - len(shape))
        counts = [len(parts) for parts in payload]
        if peer in known.told:
            if known.told[peer] != (counts, numbers):
                raise RuntimeError(
                    "what a layer leaves has other shapes or dtypes than in the first step: set"
                    " across_ranks to off"
                )
            return None
        known.told[peer] = counts, numbers
        works, messages = [], [torch.tensor(each).to(self._device) for each in (counts, numbers)]
        for message in messages:  # one by one: the second's length is in the first
            works += self._begun([(dist.isend, peer, message)])
        return Message(dist.isend, peer, messages, works)

    def rows(self, peer: int, known: Known, num_layers: int) -> list[list[Row]]:
        """What rows of payloads are that a peer sends; waits for it the first time."""
        if peer not in known.rows:
            counts = self._numbers(peer, num_layers)
            numbers = self._numbers(peer, sum(counts) * (2 + _DIMENSIONS))
            rows: list[Row] = []
            for at in range(0, len(numbers), 2 + _DIMENSIONS):
                dtype, num, *shape = numbers[at : at + 2 + _DIMENSIONS]
                rows.append((tuple(shape[:num]), _DTYPES[dtype]))
            remaining = iter(rows)
            known.rows[peer] = [list(itertools.islice(remaining, count)) for count in counts]
        return known.rows[peer]

    def _numbers(self, peer: int, count: int) -> list[int]:
        numbers = torch.zeros(count, dtype=torch.int64, device=self._device)
        for work in self._begun([(dist.irecv, peer, numbers)]):
            work.wait()
        return numbers.tolist()

    def _begun(self, messages: Sequence[tuple[Any, int, Tensor]]) -> list[Any]:
        """The work of every message; NCCL has one for all that begin at once."""
        ways = [dist.P2POp(way, one, self.ranks[to], self._group) for way, to, one in messages]
        works = dist.batch_isend_irecv(ways) if ways else []
        return works if len(works) == len(ways) else works[:1] * len(ways)


def delivered(rows: np.ndarray, group: Any, device: torch.device) -> np.ndarray:
    """What the ranks of a group have for this one; all of them call this.

    Args:
        rows: int32 [num, columns]; the first column says for which rank of the group each is.
        group: the trainer's, with no other messages under way.
        device: where its tensors live.
    """
    num, rank = group.size(), group.rank()
    for distance in distances(num):
        peers = [(rank + distance) % num, (rank - distance) % num]
        is_leaving = leaving(rows, rank, num, distance)
        sent = torch.from_numpy(rows[is_leaving]).to(device)
        nums = torch.tensor([len(sent), 0], device=device)
        _swapped([nums[:1], nums[1:]], peers, group)
        received = torch.empty(int(nums[1]), rows.shape[1], dtype=torch.int32, device=device)
        _swapped([sent, received], peers, group)
        rows = np.concatenate([rows[~is_leaving], received.cpu().numpy()])
    return rows


def _swapped(tensors: Sequence[Tensor], peers: Sequence[int], group: Any) -> None:
    """Sends one to the first peer and fills the other from the second; waits for both."""
    ranks = dist.get_process_group_ranks(group)
    ways = [
        dist.P2POp(way, tensor, ranks[peer], group)
        for way, tensor, peer in zip((dist.isend, dist.irecv), tensors, peers, strict=True)
        if tensor.numel()
    ]
    for work in dist.batch_isend_irecv(ways) if ways else []:
        work.wait()


_made: weakref.WeakKeyDictionary[Any, Communicator] = weakref.WeakKeyDictionary()


def communicator(group: Any, device: torch.device) -> Communicator:
    """The communicator of a group, made once; all of its ranks call this."""
    if group not in _made:
        _made[group] = Communicator(group, device)
    return _made[group]


@contextlib.contextmanager
def communicator_of(group: Any, device: torch.device) -> Iterator[Communicator]:
    """See `communicator`; given up when a step fails: messages of that step may still be in it."""
    try:
        yield communicator(group, device)
    except BaseException:
        _made.pop(group, None)
        raise
