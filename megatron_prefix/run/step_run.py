"""One step of the prefix schedule on one rank: what an attempt needs, and what follows it.

Every backward of the step runs without synchronisation, since no single one of them is "the last
microbatch" that Megatron's overlapped reduction waits for: the last one is an inner segment's and
touches no output layer.  Where Megatron would have started reductions from a backward hook
(megatron/core/distributed/param_and_grad_buffer.py), they are started by hand, by a part of the
step (parts.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import (
    clear_embedding_activation_buffer,
    finish_embedding_wgrad_compute,
)
from torch import Tensor

from megatron_prefix.device.memory import free_bytes
from megatron_prefix.errors import named, refused
from megatron_prefix.megatron.install import Hooks, install, installed
from megatron_prefix.parts import Attempt, around
from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.joint_forest import JointForest
from megatron_prefix.refusals.own_errors import as_refusal, softened
from megatron_prefix.refusals.table import CHANGED_OUTPUT, NO_COPY
from megatron_prefix.run import agreement
from megatron_prefix.run.calls import FILLED_BY_MODEL, ModelCall
from megatron_prefix.run.execute.auxiliary import AuxiliaryScales, set_auxiliary_scales
from megatron_prefix.run.execute.call_outputs import AnswerForm
from megatron_prefix.run.execute.executor import Executor, Stage
from megatron_prefix.run.execute.inputs import SegmentInputs
from megatron_prefix.run.execute.losses import LossContract, Losses
from megatron_prefix.run.execute.messages import (
    Links,
    channels_of,
    closing_on_failure,
    message_dtype,
    message_shape,
)
from megatron_prefix.run.execute.rewind import Rewind
from megatron_prefix.run.parts_of_call import needed_by
from megatron_prefix.run.rank import Rank
from megatron_prefix.run.read import heads
from megatron_prefix.run.read.forward_step_state import Settings
from megatron_prefix.run.read.random_numbers import SegmentRandomUse
from megatron_prefix.run.read.step import Step
from megatron_prefix.run.read.suspend import Capture, SuspendedStep
from megatron_prefix.run.request import Request
from megatron_prefix.sidecar.cache import SidecarCache
from megatron_prefix.sidecar.row_exchange import RowExchange
from megatron_prefix.tree.payload_map import payload_map

logger = logging.getLogger(__name__)


class StepUndone(Exception):
    """A step that has begun, and that is as if it had not.

    Attributes:
        reason: what was in the way; of another rank's error what that says.
    """

    def __init__(self, reason: Exception, *, has_run: bool) -> None:
        super().__init__(str(reason))
        self.reason, self.has_run = reason, has_run


class StepRun:
    """Runs the segments of a step, and lets the trainer's forward steps go on.

    What shows meanwhile that the step cannot be shared is a `_problem`. Other ranks may wait for
    this one in any segment, so all of them run to the plan's end, and ask one another there.

    Args:
        schedule: whose step it is; its `report` has the plan and is completed here.
        idle: ends with the first action: until then the device has nothing to do.
    """

    def __init__(
        self,
        schedule: Any,
        capture: Capture,
        request: Request,
        step: Step,
        joint: JointForest,
        idle: contextlib.ExitStack,
    ) -> None:
        self._idle = idle
        self._schedule, self._capture, self._joint = schedule, capture, joint
        self._request, rank, arguments = request, request.rank, request.arguments
        self._rank, self._parts = rank, request.parts
        self._force_all_reduce = arguments["force_all_reduce"]
        collects = arguments["collect_non_loss_data"]
        scales = None
        if rank.scales_auxiliary_losses:
            scales = AuxiliaryScales(step.num_microbatches, rank)
        self._contract = LossContract(rank.config, rank.groups.cp.size(), collects, scales)
        # With the segments that run side by side with those of other pipelines.
        self._step = dataclasses.replace(step, forest=joint.forest)
        self._config, self._memory = schedule.config, schedule.memory
        self._report = schedule.report
        self._losses: Losses | None = None
        self._first: Executor | None = None
        self._random_use: SegmentRandomUse | None = None
        self._problem: Exception | None = None

    def run(self) -> list[Any]:
        """Runs the step; returns Megatron's `forward_data_store`.

        Raises:
            StepUndone: it cannot be shared, and is undone: of all ranks that run it together.
        """
        report, rank = self._report, self._rank
        on_gpu, reserved = rank.device.type == "cuda", 0
        if on_gpu:
            reserved = torch.cuda.memory_reserved(rank.device)
            report.base_bytes = torch.cuda.memory_allocated(rank.device) - _part_bytes(rank)
            report.room_bytes = free_bytes(rank.device, self._config.memory_budget)
        with contextlib.ExitStack() as stack:
            _, problem = agreement.tried(functools.partial(self._ready, stack))
            problem = self._agreed(problem)
            has_run = problem is None
            if has_run:
                problem = self._ran()
                for part in self._parts:
                    part.behind()
                problem = problem or self._agreed(self._found())
                self._complete(problem)
        if problem is not None:
            self._undo()
            raise StepUndone(problem, has_run=has_run)
        if on_gpu and not rank.forward_only:
            self._memory.give_back(report.base_bytes, reserved, rank.device)
        return self._losses.forward_data_store if self._losses is not None else []

    def _ready(self, stack: contextlib.ExitStack) -> None:
        """Makes what runs the plan, and enters all that is around it; nothing has run."""
        report, rank = self._report, self._rank
        self._memory.settle(report.plan, self._joint, self._request)
        if self._config.mode == "auto" and self._memory.before is not None:
            self._keep(self._memory.before)
        if rank.config.timers is not None:
            stack.enter_context(_timed(rank.config))
        if rank.num_stages > 1:
            stack.enter_context(closing_on_failure(rank.groups.pp))
        for part in self._parts:
            stack.enter_context(part.around_step(self._step))
        if report.plan.num_stages > 1:
            self._resume_other_stages()
        if not rank.forward_only:
            more = needed_by(report.plan, self._config, self._request, self._parts)
            self._parts = (*self._parts, *more)
        self._first = self._executor(report.plan)

    def _keep(self, before: Rewind) -> None:
        try:
            before.keep()
        except (RuntimeError, MemoryError) as error:
            raise refused(NO_COPY, named(error)) from None

    def _ran(self) -> Exception | None:
        """Runs the plan, or a leaner one if memory runs out; what fails on a rank that no other
        waits for, and is not the trainer's, is returned."""
        report, rank = self._report, self._rank
        try:
            embedding, plan = self._memory.run(
                self._attempt, report.plan, self._request, self._why_final,
                is_alone=not rank.waits_for(crosses=self._step.crosses),
            )  # fmt: skip
        except Exception as error:
            inside = self._losses is not None and self._losses.is_inside
            if self._config.mode == "on" or self._together or inside:
                raise
            return as_refusal(error)
        report.retried, report.plan = plan is not report.plan, plan
        if not rank.forward_only:
            finish_embedding_wgrad_compute(rank.config, embedding, rank.is_last, rank.groups.tp)
        return None

    def _found(self) -> Exception | None:
        of_parts = next((part.problem for part in self._parts if part.problem), None)
        of_losses = self._losses.problem() if self._losses is not None else None
        of_model = self._random_use.problem if self._random_use is not None else None
        return self._problem or of_parts or of_model or of_losses or None

    @property
    def _together(self) -> list[Any]:
        return self._rank.together(crosses=self._step.crosses)

    def _agreed(self, problem: Exception | None) -> Exception | None:
        return agreement.agree(
            softened(problem, self._config.mode), self._together, self._rank.device
        )

    def _complete(self, problem: Exception | None) -> None:
        """What follows the plan's last action; with a problem gradients are finalized only where
        some have left this rank."""
        report, rank = self._report, self._rank
        is_final = any(part.why_final for part in self._parts)
        if not rank.forward_only and (problem is None or is_final):
            num_tokens = self._losses.num_tokens if self._losses is not None else 0
            _finalize(rank, num_tokens, self._force_all_reduce)
        if problem is None:
            for part in self._parts:
                part.finished()
            report.memory = self._memory.predicted(report.plan, self._request)

    def _undo(self) -> None:
        if self._first is not None:  # it has not run
            self._first.end()
        if self._random_use is not None:
            self._random_use.undo()
        before = self._memory.before
        if before is not None and before.possible():
            before.undo()
        elif before is not None:
            logger.error("gradients were not zero when the step began: they cannot be restored")

    def _why_final(self) -> str:
        for part in self._parts:
            if part.why_final:
                return part.why_final
        if self._losses is not None and not self._losses.repeatable:
            return "it was in the trainer's loss, or the loss looks at logits"
        return ""

    def _resume_other_stages(self) -> None:
        """Lets forward steps of chunks without losses go on: their loss function is not called.

        The stock schedule sends what such a forward step returns to the next stage.  Segments are
        sent by the executor, so the answer is made of zeros and only has to come back as it is.
        """
        for chunk, steps in enumerate(self._capture.steps):
            if self._report.plan.stage(self._rank.stage, chunk) == self._report.plan.num_stages - 1:
                continue
            config = self._rank.language_models[chunk].config
            for microbatch, suspended in enumerate(steps):
                hidden = self._zeros(config, microbatch)
                output, _ = suspended.resume(lambda: hidden)  # noqa: B023  # called at once
                self._problem = self._problem or suspended.twice
                if self._problem is None and (output is not hidden or hidden._version):
                    self._problem = refused(CHANGED_OUTPUT)
                if self._rank.model.has_experts or self._rank.model.looks_ahead:
                    set_auxiliary_scales(self._contract, self._rank.models[chunk], len(steps))
                if self._contract.scales is not None:
                    self._contract.scales.note(microbatch)

    def _zeros(self, config: Any, microbatch: int) -> Tensor:
        forest, groups = self._step.forest, self._rank.groups
        owners = self._step.microbatch_of
        lengths = [
            forest.num_positions[sample] for sample, m in enumerate(owners) if m == microbatch
        ]
        parts = groups.cp.size() * self._rank.model.sequence_ranks
        packed = self._step.packed[microbatch]
        num, batch = (sum(lengths), 1) if packed else (lengths[0], len(lengths))
        shape = num // parts, batch, config.hidden_size
        return torch.zeros(shape, dtype=message_dtype(config), device=self._rank.device)

    def _executor(self, plan: Plan) -> Executor:
        rank = self._rank
        for part in self._parts:
            part.prepare(plan, functools.partial(self._memory.predicted, plan, self._request))
        cp = rank.groups.cp
        inputs = SegmentInputs(
            self._step.forest, self._step.samples, rank.device, cp.rank(), cp.size(),
            rank.model.rows,
        )  # fmt: skip
        stages = self._stages(plan)
        attempt = Attempt(
            self._step, self._joint, plan, stages, self._contract, self._parts,
            self._force_all_reduce, self._report, self._memory.gathers,
        )  # fmt: skip
        try:
            for part in self._parts:
                part.begin(attempt)
        except BaseException:
            for part in self._parts:
                part.end()
            raise
        self._random_use = SegmentRandomUse(rank.language_models, rank.device)
        return Executor(
            plan, stages, inputs, rank.forward_only, self._idle,
            self._random_use.checking, self._parts,
        )  # fmt: skip

    def _attempt(self, plan: Plan) -> Any:
        executor, self._first = self._first or self._executor(plan), None
        rank, report, stages = self._rank, self._report, executor.stages
        use = self._random_use
        watching = contextlib.nullcontext() if use is None else use.watching()
        embedding = clear_embedding_activation_buffer(rank.config, rank.models, stages[-1].is_last)
        with contextlib.nullcontext() if rank.forward_only else _no_sync(rank), watching:
            links = Links(
                channels_of(rank.groups.pp, rank.device), report.union_plan,
                message_shape(rank, plan), message_dtype(rank.config), rank.device,
                not rank.forward_only, self._parts,
                tuple((each.segment, each.depth) for each in self._step.forest.exchanges),
            )  # fmt: skip
            executor.run(rank.stage, links)
            parts = () if rank.forward_only else self._parts
            backwards = [*itertools.chain(*(part.input_backwards() for part in parts))]
            if backwards:
                with around(self._parts, None):
                    for backward in backwards:
                        backward()
        report.cache_bytes = sum(stage.cache.device_bytes.peak for stage in stages)
        return embedding

    def _stages(self, plan: Plan) -> list[Stage]:
        cp = self._rank.groups.cp
        exchange = RowExchange(cp) if cp.size() > 1 else None
        stages = []
        for chunk, model in enumerate(self._rank.models):
            hooks, number = install(model, self._config.kernel), plan.stage(self._rank.stage, chunk)
            if not self._rank.forward_only:  # it may be another schedule's than what parts keep
                hooks.keep_only({type(part) for part in self._parts})
            steps, hooks.predicts_further = self._capture.steps[chunk], self._rank.predicts_further
            hooks.packed = all(self._step.packed)
            call = steps[0].call if steps else ModelCall(0, {})
            has_labels, is_last = call["labels"] is not None, number == plan.num_stages - 1
            stage = Stage(
                model, hooks, self._cache(plan, chunk, hooks, exchange),
                number == 0, is_last, steps[0].called if steps else Settings.now(), has_labels,
                call.others, chunk,
            )  # fmt: skip
            if stage.others:
                stage.moves_labels = heads.moves_labels(stage.others)
                if heads.fills(stage.others):
                    stage.filled = heads.FilledDict(stage.others[FILLED_BY_MODEL])
            if stage.is_last:
                self._end_with_losses(stage, steps, exchange)
            stages.append(stage)
        return stages

    def _end_with_losses(
        self, stage: Stage, steps: list[SuspendedStep], exchange: RowExchange | None
    ) -> None:
        rank, step = self._rank, self._step
        if self._losses is not None:  # memory ran out in an attempt before
            self._losses.begin_again()
        else:
            sequence = RowExchange(rank.groups.tp) if rank.model.sequence_ranks > 1 else None
            form = AnswerForm(exchange, sequence, int(stage.moves_labels), stage.filled)
            self._losses = Losses(step, self._contract, stage.model, steps, form)
        stage.losses = self._losses

    def _cache(
        self, plan: Plan, chunk: int, hooks: Hooks, exchange: RowExchange | None
    ) -> SidecarCache:
        actions, parts = plan.actions_of(self._rank.stage, chunk), self._rank.groups.cp.size()
        shares, forms = 1 if self._memory.gathers else parts, hooks.forms
        planned = payload_map(plan.segments, actions, parts, shares, forms)
        every = (part.arenas(planned, forms, exchange) for part in self._parts)
        return SidecarCache(planned, forms, next(filter(None, every), None), exchange)


