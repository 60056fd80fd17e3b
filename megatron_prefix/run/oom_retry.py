"""Device memory of one schedule: which policies a step runs with, and what if it does not fit.

When memory runs out in the middle of a step, the step is undone and made once more with every inner
segment recomputed.  That takes a rank that nobody waits for: alone in its pipeline, its tensor-,
context- and expert-parallel groups.  Where others wait for it in a collective it cannot go back
alone, and to ask them first would cost every step a collective; then the step ends with an error,
and so do the other ranks, which lose a neighbour.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import StepOutOfMemory, UserError
from megatron_prefix.megatron.features import offload_refusal
from megatron_prefix.megatron.mixers import pattern_of, recomputes
from megatron_prefix.moe import versions
from megatron_prefix.moe.versions import has_global_loss
from megatron_prefix.offload import rates
from megatron_prefix.offload.segment import Offloader
from megatron_prefix.offload.transfers import free_bytes, transfers_of
from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.plan.footprint import Footprint
from megatron_prefix.plan.joint_forest import JointForest
from megatron_prefix.plan.memory_policy import Rates, automatic, leaner
from megatron_prefix.plan.peak_memory import RankMemory, predict, table
from megatron_prefix.run import expert_sync
from megatron_prefix.tree import Place, Segment, Span

STEPS_ASKED, STEPS_BETWEEN = 3, 50
"""Training steps, first of all and later on, in which all ranks say how much memory is free. The
optimizer's state is there from the second one on; other things may come later."""

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class MemoryControl:
    """Device memory of one schedule.

    Args:
        config: what the user set.

    Attributes:
        gathers: whether every context-parallel rank keeps K/V of all, in the step that runs.
    """

    def __init__(self, config: PrefixConfig) -> None:
        self._config, self.gathers = config, False
        self._offloader: Offloader | None = None
        self._free: list[float] = []
        self._settled = 0
        self._before: Rewind | None = None

    def begin(self, models: list[Any], groups: ProcessGroupCollection, forward_only: bool) -> None:
        """Notes how a step begins, where it could be made again; before the host plans, so that
        the device looks at the gradients meanwhile."""
        companions = _companions(groups, get_model_config(models[0]))
        alone = all(group.size() == 1 for group in companions)
        leaner_left = not forward_only and self._config.memory != "recompute"
        self._before = Rewind(models) if alone and leaner_left else None

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A step, after which nothing that `begin` noted is left."""
        try:
            yield
        finally:
            self._before = None

    def settle(
        self,
        plan: Plan,
        joint: JointForest,
        models: list[Any],
        groups: ProcessGroupCollection,
        forward_only: bool,
    ) -> None:
        """Decides where K/V are with context parallelism, alike on all ranks that make this step
        together: those of `groups`' pipeline and those that share experts; all of them call this.

        What is free is asked in a few training steps only, as to ask means to wait for the device;
        until one has been made, every rank keeps its own K/V.

        Args:
            plan: of the step, before `chosen`.
            joint: its segments among those of ranks that share experts.
            models: the rank's model chunks.
            groups: process groups.
            forward_only: whether the step has no gradients.
        """
        several, wanted = groups.cp.size() > 1, self._config.cp_reduce
        self.gathers = several and wanted == "segment"
        if not several or wanted != "auto":
            return
        if not forward_only:
            if self._settled < STEPS_ASKED or self._settled % STEPS_BETWEEN == 0:
                self._free = [*self._free, self._least_of(_together(groups), models)][-STEPS_ASKED:]
            self._settled += 1
        if self._free:
            longest = replace(plan, segments=_longest(joint))
            peaks = predict(longest, self.footprint(models, gathers=True))
            self.gathers = max(one.peak for one in peaks) <= min(self._free)

    def chosen(
        self, plan: Plan, joint: JointForest, models: list[Any], groups: ProcessGroupCollection
    ) -> Plan:
        """The plan with policies that fit, by memory "auto"; all ranks of `groups` call this.

        Args:
            plan: of the step.
            joint: its segments among those of ranks that share experts.
            models: the rank's model chunks.
            groups: process groups.
        """
        config, device = get_model_config(models[0]), device_of(models)
        found = rates.measured(device, config.params_dtype)
        numbers = _least(
            [free_bytes(device, self._config.memory_budget), found.flops, found.link],
            _companions(groups, config), device,
        )  # fmt: skip
        free, flops, link = map(_rounded, numbers)
        policies = automatic(
            replace(plan, segments=_longest(joint)), self.footprint(models, self.gathers),
            cost_of(models[0]), Rates(flops, link), free,
            not any(map(offload_refusal, models)),
        )  # fmt: skip
        return replace(plan, policies=policies)

    def footprint(self, models: list[Any], gathers: bool | None = None) -> Footprint:
        """Bytes per row of the model on this rank.

        `gathers`: whether it keeps K/V of all context-parallel ranks; None, before that is known:
        only where the user says so.
        """
        if gathers is None:
            gathers = self._config.cp_reduce == "segment"
        return Footprint.of_config(
            get_model_config(models[0]),
            vocab_size_of(models[0]),
            gathers,
            self._config.cache_host_layers,
            pattern_of(_language_model(models[0])),
            recomputes(_language_model(models[0])),
        )

    def least_free(self, models: list[Any], groups: ProcessGroupCollection) -> float:
        """Free bytes of the rank with the least; all ranks of `groups` call this, and agree."""
        return self._least_of(_companions(groups, get_model_config(models[0])), models)

    def _least_of(self, groups: Sequence[Any], models: list[Any]) -> float:
        device = device_of(models)
        free = [float(free_bytes(device, self._config.memory_budget))]
        return _rounded(_least(free, groups, device)[0])

    def fits(self, plan: Plan, models: list[Any], free: float) -> bool:
        """Whether a plan is predicted to fit in so many bytes on every rank.

        With memory "auto" inner segments may be recomputed.
        """
        lean = leaner(plan) if self._config.memory == "auto" else None
        return max(one.peak for one in predict(lean or plan, self.footprint(models))) <= free

    def predicted(self, plan: Plan, models: list[Any], rank: int) -> RankMemory:
        """What one rank of the pipeline is predicted to hold."""
        return predict(plan, self.footprint(models, self.gathers))[rank]

    def offloader(
        self, plan: Plan, models: list[Any], rank: int, forward_only: bool
    ) -> Offloader | None:
        """What takes tensors to the host in a step that begins; None where all stay.

        Raises:
            UserError: the model cannot run with "offload".
        """
        offloads = "offload" in plan.policies and not forward_only
        if not (offloads or self._config.cache_host_layers):
            return None
        refused = [refusal for refusal in map(offload_refusal, models) if refusal]
        if offloads and refused:
            raise UserError(refused[0])
        if self._offloader is None:
            transfers = transfers_of(device_of(models), self._config.memory_budget)
            self._offloader = Offloader(transfers)
        predicted = self.predicted(plan, models, rank)
        staged = predicted.staged if offloads else 0.0
        self._offloader.begin_step(predicted.peak, staged + predicted.cache_staged)
        return self._offloader

    def run(
        self,
        attempt: Callable[[Plan], Result],
        plan: Plan,
        models: list[Any],
        groups: ProcessGroupCollection,
        forward_only: bool,
        final: Callable[[], str] = str,
    ) -> tuple[Result, Plan]:
        """Makes a step; where memory runs out, undoes it and makes it once more with a leaner plan.

        Args:
            attempt: runs a plan, and leaves nothing behind when it fails.
            plan: of the step.
            models: the rank's model chunks.
            groups: process groups.
            forward_only: whether the step has no gradients.
            final: asked when memory has run out; why the step cannot be made again, else empty.

        Returns:
            What `attempt` returned, and the plan that it ran.

        Raises:
            StepOutOfMemory: the step does not fit.
        """
        companions = _companions(groups, get_model_config(models[0]))
        alone = all(group.size() == 1 for group in companions)
        lean = leaner(plan) if alone and not forward_only else None
        before, self._before = self._before, None
        if before is not None:
            before.looked()
        try:
            return attempt(plan), plan
        except torch.OutOfMemoryError as error:
            reason = _first_sentence(error)
        # The frames of the failed step, and all tensors in them, are gone by now.
        free_memory()
        if lean is None or before is None:
            why = "nothing leaner is left" if alone else "other ranks wait in this step"
            raise self._failure(f"{reason}; not tried again: {why}", plan, models)
        if why := final():
            raise self._failure(f"{reason}; not tried again: {why}", plan, models)
        if not before.possible():
            why = "gradients were not zero when the step began"
            raise self._failure(f"{reason}; not tried again: {why}", plan, models)
        before.undo()
        logger.warning("%s: the step is made again, every inner segment recomputed", reason)
        try:
            return attempt(lean), lean
        except torch.OutOfMemoryError as error:
            reason = _first_sentence(error)
        free_memory()
        raise self._failure(f"{reason}; with all inner segments recomputed, too", lean, models)

    def _failure(self, reason: str, plan: Plan, models: list[Any]) -> StepOutOfMemory:
        rows = table(plan, predict(plan, self.footprint(models, self.gathers)))
        keeps = "cp_reduce 'wave', " if self.gathers else ""
        logger.error("predicted besides weights and gradients, GiB:\n%s", rows)
        return StepOutOfMemory(
            f"{reason}. Give {keeps}fewer segment_tokens, chunk_tokens, Megatron's"
            f" recompute_granularity, or more ranks\n{rows}"
        )


class Rewind:
    """What a call changes besides the weights, as it was; the host does not wait for the device.

    Gradients are not copied: a call can be repeated where they were zero when it began, as they are
    after the `zero_grad_buffer` of the usual training loop; then they are zeroed again.  Of the
    rest there is little: buffers of modules (the experts' token counts) and Megatron's log of
    auxiliary losses.  Random numbers are drawn by losses only, which run once in any case.

    Args:
        models: the rank's model chunks, wrapped or not.
    """

    def __init__(self, models: Sequence[Any]) -> None:
        self._models = models
        modules = list(_modules(models))
        self._parameters = [
            p for module in modules for p in module._parameters.values() if p is not None
        ]
        self._copies = _copies(
            [buffer for module in modules for buffer in module._buffers.values()]
        )
        self._losses = {name: values.clone() for name, values in versions.logged_losses().items()}
        self._has_gradients = any(parameter.grad is not None for parameter in self._parameters)
        # Looked at only when memory has run out; until then it is one pass over the gradients,
        # beside what the host sends to the device while it plans.
        device = device_of(list(models))
        self._side = _side_stream(device) if device.type == "cuda" else None
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._side):
            self._is_dirty = [total.any() for total in self._totals()]

    def looked(self) -> None:
        """From here on the device may change gradients: it has looked at them before."""
        if self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)

    def possible(self) -> bool:
        """Whether gradients were zero; waits for the device."""
        return not (self._has_gradients or any(map(bool, self._is_dirty)))

    @torch.no_grad()
    def undo(self) -> None:
        """Makes everything as it was.

        Raises:
            RuntimeError: gradients were not zero.
        """
        if not self.possible():
            raise RuntimeError("gradients were not zero when the step began")
        for total in self._totals():
            total.zero_()
        for parameter in self._parameters:
            parameter.grad = None
            if hasattr(parameter, "grad_added_to_main_grad"):
                parameter.grad_added_to_main_grad = False
        for buffer, copy in self._copies:
            buffer.copy_(copy)
        for name, values in versions.logged_losses().items():
            if name in self._losses:
                values.copy_(self._losses[name])
            else:
                values.zero_()

    def _totals(self) -> list[Tensor]:
        """Buffers in which DDP adds gradients up."""
        return [
            buffer.grad_data
            for model in self._models
            for name in ("buffers", "expert_parallel_buffers")
            for buffer in (getattr(model, name, None) if hasattr(model, "ddp_config") else None)
            or ()
        ]


def _modules(models: Sequence[Any]) -> Iterator[Any]:
    """Every module of the models, once. `Module.modules()` makes names, which takes ten times as
    long: milliseconds before every step."""
    left, seen = list(models), set()
    while left:
        module = left.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            left += [one for one in module._modules.values() if one is not None]


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _copies(buffers: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
    return [(buffer, buffer.clone()) for buffer in buffers if buffer is not None]


def free_memory() -> None:
    """Returns what is no longer used to the device; models and their hooks refer to one another."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _companions(groups: ProcessGroupCollection, config: Any) -> list[Any]:
    """Groups whose ranks wait for one another in the middle of a step."""
    return [*_together(groups), *([groups.dp_cp] if has_global_loss(config) else [])]


def _together(groups: ProcessGroupCollection) -> list[Any]:
    """Groups whose ranks take the same schedule in every step."""
    found = [groups.tp, groups.cp, groups.pp, expert_sync.expert_group(groups)]
    return [group for group in found if group is not None]


def _least(numbers: list[float], groups: Sequence[Any], device: torch.device) -> list[float]:
    """The smallest of each number over ranks that meet; every rank of the groups calls this."""
    groups = [group for group in groups if group.size() > 1]
    if not groups:
        return numbers
    values = torch.tensor(numbers, dtype=torch.float64, device=device)
    for group in groups:  # of a grid: after the last one it is the smallest of all of them
        dist.all_reduce(values, dist.ReduceOp.MIN, group=group)
    return values.tolist()


def _rounded(number: float) -> float:
    """Down to six binary digits, so that choices do not change with every byte."""
    if number <= 0:
        return 0.0
    mantissa, exponent = math.frexp(number)
    return math.ldexp(math.floor(mantissa * 64) / 64, exponent)


def _longest(joint: JointForest) -> tuple[Segment, ...]:
    """As long as on the rank that has most rows, place by place, in as many spans as on the rank
    that has most, all of them below the last parent."""
    if len(joint.lengths[0]) == 1:
        return joint.forest.segments
    found, align = [], max(1, joint.forest.multiple)
    places = zip(joint.union.segments, joint.lengths, joint.spans, strict=True)
    for segment, lengths, most in places:
        num, parents = max(lengths), segment.parents
        parent = Place(parents[-1], 0) if parents else None
        others = max(0, min(most, num // align) - 1)  # a span is not shorter than the alignment
        spans = tuple(
            Span(0, length, length, segment.spans[0].rollouts, parent)
            for length in (num - others * align, *[align] * others)
        )
        trained = min(num, segment.num_read)
        found.append(segment._replace(spans=spans, trained=trained))
    return tuple(found)


def _language_model(model: Any) -> Any:
    return get_attr_wrapped_model(model, "decoder", return_model_obj=True)


def vocab_size_of(model: Any) -> int:
    """The model's vocabulary, which every pipeline stage knows; 0 where it does not say."""
    return getattr(_language_model(model), "vocab_size", 0)


def cost_of(model: Any) -> CostModel:
    """FLOPs of the whole model that a chunk belongs to; the same on every rank."""
    pattern = pattern_of(_language_model(model))
    return CostModel.of_config(get_model_config(model), vocab_size_of(model), pattern)


def device_of(models: list[Any]) -> torch.device:
    """Where a rank's model chunks are."""
    return next(models[0].parameters()).device


def _first_sentence(error: BaseException) -> str:
    return "out of device memory: " + str(error).partition(". ")[0]
