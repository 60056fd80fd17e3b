"""Context-parallel ranks as threads of this process."""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_prefix.features.context_parallel.part import ExchangedLayers
from megatron_prefix.sidecar.cache import SidecarCache
from megatron_prefix.sidecar.row_exchange import RowExchange
from megatron_prefix.tree import TreeOptions, build
from megatron_prefix.tree.payload_map import Form
from tests.harness.trees import flat_rollouts


class World:
    """What the ranks have sent: by number of the call and rank."""

    def __init__(self, size):
        self.size = size
        self._given = {}
        self._news = threading.Condition()

    def give(self, number, rank, tensors):
        with self._news:
            self._given[number, rank] = tensors
            self._news.notify_all()

    def of_all(self, number):
        keys = [(number, rank) for rank in range(self.size)]
        with self._news:
            if not self._news.wait_for(lambda: all(key in self._given for key in keys), 10):
                raise TimeoutError(f"call {number}: a rank has not come")
            return [self._given[key] for key in keys]


@dataclass
class Later:
    """Replaces Pending."""

    make: Callable[[], tuple[Tensor, ...]]
    works: tuple[Any, ...] = (None,)

    def wait(self):
        return self.make()


class PlayedRank(RowExchange):
    """One rank; `sent` is what it has sent, call by call."""

    def __init__(self, world, rank):
        self._world, self.rank, self.size = world, rank, world.size
        self.sent = []
        self._numbers = itertools.count()
        self._tables = {}

    def _give(self, *tensors):
        number = next(self._numbers)
        self._world.give(number, self.rank, tensors)
        self.sent.append(tensors)
        return number

    def gather(self, *parts):
        number = self._give(torch.cat(parts, dim=-1))
        return Later(lambda: tuple(map(torch.cat, zip(*self._world.of_all(number), strict=True))))

    def reduce_scatter(self, view):
        number = self._give(view)

        def mine():
            total = sum(given for (given,) in self._world.of_all(number))
            return (total.chunk(self.size)[self.rank],)

        return Later(mine)


def spread(reduce, planned, num_layers, rank):
    """A rank's sidecar by the name of cp_reduce; `planned` maps an arena of one of so many shares
    of K/V."""
    places = planned({"wave": rank.size, "segment": 1}[reduce])
    forms = [Form.POSITIONS] * num_layers
    return SidecarCache(places, forms, ExchangedLayers(places, forms, rank), rank)


def play(size, part):
    """Runs `part` on every rank; returns the results."""
    world = World(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(part, [PlayedRank(world, rank) for rank in range(size)]))


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def forest(align=4):
    """A prompt in a chain of two chunks, and two waves of two rollouts."""
    rollouts, groups = flat_rollouts(16, 8, 4, 1)
    options = TreeOptions(multiple=align, chunk_tokens=8, segment_tokens=16, min_gain=0)
    return build(rollouts, groups, options)