@contextlib.contextmanager
def _no_sync(rank: Rank) -> Iterator[None]:
    """No gradient leaves the rank inside; the trainer's own `no_sync_func` where it set one."""
    own = rank.config.no_sync_func
    contexts = own if isinstance(own, list) else [own] if own is not None else None
    if contexts is None:
        contexts = [model.no_sync for model in rank.models if hasattr(model, "no_sync")]
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


def _finalize(rank: Rank, num_tokens: int | Tensor, force_all_reduce: bool | None) -> None:
    """Megatron's finalize, which ends the reductions.

    Args:
        num_tokens: trained tokens of the step on this rank (last stage; 0 elsewhere).
        force_all_reduce: see Megatron's schedules.
    """
    config = rank.config
    if config.finalize_model_grads_func is not None:
        total = torch.zeros([], dtype=torch.int, device=rank.device) + num_tokens
        config.finalize_model_grads_func(
            rank.models,
            total if config.calculate_per_token_loss else None,
            pg_collection=rank.groups,
            force_all_reduce=force_all_reduce,
        )


@contextlib.contextmanager
def _timed(config: Any) -> Iterator[None]:
    timers = config.timers
    timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    try:
        yield
    finally:
        timers("forward-backward").stop()


def _part_bytes(rank: Rank) -> int:
    """Bytes that parts of steps keep on the device with the models."""
    hooks = filter(None, map(installed, rank.models))
    return sum(kept_by_part.device_bytes for hook in hooks for kept_by_part in hook.kept.values())
