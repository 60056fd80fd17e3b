"""Megatron's forward-backward function, with the prefix schedule behind it.

`get_forward_backward_func()` replaces Megatron's function of that name; what it returns
has Megatron's keyword contract (megatron/core/pipeline_parallel/schedules.py) and its return value.

A call suspends the trainer's forward steps in their model calls, **reads** those
(read/read_calls.py, read/step.py), **plans** (planning.py), and **runs** the plan (step_run.py); or
it lets the forward steps go on with the stock schedule.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.utils import (
    _pytree as pytree,  # torch's own; torch.utils.pytree is not public before 2.9
)

from megatron_prefix import parts, trainers
from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import CannotShare, UserError, refused, unexpected
from megatron_prefix.features.across import step as across_step
from megatron_prefix.layers import fused_yarn
from megatron_prefix.layers.precision import is_untried
from megatron_prefix.megatron import features
from megatron_prefix.megatron.install import installed
from megatron_prefix.megatron.stock import stock_arguments, stock_schedule
from megatron_prefix.plan.actions import Action, Plan
from megatron_prefix.plan.gate import Decision
from megatron_prefix.plan.joint_forest import JointForest
from megatron_prefix.refusals.own_errors import as_refusal, is_own
from megatron_prefix.refusals.table import (
    DATA_EXCHANGE,
    FORWARD_GRAPH,
    FP8_UNTRIED,
    FUSED_YARN,
    HOST_LAYERS_CP,
    NOT_VERIFIED,
    OWN_ERROR,
    SCALES_INTERLEAVED,
)
from megatron_prefix.run.agreement import agree, agree_on, tried
from megatron_prefix.run.calls import Callbacks, ModelCall, Samples
from megatron_prefix.run.execute import ahead
from megatron_prefix.run.execute.losses import are_in_order
from megatron_prefix.run.execute.memory_control import MemoryControl
from megatron_prefix.run.execute.messages import channels_of
from megatron_prefix.run.first_step import FirstStep
from megatron_prefix.run.pause import Pause, Rest
from megatron_prefix.run.planning import Planning, uncollected
from megatron_prefix.run.rank import Rank, meeting
from megatron_prefix.run.read.kept_draws import KeptDraws, same_calls
from megatron_prefix.run.read.loss_variables import code_name
from megatron_prefix.run.read.outlines import Outlines
from megatron_prefix.run.read.read_calls import ReadCalls, read_calls
from megatron_prefix.run.read.step import Step, read_step, told
from megatron_prefix.run.read.suspend import Capture
from megatron_prefix.run.report import StepReport, tell_shared
from megatron_prefix.run.step_run import StepRun, StepUndone
from megatron_prefix.run.verify.both import run_both, tell_unverified, tell_verified
from megatron_prefix.run.watchdog import Watchdog, watched
from megatron_prefix.tree import Forest
from megatron_prefix.tree.cp_layout import Slices

logger = logging.getLogger(__name__)
WATCHED = "the first step of its kind is watched"
"""Why the stock schedule runs a step that nothing is in the way of."""
LOSSES_EXCHANGE = "losses exchange with other data-parallel ranks"
"""Why prompts do not cross these."""
NEW_FUNCTION = (
    "get_forward_backward_func got a new function with the same code: define it once, outside the"
    " step; each new one starts a new schedule, whose first step mode auto does not share"
)
_num_alike: collections.Counter[Any] = collections.Counter()
"""Schedules that were made of the same configuration and of functions with the same code."""


@dataclass
class StepKind:
    """What is known of calls of one kind: of one forward step, on the same models.

    Attributes:
        pause: when nobody looks at them; only in mode "auto".
        watched: whether the first of them has been watched, if that is wanted.
        told: whether the first of them that was shared has been told of.
        refusal: what was in its way; None: nothing.
        problem: what this rank has met while segments ran: the refusal, once all ranks have heard.
        ordered: whether losses have to be called in the trainer's order.
        num_verified: how many of them both schedules have run (`PrefixConfig.verify`).
    """

    pause: Pause | None
    watched: bool = False
    told: bool = False
    refusal: UserError | None = None
    problem: UserError | None = None
    ordered: bool = False
    num_verified: int = 0


@dataclass
class PrefixSchedule:
    """A forward-backward function; call it as Megatron's.

    Attributes:
        config: what the user set.
        callbacks: what the trainer says of its microbatches that its model calls do not say.
        report: what the last step did; None before the first.
        measures: times every action of the next steps (`report.stopwatch`), for a barrier per step.
        watch: runs around the computation of every action, instead of `measures`.
        looks_first: watches the first step of a kind (first_step.py), in modes "auto" and "observe"
            with the stock schedule; for trainers whose code is not known.
        memory: device memory of its steps.
        planning: plans that it knows, and times that it has measured.
        watchdog: says where a step stands that takes far too long.
    """

    config: PrefixConfig = field(default_factory=PrefixConfig)
    callbacks: Callbacks = field(default_factory=Callbacks)
    report: StepReport | None = None
    measures: bool = False
    watch: Callable[[Action], contextlib.AbstractContextManager] | None = None
    looks_first: bool = False
    memory: MemoryControl = field(init=False, repr=False)
    planning: Planning = field(init=False, repr=False)
    watchdog: Watchdog = field(init=False, repr=False)
    _rest: Rest = field(default_factory=Rest, init=False, repr=False)
    _logged: set[str] = field(default_factory=set, init=False, repr=False)
    _known_calls: dict[Any, UserError | None] = field(default_factory=dict, init=False, repr=False)
    _kinds: dict[Any, StepKind] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.memory = MemoryControl(self.config)
        self.planning = Planning(self.config, self.memory)
        minutes = 0.0 if self.config.mode == "off" else self.config.watchdog_minutes
        self.watchdog = Watchdog(60 * minutes)

    @watched
    def __call__(
        self,
        *,
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
        force_all_reduce: bool | None = False,
        **rest: Any,
    ) -> list[Any]:
        """Runs forward and backward of a step's microbatches; see Megatron's schedules.

        `seq_length`, `micro_batch_size`, `decoder_seq_length`, `first_val_step`,
        `adjust_tensor_shapes_fn` and `p2p_communicator` are taken for the stock schedule's sake;
        the prefix schedule knows its shapes from the plan.

        Returns:
            Megatron's `forward_data_store`, in the order of the microbatches.

        Raises:
            UserError: a feature or a model call that the schedule cannot run, in mode "on".
            StepFailed: another rank has failed.
        """
        arguments = dict(
            rest, forward_step_func=forward_step_func, collect_non_loss_data=collect_non_loss_data,
            num_microbatches=num_microbatches, force_all_reduce=force_all_reduce, model=model,
            forward_only=forward_only, data_iterator=data_iterator, pg_collection=pg_collection,
        )  # fmt: skip
        models = model if isinstance(model, list) else [model]
        if self.config.mode == "off":
            return stock_schedule()(**arguments)
        rank = self._made_rank(models, pg_collection, forward_only=forward_only)
        if rank is None:
            return stock_schedule()(**arguments)
        kind = self._kind(forward_step_func, rank)
        first = self._first(kind, forward_step_func, rank)
        if first is not None and not first.suspended:
            return self._watched(first, kind, arguments)
        if self._needs_no_look(kind):
            return stock_schedule()(**arguments)
        if kind.ordered:
            rank.may_cross, rank.why_alone = False, LOSSES_EXCHANGE
            across_step.tell_alone(rank.why_alone, rank, self._logged)
        store = self._verified(first, kind, rank, arguments)
        if first is not None:
            kind.watched, kind.refusal = True, copy.copy(first.error)
            first.check()  # else what was computed may be wrong
        return store

    def _made_rank(self, models: Sequence[Any], groups: Any, *, forward_only: bool) -> Rank | None:
        """What this rank is in a call; None, with `report` set, if steps cannot be shared.

        All ranks have the same options in every call, and so the same answer; but in the first call
        on a model they ask one another, and an error of one of them is remembered by all.
        """
        key = forward_only, *map(weakref.ref, models)
        if (known := self._known_calls.get(key)) is not None:
            self._refused(known)
            return None
        made, error = tried(lambda: self._rank(Rank(models, groups, forward_only=forward_only)))
        problem = self._softened(error)
        if key not in self._known_calls:
            device = next(models[0].parameters()).device
            problem = agree(problem, meeting(groups, forward_only=forward_only), device)
            own = problem is not None and problem.refusal == OWN_ERROR
            self._known_calls[key] = problem if own else None
        if problem is not None and not isinstance(problem, CannotShare):
            raise problem
        if problem is not None or made is None:
            self._refused(problem)  # type: ignore[arg-type]
            return None
        if self.config.mode != "observe" and made.num_stages > 1:
            # By all ranks of the job, whichever schedule each of them takes.
            channels_of(made.groups.pp, made.device)
        return made

    def _softened(self, problem: BaseException | None) -> BaseException | None:
        """An error of this package as a refusal; in mode "on" as it is."""
        if self.config.mode == "on" or not isinstance(problem, Exception):
            return problem
        return as_refusal(problem)

    def _kind(self, function: Any, rank: Rank) -> StepKind:
        """What is known of calls like this one."""
        key = rank.forward_only, code_name(function), *map(weakref.ref, rank.language_models)
        if key not in self._kinds:  # a reference to a model that has gone equals no other
            self._kinds[key] = StepKind(Pause() if self.config.mode == "auto" else None)
        return self._kinds[key]

    def _needs_no_look(self, kind: StepKind) -> bool:
        """Whether steps of a kind are the stock schedule's for now, refused or in a pause."""
        if kind.refusal is not None:
            self._refused(copy.copy(kind.refusal))
            return True
        decision = None if kind.pause is None else kind.pause.next()
        if decision is not None:
            self._stock_report(decision)
        return decision is not None

    def _first(self, kind: StepKind, function: Any, rank: Rank) -> FirstStep | None:
        """What watches the first step of a kind; None in later ones.

        In mode "on" it is shared meanwhile, but for ranks that share experts or prompts: those
        would wait for ever for ranks that exchange in a loss.
        """
        if not self.looks_first or kind.watched:
            return None
        shares = self.config.mode == "on" and rank.experts is None and not rank.may_cross
        tells_loss = not self.callbacks.masks_tokens
        return FirstStep(function, rank, suspended=shares, masks_tell_loss=tells_loss)

    def _captured(
        self, first: FirstStep | None, kind: StepKind, rank: Rank, arguments: dict[str, Any]
    ) -> list[Any]:
        """Runs a step whose forward steps are suspended in their model calls.

        Args:
            first: watches them, in mode "on"; None if they are known.
            kind: of the call.
            rank: this one.
            arguments: of the call.
        """
        iterator, meter = arguments["data_iterator"], self.planning.meter(rank)
        decision = meter.begin(rank)
        if decision is not None:
            return self._timed(decision, rank, arguments)
        draws = None if self.config.mode == "on" else KeptDraws(iterator, rank.device)
        iterator = iterator if draws is None else draws.iterator
        iterator = iterator if first is None else first.iterator(iterator)
        capture = Capture(
            arguments["forward_step_func"], iterator, rank,
            arguments["num_microbatches"], self.callbacks.needs_drawn(rank.forward_only),
            None if first is None else first.forward_step,
        )  # fmt: skip
        with contextlib.ExitStack() as around, contextlib.ExitStack() as idle:
            around.enter_context(capture.running())
            around.enter_context(contextlib.nullcontext() if first is None else first.watching())
            around.enter_context(self.memory.step())
            idle.enter_context(uncollected())
            step = self._read(capture, rank, first, kind)
            joint = None if step is None else self._plan(step, rank, kind)
            with meter.step(self.report, rank):  # type: ignore[arg-type]
                if step is not None and joint is not None:
                    capture.forget_arguments()
                    measures = self.measures or meter.due
                    run = StepRun(self, capture, rank, step, joint, arguments, measures, idle)
                    try:
                        return run.run()
                    except StepUndone as undone:
                        self._undone(undone, kind)
                    # The frames of the attempt, and all tensors in them, are gone by now.
                    step = joint = run = None  # type: ignore[assignment]
                elif not capture.is_broken:
                    idle.close()
                    return stock_schedule()(**arguments | {"forward_step_func": capture.stock_step})
                idle.close()
                around.close()
                return self._again(draws, capture, rank, arguments)

    def _undone(self, undone: StepUndone, kind: StepKind) -> None:
        """Gives a step that was undone to the stock schedule, and its kind where segments had run;
        mode "on" raises."""
        if self.config.mode == "on":
            raise undone.reason
        reason = as_refusal(undone.reason)
        if undone.has_run:
            kind.problem, reason.lasts = reason, True
        if self.report is not None:
            self.report.retried = True  # its times say nothing
        self._refused(reason)

    def _again(
        self, draws: KeptDraws | None, capture: Capture, rank: Rank, arguments: dict[str, Any]
    ) -> list[Any]:
        """The stock schedule's step, from its begin."""
        if draws is None:
            raise RuntimeError("mode on has not raised what is in the way of a step")
        draws.rewind()
        calls: contextlib.AbstractContextManager = contextlib.nullcontext()
        if rank.is_first and capture.tokens:
            calls = same_calls(rank.models[0], capture.tokens)
        with calls:
            return stock_schedule()(**arguments | {"data_iterator": draws.iterator})

    def _verified(
        self, first: FirstStep | None, kind: StepKind, rank: Rank, arguments: dict[str, Any]
    ) -> list[Any]:
        """`_captured`; in the first steps of a kind, where that is set, the stock schedule's step,
        and the other one compared with it. A kind that fails is stock's."""
        run = functools.partial(self._captured, first, kind, rank)
        if self.config.mode == "observe" or kind.num_verified >= self.config.verify:
            return run(arguments)
        outcome = run_both(run, lambda: self.report, rank, arguments)
        if outcome.problem:
            kind.num_verified = self.config.verify
            tell_unverified(outcome.problem, rank)
        elif outcome.verification is not None:
            kind.num_verified += 1
            self.report.verification = outcome.verification  # type: ignore[union-attr]
            tell_verified(self.report, rank, kind.num_verified, self.config.verify)
            if outcome.verification.failure:
                self._disproved(kind, outcome.verification.failure)
        return outcome.store

    def _disproved(self, kind: StepKind, failure: str) -> None:
        """Gives a kind to the stock schedule, from whose step another was too far; `report` stays.

        Raises:
            CannotShare: in mode "on".
        """
        kind.refusal = refused(NOT_VERIFIED, failure)
        if self.config.mode == "on":
            raise kind.refusal
        report: StepReport = self.report  # type: ignore[assignment]
        report.decision = replace(
            report.decision, share=False, fallback=True, reason=str(kind.refusal)
        )
        self._report(report)

    def _timed(self, decision: Decision, rank: Rank, arguments: dict[str, Any]) -> list[Any]:
        """The stock schedule's step, timed, and nothing of it read before it has run."""
        report = self._stock_report(decision)
        outlines = Outlines(rank, self.callbacks.slices)

        def complete() -> None:
            step = outlines.step(arguments["num_microbatches"])
            if step is not None:
                report.prediction, report.stock_bytes = self.planning.of_stock(step, rank)

        with self.planning.meter(rank).step(report, rank, complete), outlines.noted():
            return stock_schedule()(**arguments)

    def _watched(self, first: FirstStep, kind: StepKind, arguments: dict[str, Any]) -> list[Any]:
        """The stock schedule's step, watched; what is in its way is remembered."""
        rank = first.rank
        with first.watching():
            store: list[Any] = stock_schedule()(
                **arguments
                | {"forward_step_func": first.forward_step}
                | {"data_iterator": first.iterator(arguments["data_iterator"])}
            )
        # A model that cannot run in segments is never captured: its dropout draws in stock's order.
        refusal: BaseException | None = self._softened(tried(lambda: _check(rank))[1])
        refusal, exchange = refusal or first.error, None
        must_cross = rank.may_cross and self.config.across != "auto"
        if first.losses_exchange and (must_cross or rank.experts is not None):
            refusal = refusal or refused(DATA_EXCHANGE)  # ranks meet in segments, too
        elif first.losses_exchange:
            exchange = refused(DATA_EXCHANGE)
        if rank.forward_only and any(map(_has_graph, pytree.tree_leaves(store))):
            refusal = refusal or refused(FORWARD_GRAPH)
        # Ranks that later look at steps together remember the same.
        kind.refusal = copy.copy(agree(refusal, rank.agreeing, rank.device))  # no traceback: models
        kind.ordered = agree(exchange, rank.agreeing, rank.device) is not None
        kind.watched = True
        if kind.refusal is None:
            if self.config.mode == "auto" and not rank.forward_only:
                self.planning.meter(rank).ran_stock()
            self._stock_report(Decision(False, WATCHED, False, 1.0))
        else:
            self._refused(kind.refusal)
        return store

    def _rank(self, rank: Rank) -> Rank:
        """A rank in this call, if its model and its layout suit the configuration."""
        if rank.other_steps is not None:
            raise rank.other_steps.error()
        if self.config.mode == "auto" and is_untried(rank.config):
            raise refused(FP8_UNTRIED)
        if rank.scales_auxiliary_losses and len(rank.models) > 1:
            raise refused(SCALES_INTERLEAVED)
        trainer = trainers.running() if rank.has_images else None
        if trainer is not None and trainer.images is not None:
            raise refused(trainer.images)
        if rank.siblings is None or rank.siblings.size() > 1:
            rank.reduces |= self.callbacks.sums_gradients
            together = self.callbacks.passes_together or not rank.forward_only
            alone = across_step.why_alone(self.config, rank, together=together)
            if alone is None and self.config.across == "auto" and self._rest.next():
                alone = across_step.RESTS
            rank.may_cross, rank.why_alone = alone is None, alone or ""
            across_step.tell_alone(rank.why_alone, rank, self._logged)
        if self.config.cache_host_layers and rank.groups.cp.size() > 1:
            raise refused(HOST_LAYERS_CP)
        kept = self.planning.kept[rank.layout]
        rank.step_parts = parts.chosen(self.config, rank, self.callbacks, kept)
        return rank

    def _read(
        self, capture: Capture, rank: Rank, first: FirstStep | None, kind: StepKind
    ) -> Step | None:
        """The step; None, with `report` set, if its calls cannot be answered from segments.

        All ranks end together where one cannot read its microbatches, and fall back together.
        """
        pause, calls = kind.pause, None
        problem: BaseException | None = kind.problem
        if problem is None:
            calls, problem = self._read_calls(capture, rank, first)
        wish = pause is not None and pause.wanted(rank)
        reason, paused = agree_on(problem, wish, rank.agreeing, rank.device)
        if reason is not None:
            kind.refusal = reason if reason.lasts else None  # all ranks have heard
            self._refused(reason)
            return None
        if paused and pause is not None:
            self._stock_report(pause.begin())
            self._logged.add(self.report.decision.reason)  # type: ignore[union-attr]  # told once
            return None
        planning = self.planning
        judge, unjudged = tried(lambda: planning.judge(rank))
        build = functools.partial(planning.build, rank=rank, judge=judge)
        alone = build
        if rank.experts is not None and rank.ordered and not self.config.plan_file:
            alone = functools.partial(planning.build_together, **build.keywords)
        later = rank.may_cross or alone is not build  # when ranks have agreed to go on
        filters = self.config.mode == "auto" and not rank.may_cross
        step, problem = read_step(
            calls, rank.groups, None if later else build, rank.device,  # type: ignore[arg-type]
            functools.partial(planning.shares_nothing, rank=rank) if filters else None,
        )  # fmt: skip
        if step is not None:
            _, problem = tried(functools.partial(_check_step, step, rank))
        problem = self._softened(problem or unjudged)
        if (reason := agree(problem, rank.agreeing, rank.device)) is not None:
            self._refused(reason)
            return None
        if step is None or not later or step.unshared:
            return step
        return self._together(step, rank, build, alone)

    def _together(
        self, step: Step, rank: Rank, build: Callable[..., Forest], alone: Callable[..., Forest]
    ) -> Step | None:
        """A step with segments that data-parallel ranks make together, some of which may cross
        them; they end or fall back together. `build`, `alone`: see `across_step.across`."""

        def make() -> Step:
            if rank.may_cross:
                return across_step.across(step, rank, self.planning, build, alone)
            return step.with_forest(alone(step.samples or (), step.microbatch_of))

        made, error = tried(make) if rank.is_first else (None, None)
        if rank.num_stages > 1:
            made = told(made, step.samples, rank.groups.pp, rank.device)
        problem = self._softened(error)
        if (reason := agree(problem, rank.agreeing, rank.device)) is not None:
            self._refused(reason)
            return None
        if made is None:
            raise RuntimeError("no rank says why a step has no segments")
        if rank.may_cross:
            across_step.tell_alone(made.why_alone, rank, self._logged)
            self._rest.note(made.crosses)
        if made.crosses:
            rank.cross()
        return made

    def _read_calls(
        self, capture: Capture, rank: Rank, first: FirstStep | None
    ) -> tuple[ReadCalls | None, BaseException | None]:
        """What this rank's model calls say, or what is wrong with them."""
        try:
            capture.run()
        except BaseException as error:  # noqa: BLE001  # the other ranks wait to hear of it
            own = isinstance(error, Exception) and not isinstance(error, UserError)
            capture.is_broken = own and is_own(error)  # type: ignore[arg-type]
            return None, self._softened(error) if capture.is_broken else error
        try:
            if first is not None:
                first.check()
            calls = read_calls(capture, rank, self.callbacks)
            if self.config.mode != "observe":
                self.memory.begin(rank)
        except BaseException as error:  # likewise
            logger.debug("this rank's microbatches cannot be read", exc_info=True)
            return None, self._softened(error)
        return calls, None

    def _plan(self, step: Step, rank: Rank, kind: StepKind) -> JointForest | None:
        """Sets `report` with the plan; None if the stock schedule is the better one, or no plan can
        be made on a rank."""
        joint, error = tried(lambda: self._planned(step, rank, kind))
        problem = self._softened(error)
        if problem is None:
            return joint
        if not isinstance(problem, CannotShare):
            raise problem
        self._refused(problem)
        return None

    def _planned(self, step: Step, rank: Rank, kind: StepKind) -> JointForest | None:
        report, joint = self.planning.decided(step, rank)
        report.why_alone = step.why_alone or rank.why_alone
        if kind.ordered and report.decision.share:
            last = report.plan.actions_of(rank.num_stages - 1, len(rank.models) - 1)
            if not are_in_order(step, last):
                reason = f"{LOSSES_EXCHANGE}, and segments would call them in another order"
                stock = replace(report.decision, share=False, fallback=True, reason=reason)
                report.decision = stock
        self._report(report)
        shares = report.decision.share
        if (shares or self.config.mode == "observe") and self.looks_first and not kind.told:
            kind.told = True
            tell_shared(report.forest, rank, self._logged, shares)
        if kind.pause and not (rank.forward_only or self.planning.meter(rank).due):
            kind.pause.note(report.decision)  # in others it may run to be timed
        return joint if shares else None

    def _refused(self, reason: UserError) -> None:
        """Counts a fallback for a step whose calls cannot be answered; mode "on" raises."""
        if self.config.mode == "on":
            raise reason
        self._stock_report(Decision(False, str(reason), self.config.mode == "auto", 1.0))
        self._logged.add(str(reason))  # it is the same in every step, and logged once

    def _stock_report(self, decision: Decision) -> StepReport:
        """Sets `report` for a step of which there is no forest."""
        plan = Plan((), ((),), 1)
        report = StepReport(Forest((), (), ()), decision, plan, plan)
        self._report(report)
        return report

    def _report(self, report: StepReport) -> None:
        """Sets `report`; a fallback is counted and logged."""
        before = self.report.fallback_count if self.report else 0
        report.fallback_count = before + bool(report.decision.fallback)
        self.report = report
        if report.decision.fallback and report.decision.reason not in self._logged:
            logger.warning("stock schedule for this step: %s", report.decision.reason)


