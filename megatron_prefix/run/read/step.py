"""A step: the trainer's samples as a forest of segments, which every pipeline stage knows.

Labels go from the last stage to the first, which builds the forest, once, and tells it to the
others; a stage that is alone tells nobody.  The tree is over whole samples, so context-parallel
ranks gather tokens, labels and loss flags once.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_prefix.device.transfer import to_host
from megatron_prefix.errors import refused
from megatron_prefix.refusals.table import NO_TREE, NUMBER_OF_ROUTES, SOME_ROUTES, STAGES_DIFFER
from megatron_prefix.run.calls import CallLayout
from megatron_prefix.run.rank import gathered
from megatron_prefix.run.read.read_calls import CallTokens, Numbers, ReadCalls
from megatron_prefix.tree import Forest, Pairs, cp_layout
from megatron_prefix.tree.cp_layout import Slices
from megatron_prefix.tree.forest import check_routes, shifted, up_to_losses

MESSAGE_NUMBERS = 1 << 13
"""Of a broadcast's first message, 64 KiB: some 500 segments, more than a usual step has."""

Builder = Callable[[Sequence[Pairs], Sequence[int]], Forest]
"""(samples, their microbatches) -> the step's segments."""

Prefilter = Callable[[Sequence[Pairs] | None], bool]
"""Whether nobody has to build a tree for these samples; all ranks of the first stage ask."""


@dataclass(frozen=True)
class Step:
    """What a rank knows of a step.

    Attributes:
        microbatch_of: the trainer's microbatch of each sample; samples are in the calls' order.
        samples: whole; None on stages in the middle. Routes are on the first stage.
        reads_all: losses look at all positions of segments with loss; known on the first stage.
        crosses: payloads cross data-parallel ranks, though perhaps none of this one.
        why_alone: why they do not, where they could have; known on the first stage.
        unshared: the prefilter says that sharing does not pay; the forest has no segments then.
        slices: how calls are cut for context-parallel ranks.
    """

    forest: Forest
    microbatch_of: tuple[int, ...]
    packed: tuple[bool, ...]
    samples: Sequence[Pairs] | None
    routed: bool = False
    unshared: bool = False
    reads_all: bool = False
    crosses: bool = False
    why_alone: str = ""
    slices: Slices = Slices.ZIGZAG

    @property
    def num_microbatches(self) -> int:
        return len(self.packed)

    @classmethod
    def of(
        cls, layouts: Sequence[CallLayout], samples: Sequence[Pairs] | None = None, align: int = 1
    ) -> Step:
        """A step without segments, of which nobody asks for first trained positions.

        Args:
            align: to what the stock schedule pads them.
        """
        lengths = tuple(length for layout in layouts for length in layout.lengths)
        owners = [number for number, layout in enumerate(layouts) for _ in layout.lengths]
        packed = tuple(layout.packed for layout in layouts)
        forest = Forest((), lengths, (0,) * len(lengths), align)
        routed = any(sample.routes is not None for sample in samples or ())
        slices = layouts[0].slices if layouts else Slices.ZIGZAG
        return cls(forest, tuple(owners), packed, samples, routed, slices=slices)

    def with_forest(self, forest: Forest) -> Step:
        """The step with segments, all of whose positions its losses may look at."""
        return replace(self, forest=forest.all_read() if self.reads_all else forest)


def read_step(
    calls: ReadCalls,
    groups: Any,
    build: Builder | None,
    device: torch.device,
    prefilter: Prefilter | None = None,
) -> tuple[Step | None, BaseException | None]:
    """Builds the forest on the first stage and tells it to every stage; all of them call this.

    Args:
        build: makes segments of samples; None: they are made later.
        prefilter: asked on the first stage before anything is built, with None if samples were not
            read; None: nothing is asked.

    Returns:
        The step, and where there is none what went wrong on this or on the first stage, for
        `agreement.agree`.
    """
    pp = groups.pp
    samples: list[Pairs] | None = None
    step: Step | None = None
    problem: BaseException | None = None
    if pp.size() > 1:
        columns = _tell_first(calls.last, calls.first, pp, device)
    else:
        columns = calls.first if calls.last is None else _merged_samples(calls.first, calls.last)
    try:
        samples = _read_samples(calls, columns, groups, device)
    except Exception as error:  # noqa: BLE001  # the other stages wait for this one's message
        problem = error
    if calls.first is not None:
        unshared = prefilter is not None and prefilter(samples)
        try:
            if columns is not None and samples is not None:
                step = _built(columns, samples, None if unshared else build, unshared)
        except Exception as error:  # noqa: BLE001  # likewise
            problem = error
    if pp.size() > 1:
        step = told(step, samples, pp, device)
    return step, None if step is not None else problem or refused(NO_TREE)


