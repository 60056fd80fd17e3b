"""A step's model calls become a forest that every pipeline stage knows.

The first stage's calls have the tokens, the last stage's the labels and the loss mask, and those in
the middle may have nothing.  So labels go from the last stage to the first, which builds the
forest, and the forest goes to all.

With context parallelism every rank's call has its own slice of each sample (its chunks of the
zig-zag, as get_batch_on_this_cp_rank of megatron/core/utils.py makes them).  The tree is over whole
samples, the same on all ranks of the group, so they gather tokens, labels and loss flags once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_prefix.device.transfer import to_host
from megatron_prefix.errors import CannotShare
from megatron_prefix.run.calls import CallLayout, ModelCall, layouts
from megatron_prefix.run.samples import Samples, trained_positions
from megatron_prefix.tree import Forest, Pairs, cp_layout
from megatron_prefix.tree.forest import check_routes

MESSAGE_NUMBERS = 1 << 13
"""Of a broadcast's first message, 64 KiB: some 500 segments, more than a usual step has."""

Builder = Callable[[Sequence[Pairs], Sequence[int]], Forest]
"""(samples, their microbatches) -> the step's segments."""

Prefilter = Callable[[Sequence[Pairs] | None], bool]
"""Whether nobody has to build a tree for these samples; all ranks of the first stage ask."""

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Callbacks:
    """What a trainer may say of its microbatches that its model calls do not.

    Attributes:
        trained: (model call) -> bool or float like the call's input_ids on this rank, which
            positions carry loss; where the call has no loss_mask and this is None, all count.
        routes: (model call) -> int like input_ids and [layers, topk] more: the experts that every
            layer of the model sends a token to; asked on the first stage where routers replay.
            `drawn` of the call is what its forward step drew from the data iterator.
        samples: where a microbatch has its trained positions, see run/samples.py; for steps with
            gradients whose calls have no loss_mask, where `trained` is None.
    """

    trained: Callable[[ModelCall], Tensor | None] | None = None
    routes: Callable[[ModelCall], Tensor | None] | None = None
    samples: Samples | None = None

    def needs_drawn(self, forward_only: bool) -> bool:
        """Whether model calls must keep what was drawn for them: `ModelCall.drawn`."""
        return self.routes is not None or (self.samples is not None and not forward_only)


@dataclass(frozen=True)
class Step:
    """What a rank knows of a step.

    Attributes:
        forest: the step's segments.
        microbatch_of: the trainer's microbatch of each sample; samples are in the calls' order.
        packed: per microbatch whether its samples are one behind the other in one row.
        samples: whole; None on stages in the middle. Routes are on the first stage.
        routed: whether the samples have routes.
        unshared: the prefilter says that sharing does not pay; the forest has no segments then.
    """

    forest: Forest
    microbatch_of: tuple[int, ...]
    packed: tuple[bool, ...]
    samples: Sequence[Pairs] | None
    routed: bool = False
    unshared: bool = False

    @property
    def num_microbatches(self) -> int:
        """The trainer's microbatches of the step."""
        return len(self.packed)


class Columns(NamedTuple):
    """What the calls of one model chunk say of their positions on this rank.

    Attributes:
        layouts: of every call.
        tokens: int64 [positions] of all calls one behind the other; None where none are given.
        labels: likewise.
        trained: whether a position carries loss, 0 or 1, likewise.
        positions: `position_ids`, likewise; looked at only to refuse some.
    """

    layouts: list[CallLayout]
    tokens: Numbers | None
    labels: Numbers | None
    trained: Numbers | None
    positions: Numbers | None