def _check_step(step: Step, rank: Rank) -> None:
    """Raises what is in the way of a step that was read."""
    if len({*step.packed}) > 1 and fused_yarn.differs(rank.config):
        raise refused(FUSED_YARN, "packs and rows of one step")
    for part in rank.step_parts:
        part.check(step)
    if rank.looks_ahead:
        ahead.check(step, rank)


def _has_graph(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


@functools.lru_cache(maxsize=8)  # a new callback every step must not fill the memory
def _schedule(config: PrefixConfig, callbacks: Callbacks) -> PrefixSchedule:
    """One schedule per process and configuration: plans, kernels, pools and reports stay."""
    functions = {
        name: code_name(function)
        for name, function in vars(callbacks).items()
        if callable(function)
    }
    if functions and None not in functions.values():  # what holds no code is not kept here
        alike = config, *(vars(callbacks) | functions).items()
        _num_alike[alike] += 1
        if _num_alike[alike] == 2:
            logger.warning(NEW_FUNCTION)  # only that: two closures may well mean two things
    return PrefixSchedule(config, callbacks, looks_first=True)


def _check(rank: Rank) -> None:
    """Raises CannotShare if the model cannot run in segments."""
    for inner, model in zip(rank.language_models, rank.models, strict=True):
        if installed(model) is None:
            features.check(inner, model)


def get_forward_backward_func(
    *megatrons: Any,
    prefix_config: PrefixConfig | None = None,
    trained: Callable[[ModelCall], torch.Tensor | None] | None = None,
    routes: Callable[[ModelCall], torch.Tensor | None] | None = None,
    samples: Samples | None = None,
    passes_together: bool = False,
    slices: Slices = Slices.ZIGZAG,
    masks_tokens: bool = False,
    sums_gradients: bool = False,
    **others: Any,
) -> PrefixSchedule:
    """Replaces megatron.core.pipeline_parallel.get_forward_backward_func.

    The same schedule every time for the same arguments, however often it is called. Functions are
    the same if they are equal: one that is defined anew in every step starts a new schedule, of
    which that is the first step, so that mode "auto" never shares anything. That is logged once.

    Args:
        prefix_config: what the user set; default: always share.
        trained: says which positions of a model call carry loss; see `Callbacks`.
        routes: says where routers are to send the tokens of a model call; see `Callbacks`.
        samples: says which positions of a microbatch carry loss; see `Callbacks`.
        passes_together: data-parallel ranks make equally many calls without gradients.
        slices: how model calls are cut for context-parallel ranks.
        masks_tokens: the loss_mask of a model call is over tokens, and so is ignored.
        sums_gradients: the trainer itself sums gradients over data-parallel ranks; see `Callbacks`.

    Megatron's own arguments (pp_size, vp_size, and schedule_pg_collection from 0.19) are taken and
    not needed.

    Raises:
        UserError: a PrefixConfig that is not given by name.
        TypeError: an argument that neither this function nor Megatron's has.
    """
    if others and (unknown := others.keys() - stock_arguments()):
        raise TypeError(unexpected(get_forward_backward_func, min(unknown), PrefixConfig))
    if any(isinstance(argument, PrefixConfig) for argument in megatrons):
        raise UserError("give the configuration by name: prefix_config=PrefixConfig(...)")
    callbacks = Callbacks(
        trained, routes, samples, passes_together, slices, masks_tokens, sums_gradients
    )
    return _schedule(prefix_config or PrefixConfig(), callbacks)