def _read_samples(
    calls: ReadCalls, columns: CallTokens | None, groups: Any, device: torch.device
) -> list[Pairs] | None:
    """What this stage knows of the samples; `columns`: of both ends of the pipeline."""
    cp, layouts = groups.cp, columns.layouts if columns else ()
    routes = [*itertools.chain(*(part.same(layouts) for part in calls.parts))]
    if calls.first is None or columns is None:
        if calls.last is None:
            return None
        return _samples(calls.last, (), cp, device, num_next=calls.num_next)
    for part in calls.parts:
        columns = columns._replace(tokens=part.tokens(columns.lengths, columns.tokens))
    return _samples(
        columns, routes, cp, device, up_to_loss=calls.up_to_loss, num_next=calls.num_next
    )


def told(
    step: Step | None, samples: Sequence[Pairs] | None, group: Any, device: torch.device
) -> Step | None:
    """The first stage's step on every stage, and None if it has none; all of them call this.

    Args:
        group: the pipeline, of several ranks.
    """
    numbers = np.zeros(0, np.int64) if step is None else _pickled(step)
    numbers = _broadcast(numbers, group, 0, device)
    if step is not None or not len(numbers):
        return step
    sent = pickle.loads(numbers.tobytes())  # noqa: S301  # by a rank of this job
    return replace(sent, samples=samples)


def _pickled(step: Step) -> Numbers:
    """Without what only the first stage knows; what follows a pickle is not read."""
    message = pickle.dumps(replace(step, samples=None, reads_all=False, why_alone=""))
    return np.frombuffer(message + bytes(-len(message) % 8), np.int64)


def _built(
    columns: CallTokens, samples: Sequence[Pairs], build: Builder | None, unshared: bool
) -> Step:
    reads_all = columns.labels is None  # outputs are logits of all positions
    step = replace(Step.of(columns.layouts, samples), unshared=unshared, reads_all=reads_all)
    return step if build is None else step.with_forest(build(samples, step.microbatch_of))


def _tell_first(
    last: CallTokens | None, first: CallTokens | None, group: Any, device: torch.device
) -> CallTokens | None:
    """The first stage's columns, with labels and loss flags of the last where that has some."""
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
    return _merged_samples(first, first._replace(labels=labels, trained=trained))


def _merged_samples(first: CallTokens | None, last: CallTokens) -> CallTokens | None:
    if first is None:
        return None
    return first._replace(
        labels=first.labels if last.labels is None else last.labels,
        trained=first.trained if last.trained is None else last.trained,
    )


def _samples(
    columns: CallTokens,
    routes: Sequence[Tensor | None],
    group: Any,
    device: torch.device,
    *,
    up_to_loss: bool = False,
    num_next: int = 0,
) -> list[Pairs]:
    lengths, bounds = columns.lengths, np.cumsum([0, *columns.lengths])
    (inputs, after, flags, *bits), paths = _whole_samples(columns, routes, group, device)
    flags = flags != 0
    mask = bits[0].view(np.float64) if bits else None
    if columns.labels is None:
        # Whatever follows a token may be its label; no other sample has the last one's.
        after, last = np.append(inputs[1:], 0), bounds[1:] - 1
        after[last] = -2 - np.arange(len(last))
        if mask is not None:
            mask = np.append(mask[1:], 0.0)
            mask[last] = 0.0
    # Whether masks are known may differ between ranks of context parallelism; the flags that they
    # have gathered do not.
    needed = up_to_losses(flags, lengths).tolist() if up_to_loss else [None] * len(lengths)
    samples = []
    for (start, end), most in zip(itertools.pairwise(bounds.tolist()), needed, strict=True):
        own = (inputs[start:end], after[start:end], flags[start:end])
        routed = None if paths is None else paths[start:end]
        weights_of = None if mask is None else mask[start:end]
        samples.append(Pairs(*own, routed, weights_of, None, most))
    if paths is not None:
        check_routes(samples)
    return samples if columns.weights is None else with_next_tokens(samples, num_next)


