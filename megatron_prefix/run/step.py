"""A step's microbatches become a forest that every pipeline stage knows.

The first stage reads the trainer's microbatches and builds the forest, the last reads them for the
losses, the others read nothing: what they must know, the lengths, comes in one broadcast.

With context parallelism every rank reads its own slice of each sample (its chunks of the zig-zag,
as get_batch_on_this_cp_rank of megatron/core/utils.py makes them).  The tree is over whole
rollouts, the same on all ranks of the group, so they gather tokens, labels and loss flags once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_prefix.errors import UserError
from megatron_prefix.run.batch import BatchAdapter
from megatron_prefix.tree import Forest, Pairs, cp_layout
from megatron_prefix.tree.forest import check_routes

MESSAGE_NUMBERS = 1 << 13
"""Of the one broadcast, 64 KiB: some 500 segments, more than a usual step has."""

Builder = Callable[[Sequence[Pairs], Sequence[int], Sequence[int]], Forest]
"""(rollouts, their groups, their microbatches) -> the step's segments."""


@dataclass(frozen=True)
class Step:
    """What a rank knows of a step.

    Attributes:
        forest: the step's segments.
        microbatch_of: the trainer's microbatch of each rollout.
        items: the trainer's microbatches, in its order; empty where none are read.
        rollouts: their samples, whole; None where none are read. Routes are on the first stage.
        routed: whether the samples have routes.
    """

    forest: Forest
    microbatch_of: tuple[int, ...]
    items: Sequence[Any]
    rollouts: Sequence[Pairs] | None
    routed: bool = False

    @property
    def num_microbatches(self) -> int:
        """The trainer's microbatches of the step."""
        return max(self.microbatch_of, default=-1) + 1

    def replay(self, data_iterator: Any) -> Any:
        """An iterator in the place of the trainer's, for the stock schedule."""
        if self.rollouts is None:
            return data_iterator
        if isinstance(data_iterator, list):
            return [iter(self.items) for _ in data_iterator]
        return iter(self.items)


def read_step(
    data_iterator: Any,
    num_microbatches: int,
    adapter: BatchAdapter,
    group: Any,
    context_group: Any,
    build: Builder,
    device: torch.device,
) -> Step:
    """Reads a step's microbatches where they are read, and tells every stage the forest.

    Args:
        data_iterator: the trainer's, one or a list of one a model chunk.
        num_microbatches: how many to read.
        adapter: knows their form.
        group: the pipeline's process group.
        context_group: the context-parallel process group.
        build: makes segments of rollouts; called on the first stage.
        device: where the process groups' tensors live.

    Raises:
        UserError: the iterator ends early, or samples are not cut for context parallelism.
    """
    first, last = group.rank() == 0, group.rank() == group.size() - 1
    items: list[Any] = []
    rollouts: list[Pairs] | None = None
    numbers: list[int] = []
    if first or last:
        many = isinstance(data_iterator, list)
        source = data_iterator[0 if first else -1] if many else data_iterator
        items, rollouts, microbatch_of, groups = _read(source, num_microbatches, adapter)
        if not first:
            rollouts = [replace(rollout, routes=None) for rollout in rollouts]
        rollouts = _whole(rollouts, context_group, device)
        if first:
            forest = build(rollouts, groups, microbatch_of)
            routed = any(rollout.routes is not None for rollout in rollouts)
            numbers = [int(routed), len(microbatch_of), *microbatch_of, *forest.to_ints()]
    is_routed, num_rollouts, *numbers = _broadcast(numbers, group, device)
    microbatches_of, ints = tuple(numbers[:num_rollouts]), numbers[num_rollouts:]
    return Step(Forest.from_ints(ints), microbatches_of, items, rollouts, bool(is_routed))


def _read(
    source: Iterator[Any], num_microbatches: int, adapter: BatchAdapter
) -> tuple[list[Any], list[Pairs], list[int], list[int]]:
    """Microbatches, their samples, and each sample's microbatch and group."""
    items: list[Any] = []
    rollouts: list[Pairs] = []
    microbatch_of: list[int] = []
    groups: list[int] = []
    numbers: dict[Any, int] = {}
    for number in range(num_microbatches):
        try:
            item = next(source)
        except StopIteration:
            raise UserError(
                f"the data iterator ended after {number} of {num_microbatches} microbatches"
            ) from None
        samples = adapter.pairs(item)
        group = numbers.setdefault(adapter.group(item), len(numbers))
        items.append(item)
        rollouts += samples
        microbatch_of += [number] * len(samples)
        groups += [group] * len(samples)
    return items, rollouts, microbatch_of, groups


def _whole(rollouts: list[Pairs], group: Any, device: torch.device) -> list[Pairs]:
    """Whole samples from the slices that the context-parallel ranks have read."""
    size = group.size()
    if size == 1 or not rollouts:
        return rollouts
    for index, rollout in enumerate(rollouts):
        if not len(rollout) or len(rollout) % 2:
            raise UserError(
                f"rollout {index} has {len(rollout)} positions on this context-parallel rank, which"
                f" are not two chunks: pad rollouts to a multiple of {2 * size} and give every rank"
                " its slice"
            )
    columns = [np.stack([r.inputs, r.labels, r.trained]).astype(np.int64) for r in rollouts]
    mine = torch.from_numpy(np.concatenate(columns, axis=1)).to(device)
    slices = mine.new_empty((size * len(mine), mine.shape[1]))
    dist.all_gather_into_tensor(slices, mine, group)
    view = slices.unflatten(0, (size, -1)).transpose(0, 1).flatten(1).cpu().numpy()
    lengths = [size * len(rollout) for rollout in rollouts]
    table = view[:, cp_layout.order(lengths, size)]
    samples = np.split(table, np.cumsum(lengths)[:-1], axis=1)
    routes = _whole_routes(rollouts, group, device)
    return [
        Pairs(inputs, labels, trained != 0, of_one)
        for (inputs, labels, trained), of_one in zip(samples, routes, strict=True)
    ]


def _whole_routes(
    rollouts: list[Pairs], group: Any, device: torch.device
) -> Sequence[np.ndarray | None]:
    """Routes of whole samples, or as many None."""
    check_routes(rollouts)
    routes = [rollout.routes for rollout in rollouts if rollout.routes is not None]
    if not routes:
        return [None] * len(rollouts)
    mine = torch.from_numpy(np.concatenate(routes).astype(np.int32)).to(device)
    slices = mine.new_empty((group.size() * len(mine), *mine.shape[1:]))
    dist.all_gather_into_tensor(slices, mine, group)
    lengths = [group.size() * len(rollout) for rollout in rollouts]
    whole = slices.cpu().numpy()
    # `order` counts along each rank's slices of all samples, as in `_whole`.
    whole = whole[cp_layout.order(lengths, group.size())]
    return np.split(whole, np.cumsum(lengths)[:-1])


def _broadcast(numbers: list[int], group: Any, device: torch.device) -> list[int]:
    """The first stage's numbers on every stage: in one message, and a second for what is over."""
    if group.size() == 1:
        return numbers
    source = dist.get_process_group_ranks(group)[0]
    said = [len(numbers), *numbers[: MESSAGE_NUMBERS - 1]]
    message = torch.tensor(said + [0] * (MESSAGE_NUMBERS - len(said)), device=device)
    dist.broadcast(message, source, group=group)
    count, *found = message.tolist()
    if count < MESSAGE_NUMBERS:
        return found[:count]
    rest = torch.tensor(numbers[len(found) :] or [0] * (count - len(found)), device=device)
    dist.broadcast(rest, source, group=group)
    return found + rest.tolist()
