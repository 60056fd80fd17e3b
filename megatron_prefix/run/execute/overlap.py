"""Reductions of gradients that begin during a rank's last backwards.

Megatron starts a bucket group when its gradients have come as often as in the first batch's last
microbatch (register_grad_ready in megatron/core/distributed/param_and_grad_buffer.py).  A last
backward of ours may be an inner segment's, which touches neither the output layer nor the rest of
the last layer; so hooks of our own, there during the last backward of a model chunk only, count the
gradients of every parameter.  How many come is what came before in a backward of the same kind: the
first one is only watched.

NCCL wants one order on all data-parallel ranks, whatever they run, so there is one: a group starts
when all before it have started and none of its parameters will get another gradient.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from megatron_prefix.run.rank import Rank

_UNKNOWN = -1  # got no gradient in a backward that could have given it one

_known: WeakKeyDictionary[Any, dict[Hashable, list[int]]] = WeakKeyDictionary()
"""By model chunk and kind of its last backward: gradients that each parameter gets in it."""


class Reductions:
    """The reductions of one step, of bucket groups that overlap with backwards.

    Args:
        rank: whose gradients they are.
        force_all_reduce: see Megatron's schedules.

    Raises:
        RuntimeError: reductions of another step are under way.
    """

    def __init__(self, rank: Rank, force_all_reduce: bool | None) -> None:
        self._models, self._force_all_reduce = rank.models, force_all_reduce
        self._queue, config = _in_order(rank.models), rank.config
        if any(group.grad_reduce_handle is not None for group in self._queue):
            raise RuntimeError(
                "gradients of a step before this one are still being reduced: that step failed, or"
                " nobody called finalize_model_grads after it; begin again from a checkpoint"
            )
        self._finalizes = config.finalize_model_grads_func is not None
        self._early = (
            self._finalizes
            and any(map(_travels, self._queue))
            and not any(map(_starts_twice, self._queue))
            # The output layer's gradient is computed after the last backward.
            and not getattr(config, "defer_embedding_wgrad_compute", False)
            # As in Megatron's schedules: with grad_sync_func only the first stage runs ahead.
            and (rank.is_first or config.grad_sync_func is None)
        )
        self._started = 0
        self._pending: dict[Any, float] = dict.fromkeys(self._queue, math.inf)
        self._late: Any = None

    @property
    def begun(self) -> bool:
        """Whether gradients have been handed over, so that the step cannot be undone."""
        return self._started > 0

    @contextlib.contextmanager
    def during(
        self, chunk: int, kind: Hashable, unread: Callable[[], Collection[Any]]
    ) -> Iterator[None]:
        """Starts what is complete while the last backward of a model chunk runs inside.

        Args:
            chunk: of this rank.
            kind: backwards of one kind give gradients to the same parameters.
            unread: parameters that this kind can leave out; others are waited for.
        """
        if not (self._early and overlaps(self._models[chunk])):
            yield
            return
        model = self._models[chunk]
        counts = [0] * len(model.grad_accs)
        known = _known.setdefault(model, {})
        expected = known.get(kind)
        if expected is not None:
            self._expect(model, expected)
            self._advance()
        handles = [
            node.register_hook(
                functools.partial(self._arrived, model, node, place, counts, expected)
            )
            for place, node in enumerate(model.grad_accs)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if expected is None:
            absent = unread() if 0 in counts else ()
            parameters = (node.variable for node in model.grad_accs)
            known[kind] = [
                # A frozen weight may be thawed: it is waited for.
                count or (0 if one in absent and one.requires_grad else _UNKNOWN)
                for count, one in zip(counts, parameters, strict=True)
            ]
        else:
            known[kind] = [
                max(old, count) if count else old
                for old, count in zip(expected, counts, strict=True)
            ]

    def start_rest(self) -> None:
        """Starts what has not started, but for groups that Megatron's finalize starts itself."""
        for group in self._queue[self._started :]:
            first = group.is_first_batch and not (self._finalizes and not _starts_twice(group))
            if not first and group.grad_reduce_handle is None:
                group.start_grad_sync(force_all_reduce=self._force_all_reduce)

    def check(self) -> None:
        """Refuses the step's gradients where one came after its reduction had begun.

        It is called when all reductions of the step are over, so that no other rank waits.

        Raises:
            RuntimeError: naming the parameter.
        """
        if self._late is None:
            return
        names = (
            name
            for model in self._models
            for name, parameter in model.named_parameters()
            if parameter is self._late
        )
        raise RuntimeError(
            f"{next(names, 'a parameter')} got a gradient after its reduction had begun, in a kind"
            " of backward that gave it fewer before: the gradients of this step are wrong, on all"
            " data-parallel ranks; turn overlap_grad_reduce off and begin again from a checkpoint"
        )

    def _expect(self, model: Any, expected: list[int]) -> None:
        """Counts the parameters that every group of a chunk waits for."""
        group_of = model.param_to_bucket_group
        for group in _groups(model):
            self._pending[group] = 0
        for node, count in zip(model.grad_accs, expected, strict=True):
            if count:
                self._pending[group_of[node.variable]] += 1 if count > 0 else math.inf

    def _arrived(
        self,
        model: Any,
        node: Any,
        place: int,
        counts: list[int],
        expected: list[int] | None,
        *_: Any,
    ) -> None:
        """A parameter has got a gradient, and DDP's own hook has added it up."""
        counts[place] += 1
        if expected is None:
            return
        group = model.param_to_bucket_group[node.variable]
        if counts[place] == expected[place]:
            self._pending[group] -= 1
            if not self._pending[group]:
                self._advance()
        elif counts[place] > max(expected[place], 0) and group in self._queue[: self._started]:
            # Raised by `check`: other ranks wait for the rest of the step's reductions.
            self._late = node.variable

    def _advance(self) -> None:
        """Starts groups that are complete, up to the first that is not."""
        while self._started < len(self._queue) and not self._pending[self._queue[self._started]]:
            group = self._queue[self._started]
            self._started += 1
            if group.grad_reduce_handle is None:
                group.start_grad_sync(force_all_reduce=self._force_all_reduce)


def _groups(model: Any) -> list[Any]:
    groups: list[Any] = model.bucket_groups + model.expert_parallel_bucket_groups
    return groups


def overlaps(model: Any) -> bool:
    """Whether Megatron's DDP is to reduce a model chunk's gradients during backwards."""
    return bool(getattr(getattr(model, "ddp_config", None), "overlap_grad_reduce", False))


def _in_order(models: list[Any]) -> list[Any]:
    """Bucket groups of a rank in the order in which they are reduced, on all ranks alike.

    Backwards end with the first chunk and there with the first layer.
    """
    queue: list[Any] = []
    for model in reversed(models):
        if overlaps(model):
            places = {node.variable: place for place, node in enumerate(model.grad_accs)}
            queue += sorted(_groups(model), key=functools.partial(_from_the_end, places))
    return queue


def _from_the_end(places: dict[Any, int], group: Any) -> int:
    """Smaller for groups whose last gradient comes earlier in a backward."""
    return -min(places[parameter] for parameter in group.params)


def _travels(group: Any) -> bool:
    """Whether several ranks add their gradients up."""
    name = "data_parallel_group"
    if group.ddp_config.use_distributed_optimizer:
        name = "intra_distributed_optimizer_instance_group"
    return bool(getattr(group, name).size() > 1)


def _starts_twice(group: Any) -> bool:
    """Whether Megatron does not see that a reduction has started: several optimizer instances have
    no handle of it."""
    return bool(group.ddp_config.num_distributed_optimizer_instances > 1)