def with_next_tokens(samples: Sequence[Pairs], num: int = 1) -> list[Pairs]:
    """Samples whose positions are shared only where so many next inputs are the same, too: so a
    span ends as many positions before its rollouts differ. The first of them is the label, unless
    labels are masked, or numbers of which the tree reads 32 bits."""
    labels_tell = all(np.array_equal(s.labels[:-1] & 0xFFFFFFFF, s.inputs[1:]) for s in samples)
    shifts = range(1 + labels_tell, num + 1)
    if not shifts:
        return [*samples]
    return [
        replace(sample, following=np.stack([shifted(sample.inputs, n, -1) for n in shifts], axis=1))
        for sample in samples
    ]


def _whole_samples(
    columns: CallTokens, routes: Sequence[Tensor | None], group: Any, device: torch.device
) -> tuple[list[Numbers], Numbers | None]:
    """Of whole samples tokens, labels, flags of loss and perhaps weights; routes."""
    lengths, size = columns.lengths, group.size()
    num = sum(lengths) // size
    if any(c is not None and len(c) != num for c in (columns.labels, columns.trained)):
        raise refused(STAGES_DIFFER)
    tokens = np.zeros(num, np.int64) if columns.tokens is None else columns.tokens
    trained = np.ones(num, np.int64) if columns.trained is None else columns.trained
    labels = tokens if columns.labels is None else columns.labels
    rows = [tokens, labels, trained, *([] if columns.weights is None else [columns.weights])]
    paths = _joined_routes(routes, num) if routes else None
    if size > 1:
        order = _order(columns.layouts, size)
        rows = [*_rows_of_ranks(np.stack(rows, axis=1), group, device)[order].T]
        paths = None if paths is None else _rows_of_ranks(paths, group, device)[order]
    return rows, paths


def _order(layouts: Sequence[CallLayout], size: int) -> Numbers:
    """Where samples' positions are among those of all context-parallel ranks, one rank's of all
    calls behind the other's."""
    starts = np.cumsum([0, *(sum(layout.lengths) for layout in layouts)])
    pairs = [*zip(layouts, starts, strict=False)]
    held = [start + layout.held(rank, size) for rank in range(size) for layout, start in pairs]
    return cp_layout.inverse(np.concatenate([np.arange(0), *held]))


def _joined_routes(routes: Sequence[Tensor | None], num: int) -> Numbers | None:
    read = [to_host(route.detach().flatten(0, -3)) for route in routes if route is not None]
    if not read:
        return None
    if len(read) < len(routes):
        raise refused(SOME_ROUTES)
    rows = np.concatenate(read)
    if len(rows) != num:
        raise refused(NUMBER_OF_ROUTES, len(rows), num)
    return rows.astype(np.int32)


def _rows_of_ranks(local: np.ndarray, group: Any, device: torch.device) -> np.ndarray:
    tensor = torch.from_numpy(np.ascontiguousarray(local)).to(device)
    return gathered(tensor, group).cpu().numpy()


def _broadcast(numbers: Numbers, group: Any, source: int, device: torch.device) -> Numbers:
    """One stage's numbers on every stage: in one message, and a second for what is over."""
    rank = dist.get_process_group_ranks(group)[source]
    first = np.zeros(MESSAGE_NUMBERS, np.int64)
    first[0], num_sent = len(numbers), min(len(numbers), MESSAGE_NUMBERS - 1)
    first[1 : 1 + num_sent] = numbers[:num_sent]
    message = torch.from_numpy(first).to(device)
    dist.broadcast(message, rank, group=group)
    count, begin = int(message[0]), message.cpu().numpy()[1:]
    if count < MESSAGE_NUMBERS:
        return begin[:count]
    over = np.zeros(count - len(begin), np.int64)
    if group.rank() == source:
        over[:] = numbers[len(begin) :]
    second = torch.from_numpy(over).to(device)
    dist.broadcast(second, rank, group=group)
    return np.concatenate([begin, second.cpu().numpy()])
