"""What the bucket groups of Megatron's DDP do in a step: how often they are reduced, and when."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_prefix.features.overlap.reductions import Reductions


@dataclass
class Watched:
    """One step on one rank.

    Attributes:
        num: bucket groups.
        outside: of them those with a parameter outside of layers.
        order: those whose reduction has started, in that order.
        gradients: that parameters have got.
        before: of every start how many gradients came before it.
        inside: of the starts how many came before the end of the prefix schedule's last backward.
        late: gradients that came to a group whose reduction had started.
    """

    num: int
    outside: int
    order: list[int] = field(default_factory=list)
    gradients: int = 0
    before: list[int] = field(default_factory=list)
    inside: int = 0
    late: int = 0

    @property
    def early(self) -> int:
        """Groups that started before the step's last gradient."""
        return sum(before < self.gradients for before in self.before)

    def reduced_once(self) -> bool:
        return sorted(self.order) == list(range(self.num))


class Watch:
    """Watches the bucket groups of a rank's model chunks, step by step; for a process of its own.

    Groups are numbered chunk by chunk, those of experts after the others.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self.steps: list[Watched] = []
        self._num = self._outside = 0
        for chunk in chunks:
            embedding = {one for name, one in chunk.named_parameters() if "embedding" in name}
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                self._watch(self._num, group)
                self._outside += not embedding.isdisjoint(group.params)
                self._num += 1
        rest = Reductions.start_rest

        def start_rest(reductions: Reductions) -> None:
            self.steps[-1].inside = len(self.steps[-1].order)
            rest(reductions)

        Reductions.start_rest = start_rest  # type: ignore[method-assign]

    def begin(self) -> None:
        self.steps.append(Watched(self._num, self._outside))

    def _watch(self, number: int, group: Any) -> None:
        start = group.start_grad_sync

        def counted(*args: Any, **kwargs: Any) -> Any:
            step = self.steps[-1]
            if group.grad_reduce_handle is None:  # else Megatron waits for what has started
                step.order.append(number)
                step.before.append(step.gradients)
            return start(*args, **kwargs)

        def arrived(_: torch.Tensor) -> None:
            self.steps[-1].gradients += 1
            self.steps[-1].late += number in self.steps[-1].order

        group.start_grad_sync = counted
        for parameter in group.params:
            parameter.register_post_accumulate_grad_hook(arrived)