def read_columns(
    calls: Sequence[ModelCall],
    cp_size: int,
    callbacks: Callbacks,
    *,
    forward_only: bool = False,
    cp_rank: int = 0,
) -> Columns | None:
    """Tokens, labels and loss flags of a chunk's calls, on the host; None where they say nothing.

    Without gradients nothing tells whether somebody looks at a position that the calls' loss_mask
    leaves out, so only the callback may leave out any.

    Raises:
        CannotShare: see `calls.layouts`; a column of another size.
    """
    if not calls:  # a data-parallel rank without microbatches
        nothing = np.zeros(0, np.int64)
        return Columns([], nothing, nothing, nothing, None)
    found = layouts(calls, cp_size)
    if found is None:
        return None
    for call in calls:
        call.check_unchanged()
    masks = [None if forward_only else call["loss_mask"] for call in calls]
    if callbacks.trained is not None and all(mask is None for mask in masks):
        masks = [callbacks.trained(call) for call in calls]
    elif callbacks.samples is not None and not forward_only and all(m is None for m in masks):
        masks = trained_positions(calls, found, callbacks.samples, cp_rank, cp_size)
    columns = {name: [call[name] for call in calls] for name in ("input_ids", "labels")}
    columns["trained positions"] = [None if mask is None else mask != 0 for mask in masks]
    lengths = _num_positions(found)
    for name, column in columns.items():
        for value, num in zip(column, lengths, strict=True):
            if value is not None and not value.is_nested and value.numel() != num:
                raise CannotShare(f"{name} of a model call has {value.numel()} of {num} positions")
    positions = [call["position_ids"] for call in calls]
    return Columns(found, *_on_host([*columns.values(), positions], lengths))


def _num_positions(found: Sequence[CallLayout]) -> list[int]:
    return [sum(layout.lengths) for layout in found]


def _on_host(
    columns: Sequence[Sequence[Tensor | None]], lengths: Sequence[int]
) -> list[Numbers | None]:
    """Every column as one array; all of them come in one copy, for which the host waits once."""
    usable = [
        all(v is not None and not v.is_nested and v.numel() == n for v, n in zip(c, lengths))  # noqa: B905
        for c in columns
    ]
    values = [v for column, use in zip(columns, usable, strict=True) if use for v in column]
    if not values:
        return [None] * len(columns)
    device = values[0].device  # type: ignore[union-attr]
    flat = [v.detach().reshape(-1).to(device, torch.int64) for v in values]  # type: ignore[union-attr]
    table = iter(to_host(torch.cat(flat)).reshape(sum(usable), -1))
    return [next(table) if use else None for use in usable]


def read_step(
    first: Columns | None,
    last: Columns | None,
    routes: Sequence[Tensor | None],
    groups: Any,
    build: Builder,
    device: torch.device,
    prefilter: Prefilter = lambda _: False,
) -> Step | BaseException:
    """Builds the forest on the first stage and tells it to every stage; all of them call this.

    Args:
        first: of the first stage's calls, on that stage.
        last: of the last stage's calls, on that stage.
        routes: of the first stage's calls where routers follow them, [positions, layers, topk].
        groups: process groups of the pipeline and of context parallelism.
        build: makes segments of samples.
        device: where the process groups' tensors live.
        prefilter: asked on the first stage before anything is built; None: samples were not read.

    Returns:
        The step; or what went wrong on this or on the first stage, for `agreement.agree`.
    """
    pp, cp = groups.pp, groups.cp
    samples: list[Pairs] | None = None
    numbers: Numbers = np.zeros(0, np.int64)
    problem: BaseException = CannotShare("the first pipeline stage cannot build the step's tree")
    known = _tell_first(last, first, pp, device)
    try:
        if first is not None and known is not None:
            samples = _samples(known, routes, cp, device)
        elif last is not None:
            samples = _samples(last, (), cp, device)
    except Exception as error:  # noqa: BLE001  # the other stages wait for this one's message
        problem = error
    if first is not None:
        unshared = prefilter(samples)
        try:
            if known is not None and samples is not None:
                numbers = _message(known, samples, _not_built if unshared else build, unshared)
        except Exception as error:  # noqa: BLE001  # likewise
            problem = error
    numbers = _broadcast(numbers, pp, 0, device)
    if not len(numbers):
        return problem
    flags, num = numbers[:2].tolist()
    packed, counts = numbers[2 : 2 + num].astype(bool), numbers[2 + num : 2 + 2 * num]
    forest = Forest.from_ints(numbers[2 + 2 * num :].tolist())
    microbatch_of = tuple(np.repeat(np.arange(num), counts).tolist())
    return Step(
        forest, microbatch_of, tuple(packed.tolist()), samples, bool(flags & 1), bool(flags & 2)
    )


