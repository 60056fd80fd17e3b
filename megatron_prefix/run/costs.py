"""What a plan is judged by: the seconds and the bytes that a model's work takes in one layout."""

from __future__ import annotations

from typing import Any

from megatron_prefix.device import memory
from megatron_prefix.plan.cost import FLOPS_PER_SECOND, CostModel
from megatron_prefix.plan.memory import Footprint
from megatron_prefix.plan.sizes import StageBytes, StagesBytes
from megatron_prefix.run.agreement import first_says
from megatron_prefix.run.rank import Rank, layer_ranks


def guessed(rank: Rank, frozen: float = 0.0) -> CostModel:
    """What work of a rank takes, until actions have been measured; see `CostModel.in_seconds`."""
    rate = FLOPS_PER_SECOND.get(rank.device.type, FLOPS_PER_SECOND["cuda"])
    return rank.model.cost.in_seconds(
        rate * layer_ranks(rank.groups), rank.config.num_layers, rank.num_stages,
        len(rank.models), frozen,
    )  # fmt: skip


def judging_alike(rank: Rank) -> list[Any]:
    """Groups whose ranks have the same costs."""
    alike = list(rank.companions)
    if rank.experts is not None and rank.data_ranks is None:
        alike.append(rank.experts)
    return alike


class Costs:
    """What work of one model takes in one layout: guesses, and what was measured in their place.

    Ranks that must decide alike have the same numbers.

    Attributes:
        times: in seconds.
        num_bytes: of a position; none while nothing was measured.
        overheads: bytes reserved of the device for an allocated one, by schedule; 0: not known.
        counts: whether the device's allocator counts.
    """

    times: CostModel

    def __init__(self, rank: Rank) -> None:
        self._is_guessed = self._is_agreed = False
        self.counts = memory.counts_bytes(rank.device)
        self.num_bytes: StagesBytes = {False: {}, True: {}}
        self.overheads = {False: 0.0, True: 0.0}

    def begin(self, rank: Rank) -> None:
        """All ranks that make a call together come here. Stages have one guess, whatever each of
        them has of frozen weights. Data-parallel ranks need not call without gradients equally
        often: they ask together in the first step with gradients."""
        if not self._is_guessed:
            self._is_guessed = True
            stages = [rank.groups.pp] if rank.num_stages > 1 else []
            self.times = first_says(guessed(rank, rank.frozen_share), stages)
        if not (self._is_agreed or rank.forward_only):
            self._is_agreed = True
            self.times = first_says(self.times, judging_alike(rank))

    @property
    def is_known(self) -> bool:
        """Whether bytes were measured."""
        return any(self.num_bytes.values())

    @property
    def overhead(self) -> float:
        """What our steps reserve of the device for an allocated byte, over what Megatron's do; at
        least 1, until both are known as well."""
        stock, ours = self.overheads[False], self.overheads[True]
        return max(1.0, ours / stock) if stock and ours else 1.0

    def footprint(self, rank: Rank, *, gathers: bool, stock: bool = False) -> Footprint:
        """Bytes of a model on the ranks of a pipeline.

        Args:
            gathers: whether a rank keeps K/V of all context-parallel ranks.
            stock: of Megatron's schedule. While one schedule was never measured, its numbers are
                the other's.
        """
        numbers = {**self.num_bytes[stock], **self.num_bytes[not stock]}
        payloads = rank.payloads
        stages = tuple(numbers.get(stage, StageBytes()) for stage in range(len(payloads)))
        config, parts = rank.config, rank.groups.cp.size()
        size = config.params_dtype.itemsize
        return Footprint(
            stages, payloads, config.hidden_size / rank.model.sequence_ranks * size, rank.layers,
            parts, 1 if gathers else parts, rank.act,
            state=config.hidden_size * size, state_grad=config.hidden_size * max(4, size),
        )  # fmt: skip