def _not_built(samples: Sequence[Pairs], _: Sequence[int]) -> Forest:
    """Samples without their tree; nobody asks for their first trained positions."""
    return Forest((), tuple(map(len, samples)), (0,) * len(samples))


def _message(known: Columns, samples: Sequence[Pairs], build: Builder, unshared: bool) -> Numbers:
    """What the first stage tells the others."""
    packed = [int(layout.packed) for layout in known.layouts]
    counts = [len(layout.lengths) for layout in known.layouts]
    forest = build(samples, np.repeat(np.arange(len(counts)), counts).tolist())
    if known.labels is None:  # the answers are logits of all positions
        forest = forest.all_read()
    flags = any(sample.routes is not None for sample in samples) + 2 * unshared
    return np.array([flags, len(packed), *packed, *counts, *forest.to_ints()], np.int64)


def _tell_first(
    last: Columns | None, first: Columns | None, group: Any, device: torch.device
) -> Columns | None:
    """The first stage's columns, with labels and loss flags of the last where that has some."""
    if group.size() == 1:
        return _merged(first, last)
    numbers = np.zeros(0, np.int64)
    if last is not None:
        columns = [c for c in (last.labels, last.trained) if c is not None]
        flags = [int(last.labels is not None), int(last.trained is not None)]
        numbers = np.concatenate([np.array(flags, np.int64), *columns])
    numbers = _broadcast(numbers, group, group.size() - 1, device)
    if first is None or not len(numbers):
        return first
    has_labels, has_trained = numbers[:2].tolist()
    parts = iter(np.split(numbers[2:], max(has_labels + has_trained, 1)))
    labels = next(parts) if has_labels else None
    trained = next(parts) if has_trained else None
    return _merged(first, first._replace(labels=labels, trained=trained))


def _merged(first: Columns | None, last: Columns | None) -> Columns | None:
    """The first chunk's columns, and what only the last has."""
    if first is None or last is None:
        return first
    return first._replace(
        labels=first.labels if last.labels is None else last.labels,
        trained=first.trained if last.trained is None else last.trained,
    )


def _samples(
    known: Columns, routes: Sequence[Tensor | None], group: Any, device: torch.device
) -> list[Pairs]:
    """Whole samples from the slices of the context-parallel ranks."""
    lengths = [length for layout in known.layouts for length in layout.lengths]
    num, size = sum(lengths), group.size()
    if any(c is not None and len(c) != num for c in (known.labels, known.trained)):
        raise CannotShare("the last stage's labels have not as many positions as the tokens")
    tokens = np.zeros(num, np.int64) if known.tokens is None else known.tokens
    trained = np.ones(num, np.int64) if known.trained is None else known.trained
    labels = tokens if known.labels is None else known.labels
    table = np.stack([tokens, labels, trained])
    paths = _split_routes(routes, lengths)
    if size > 1:
        table, paths = _gathered(table, paths, lengths, group, device)
        lengths = [length * size for length in lengths]
    found = []
    parts = np.split(table, np.cumsum(lengths)[:-1], axis=1) if lengths else []
    for index, part in enumerate(parts):
        inputs, after, flags = part
        if known.labels is None:
            # Whatever follows a token may be its label; no other sample has the last one's.
            after = np.append(inputs[1:], -2 - index)
        found.append(Pairs(inputs, after, flags != 0, paths[index] if paths else None))
    check_routes(found)
    return found


def _split_routes(routes: Sequence[Tensor | None], lengths: Sequence[int]) -> list[Numbers]:
    """Routes of every sample's positions on this rank, or nothing."""
    given = [to_host(one.detach().flatten(0, -3)) for one in routes if one is not None]
    if not given:
        return []
    if len(given) < len(routes):
        raise CannotShare("some microbatches have routes and some have none: give all or none")
    whole = np.concatenate(given)
    if len(whole) != sum(lengths):
        raise CannotShare(f"{len(whole)} routes for {sum(lengths)} positions: give one each")
    return np.split(whole, np.cumsum(lengths)[:-1])


def _gathered(
    table: Numbers, routes: list[Numbers], lengths: Sequence[int], group: Any, device: Any
) -> tuple[Numbers, list[Numbers]]:
    """Columns [columns, positions] and routes of whole samples from every rank's slices."""
    size = group.size()
    if any(length % 2 for length in lengths):
        raise CannotShare(
            f"a sample has {next(n for n in lengths if n % 2)} positions on a context-parallel"
            f" rank, which are not two chunks: pad samples to a multiple of {2 * size} and give"
            " every rank its slice of the zig-zag"
        )
    # `order` counts along each rank's slices of all samples, one rank behind the other.
    whole = [length * size for length in lengths]
    order = cp_layout.order(whole, size)
    columns = _all_gather(table.T, group, device)[order].T
    if not routes:
        return columns, []
    paths = _all_gather(np.concatenate(routes).astype(np.int32), group, device)[order]
    return columns, np.split(paths, np.cumsum(whole)[:-1])


def _all_gather(mine: np.ndarray, group: Any, device: torch.device) -> np.ndarray:
    """[size * n, ...] of every rank's [n, ...]."""
    sent = torch.from_numpy(np.ascontiguousarray(mine)).to(device)
    views = sent.new_empty((group.size() * len(sent), *sent.shape[1:]))
    dist.all_gather_into_tensor(views, sent, group)
    return views.cpu().numpy()


def check_positions(known: Columns | None, rank: int, size: int, *, used: bool) -> None:
    """Refuses position ids that the positions of segments do not have.

    Args:
        known: of the first stage's calls.
        rank: place in the context-parallel group.
        size: of that group.
        used: whether the model looks at them: a learned embedding does, rotary positions do not.

    Raises:
        CannotShare: they count otherwise, or each rank holds one contiguous part of a sample.
    """
    if known is None or not (used or size > 1):
        return
    if known.positions is None:
        if used:
            raise CannotShare(
                "the model learns positions, and a model call's position_ids are not one for every"
                " position: give them in the shape of input_ids"
            )
        return
    lengths = [length for layout in known.layouts for length in layout.lengths]
    parts = np.split(known.positions, np.cumsum(lengths)[:-1])
    for length, found in zip(lengths, parts, strict=True):
        if size > 1 and length > 1 and np.array_equal(found, np.arange(length) + rank * length):
            raise CannotShare(
                "context-parallel ranks hold contiguous parts of a sample: give every rank its"
                " chunks of Megatron's zig-zag (slime: leave out --allgather-cp)"
            )
        if used and not np.array_equal(found, cp_layout.positions(length * size, rank, size)):
            raise CannotShare(
                "position_ids of a sample do not count from 0, and the model learns positions:"
                " pack samples without padding in front"
            )


def _broadcast(numbers: Numbers, group: Any, source: int, device: torch.device) -> Numbers:
    """One stage's numbers on every stage: in one message, and a second for what is over."""
    if group.size() == 1:
        return numbers
    rank = dist.get_process_group_ranks(group)[source]
    first = np.zeros(MESSAGE_NUMBERS, np.int64)
    first[0], sent = len(numbers), min(len(numbers), MESSAGE_NUMBERS - 1)
    first[1 : 1 + sent] = numbers[:sent]
    message = torch.from_numpy(first).to(device)
    dist.broadcast(message, rank, group=group)
    count, found = int(message[0]), message.cpu().numpy()[1:]
    if count < MESSAGE_NUMBERS:
        return found[:count]
    over = np.zeros(count - len(found), np.int64)
    if group.rank() == source:
        over[:] = numbers[len(found) :]
    rest = torch.from_numpy(over).to(device)
    dist.broadcast(rest, rank, group=group)
    return np.concatenate([found, rest.cpu().numpy()])
