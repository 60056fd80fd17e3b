"""Megatron's forward-backward function, with the prefix schedule behind it.

`get_forward_backward_func()` takes the place of Megatron's function of that name; what it returns
has Megatron's keyword contract (megatron/core/pipeline_parallel/schedules.py) and its return value.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import CannotShare, UserError
from megatron_prefix.megatron import features, modules
from megatron_prefix.megatron.install import installed, language_model
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.moe.versions import replays_routes
from megatron_prefix.plan.actions import Action, Plan
from megatron_prefix.plan.gate import Decision, decide, unshared, without_sharing
from megatron_prefix.plan.joint_forest import JointForest
from megatron_prefix.plan.step_planner import Judge, StepPlanner
from megatron_prefix.plan.times import Shape, predict
from megatron_prefix.run import calls, channels, expert_sync, global_aux_sync, gradients
from megatron_prefix.run import routers as router
from megatron_prefix.run.across_ranks import Watch
from megatron_prefix.run.agreement import agree, all_agree, companions, share_together
from megatron_prefix.run.calls import ModelCall
from megatron_prefix.run.capture import Capture
from megatron_prefix.run.cost_meter import CostMeter, frozen_share, key_of, prior_of
from megatron_prefix.run.losses import LossContract
from megatron_prefix.run.oom_retry import MemoryControl, cost_of, device_of
from megatron_prefix.run.report import StepReport
from megatron_prefix.run.samples import Samples
from megatron_prefix.run.step import (
    Callbacks,
    Columns,
    Prefilter,
    Step,
    check_positions,
    read_columns,
    read_step,
)
from megatron_prefix.run.step_run import StepRun
from megatron_prefix.tree import Forest, Pairs

logger = logging.getLogger(__name__)


@dataclass
class PrefixSchedule:
    """A forward-backward function; call it as Megatron's.

    Attributes:
        config: what the user set.
        callbacks: what the trainer says of its microbatches that its model calls do not.
        report: what the last step did; None before the first.
        measures: times every action of the next steps (`report.stopwatch`); costs a barrier a step.
        watch: runs around the computation of every action, in the place of `measures`.
        across_ranks: what groups on several data-parallel ranks could share, and do.
    """

    config: PrefixConfig = field(default_factory=PrefixConfig)
    callbacks: Callbacks = field(default_factory=Callbacks)
    report: StepReport | None = None
    measures: bool = False
    watch: Callable[[Action], contextlib.AbstractContextManager] | None = None
    across_ranks: Watch = field(default_factory=Watch, init=False)
    _planners: dict[Any, StepPlanner] = field(default_factory=dict, init=False, repr=False)
    _meters: dict[Any, CostMeter] = field(default_factory=dict, init=False, repr=False)
    _memory: MemoryControl = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._memory = MemoryControl(self.config)

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
        if self.config.mode == "off" or self._calls_otherwise(models):
            return stock_schedule()(**arguments)
        groups = self._groups(pg_collection)
        if self.config.mode != "observe":  # by all ranks, whichever schedule each of them takes
            channels.channels_of(groups.pp, device_of(models))
        meter = self._meter(models, groups)
        meter.begin(forward_only)
        keeps_drawn = self.callbacks.needs_drawn(forward_only)
        capturing = Capture(forward_step_func, data_iterator, models, num_microbatches, keeps_drawn)
        with capturing as capture, self._memory.step():
            prepared = self._prepared(capture, models, groups, forward_only)
            with meter.step(self.report, groups.pp.rank()):  # type: ignore[arg-type]
                if prepared is None:
                    return stock_schedule()(**arguments | {"forward_step_func": capture.stock_step})
                config = get_model_config(models[0])
                contract = LossContract(config, groups.cp.size(), collect_non_loss_data)
                run = StepRun(
                    self, capture, models, *prepared, contract, groups, forward_only,
                    self.measures or meter.due,
                )  # fmt: skip
                return run(force_all_reduce)

    def _calls_otherwise(self, models: list[Any]) -> bool:
        """Whether the stock schedule gives forward steps more than an iterator and a model."""
        config = get_model_config(models[0])
        names = "num_microbatches_with_partial_activation_checkpoints", *features.OWN_PLAN
        found = [name for name in names if getattr(config, name, None)]
        if found:
            self._refused(CannotShare(f"{found[0]}: turn it off: it changes forward steps"))
        return bool(found)

    def _groups(self, given: ProcessGroupCollection | None) -> ProcessGroupCollection:
        """The process groups, which the configuration has to suit."""
        groups = given or gradients.default_groups()
        if self.config.cache_host_layers and groups.cp.size() > 1:
            raise UserError(
                "cache_host_layers is for whole sequences: context-parallel ranks exchange K/V and"
                " gK/gV from device memory; set it to 0"
            )
        return groups

    def _prepared(
        self, capture: Capture, models: list[Any], groups: Any, forward_only: bool
    ) -> tuple[Step, JointForest] | None:
        """The step to run, with `report` set; None where the stock schedule runs it.

        All ranks end together where one cannot read its microbatches, and fall back together where
        the calls of one cannot be answered from segments.
        """
        config, device = get_model_config(models[0]), device_of(models)
        everyone = companions(groups)
        problem: BaseException | None = None
        found = None
        try:
            capture.run()
            found = self._read(capture, models, groups, forward_only)
            if self.config.mode != "observe":
                self._memory.begin(models, groups, forward_only)
        except BaseException as error:  # the other ranks wait to hear of it
            problem = error
            logger.debug("this rank's microbatches cannot be read", exc_info=True)
        if (reason := agree(problem, everyone, device)) is not None:
            self._refused(reason)
            return None
        first, last, routes = found  # type: ignore[misc]
        planner = self._planner(models, groups.pp.size())
        judge = self._judge(models, groups, forward_only)
        build = router.builder(
            lambda samples, owners: planner.build(samples, [0] * len(samples), owners, judge),
            config, forward_only,
        )  # fmt: skip
        step = read_step(
            first, last, routes, groups, build, device, self._prefilter(models, groups, device)
        )
        problem = step if isinstance(step, BaseException) else None
        if (reason := agree(problem, everyone, device)) is not None:
            self._refused(reason)
            return None
        if self.config.mode != "on":
            self.across_ranks.look(step, groups, forward_only=forward_only)  # type: ignore[arg-type]
        if step.unshared:  # type: ignore[union-attr]
            self._unshared(step, models, groups, forward_only)  # type: ignore[arg-type]
            return None
        return self._planned(capture, step, planner, models, groups, forward_only)  # type: ignore[arg-type]

    def _judge(self, models: list[Any], groups: Any, forward_only: bool) -> Judge | None:
        """Says of plans whether they fit in memory, and how long they take; all ranks call this,
        and their answers are the same. None where there is no choice."""
        if self.config.segment_tokens != "auto":
            return None
        free, times = self._memory.least_free(models, groups), self._meter(models, groups).times

        def judged(forest: Forest, microbatch_of: Sequence[int], plan: Plan) -> tuple[bool, float]:
            found = predict(times, forest, microbatch_of, plan, forward_only=forward_only)
            return self._memory.fits(plan, models, free), found.prefix_seconds

        return judged

    def _prefilter(self, models: list[Any], groups: Any, device: torch.device) -> Prefilter:
        """Finds steps without sharing; where pipelines share experts all of them must be such."""
        experts, config = expert_sync.expert_group(groups), get_model_config(models[0])
        cost = cost_of(models[0])
        head = cost.head / (cost.linear + cost.head)

        def nothing_to_share(samples: Sequence[Pairs] | None) -> bool:
            if self.config.mode != "auto":
                return False
            mine = samples is not None and without_sharing(
                self.config, samples, _alignment(config), head
            )
            return all_agree(mine, experts, device)

        return nothing_to_share

    def _unshared(self, step: Step, models: list[Any], groups: Any, forward_only: bool) -> None:
        """Sets `report` for a step for which no tree was built."""
        ordered = router.are_ordered(get_model_config(models[0]), forward_only)
        decision = self._together(
            unshared(self.config), step, ordered, models, groups, forward_only
        )
        plan = Plan((), ((),) * groups.pp.size(), len(models))
        count = self._fallbacks() + bool(decision.fallback)
        self.report = StepReport(step.forest, decision, count, plan, plan)
        experts = expert_sync.expert_group(groups)
        expert_sync.check(self._unplanned(step.num_microbatches, groups.pp.rank()), experts)

    def _read(
        self, capture: Capture, models: list[Any], groups: Any, forward_only: bool
    ) -> tuple[Columns | None, Columns | None, list[Any]]:
        """Columns of the first and of the last stage's calls where they are, and routes."""
        is_first, is_last = groups.pp.rank() == 0, groups.pp.rank() == groups.pp.size() - 1
        cp, config = groups.cp, get_model_config(models[0])
        for chunk, model in enumerate(models):
            _check_features(model)
            needs_masks = modules.needs_masks(language_model(model))
            calls.check(capture.calls(chunk), needs_masks=needs_masks)
        capture.check_settings()
        first = last = None
        routes: list[Any] = []
        read = functools.partial(
            read_columns, cp_size=cp.size(), callbacks=self.callbacks, forward_only=forward_only,
            cp_rank=cp.rank(),
        )  # fmt: skip
        if is_first:
            asked = capture.calls(0)
            first = read(asked)
            if first is None or first.tokens is None:
                raise CannotShare("model calls of the first pipeline stage have no input_ids")
            inner = language_model(models[0])
            learned = getattr(inner, "position_embedding_type", "") == "learned_absolute"
            check_positions(first, cp.rank(), cp.size(), used=learned)
            if replays_routes(config) and self.callbacks.routes is not None:
                routes = [self.callbacks.routes(call) for call in asked]
        if is_last and not (is_first and len(models) == 1):
            last = read(capture.calls(-1))
        return first, last, routes

    def _refused(self, reason: CannotShare) -> None:
        """Counts a fallback for a step whose calls cannot be answered; mode "on" raises."""
        if self.config.mode == "on":
            raise reason
        is_auto = self.config.mode == "auto"
        decision = Decision(False, str(reason), is_auto, 1.0)
        plan = Plan((), ((),), 1)
        self.report = StepReport(
            Forest((), (), ()), decision, self._fallbacks() + is_auto, plan, plan
        )
        if is_auto:
            logger.warning("stock schedule for this step: %s", reason)

    def _fallbacks(self) -> int:
        return self.report.fallback_count if self.report else 0

    def _planned(
        self,
        capture: Capture,
        step: Step,
        planner: StepPlanner,
        models: list[Any],
        groups: Any,
        forward_only: bool,
    ) -> tuple[Step, JointForest] | None:
        """Sets `report` with the plan; None where the stock schedule is the better one."""
        config = get_model_config(models[0])
        experts = expert_sync.expert_group(groups)
        joint = expert_sync.meet(step.forest, step.microbatch_of, experts)
        self.report = report = self._decided(
            models, step, joint, planner.plan(joint), groups, forward_only
        )
        expert_sync.check(self._unplanned(step.num_microbatches, groups.pp.rank()), experts)
        if not report.decision.share:
            return None
        expert_sync.check_dispatcher(config, joint)
        capture.forget_arguments()
        return replace(step, forest=joint.forest), joint

    def _decided(
        self,
        models: list[Any],
        step: Step,
        joint: JointForest,
        plan: Plan,
        groups: Any,
        forward_only: bool,
    ) -> StepReport:
        """Which schedule runs, and the count of fallbacks."""
        union = replace(plan, segments=joint.union.segments)
        experts, meter = expert_sync.expert_group(groups), self._meter(models, groups)
        prediction = predict(
            meter.times, joint.union, joint.union_microbatch_of, union, forward_only=forward_only,
            num_pipelines=experts.size() if experts is not None else 1,
        )  # fmt: skip
        decision = decide(self.config, prediction)
        if meter.due and self._may_try(plan, experts, models, groups):
            decision = meter.chosen(decision)
        decision = self._together(decision, step, step.forest.ordered, models, groups, forward_only)
        if step.forest.ordered:
            global_aux_sync.prove(plan, joint, groups.pp.rank())
        count = self._fallbacks() + bool(decision.fallback)
        return StepReport(step.forest, decision, count, plan, union, prediction, meter.times)

    def _may_try(self, plan: Plan, experts: Any, models: list[Any], groups: Any) -> bool:
        """Whether either schedule can run the step, to time it; the same on all ranks.

        Ranks that share experts need equally many microbatches for one schedule and may need
        segments of equal lengths for the other, so nothing is tried there.
        """
        fits = self._memory.fits(plan, models, self._memory.least_free(models, groups))
        return fits and (experts is None or experts.size() == 1)

    def _together(
        self,
        decision: Decision,
        step: Step,
        ordered: bool,
        models: list[Any],
        groups: Any,
        forward_only: bool,
    ) -> Decision:
        """The decision of all data-parallel ranks where they need one; a fallback is logged."""
        device = device_of(models)
        if ordered:
            global_aux_sync.check_counts(step.num_microbatches, groups.dp_cp, device)
            why = "global_aux_loss needs one schedule"
            decision = share_together(decision, groups.dp_cp, device, why)
        elif self.config.mode == "auto" and not forward_only and gradients.order_shows(models):
            why = "overlap_grad_reduce needs one schedule"
            # A trainer that finalizes by itself may give no such group.
            together = getattr(groups, "dp_cp", None) or gradients.default_groups().dp_cp
            decision = share_together(decision, together, device, why)
        if decision.fallback:
            logger.warning("stock schedule for this step: %s", decision.reason)
        return decision

    def _unplanned(self, num_microbatches: int, rank: int) -> Sequence[Any] | None:
        """Actions of a rank that were not planned together with those of other pipelines."""
        if not self.report.decision.share:  # type: ignore[union-attr]
            return range(num_microbatches)
        return self.report.plan.programs[rank] if self.config.plan_file else None  # type: ignore[union-attr]

    def _planner(self, models: list[Any], num_ranks: int) -> StepPlanner:
        """The planner of this pipeline, which remembers its plans."""
        config = get_model_config(models[0])
        turn = config.microbatch_group_size_per_vp_stage
        key = cost_of(models[0]), _alignment(config), num_ranks, len(models), turn
        if key not in self._planners:
            self._planners[key] = StepPlanner(self.config, *key)
        return self._planners[key]

    def _meter(self, models: list[Any], groups: Any) -> CostMeter:
        """What is known of this model's times; all ranks ask together the first time."""
        config, device = get_model_config(models[0]), device_of(models)
        parts = groups.tp.size() * groups.cp.size()
        shape = Shape(config.num_layers, groups.pp.size(), len(models), parts)
        cost = cost_of(models[0])
        if (cost, shape) not in self._meters:
            frozen = frozen_share(models)
            key = key_of(cost, shape, config, self.config.kernel, device, frozen)
            everyone = companions(groups)
            experts = expert_sync.expert_group(groups)
            if (
                experts is not None
                and experts.size() > 1
                and getattr(groups, "dp_cp", None) is None
            ):
                everyone.append(experts)
            prior = prior_of(cost, shape, device, frozen)
            self._meters[cost, shape] = CostMeter(self.config, key, prior, everyone, device)
        return self._meters[cost, shape]


@functools.lru_cache(maxsize=8)  # a new callback every step must not fill the memory
def _schedule(config: PrefixConfig, callbacks: Callbacks) -> PrefixSchedule:
    """One schedule a process and configuration: plans, kernels, pools and reports stay."""
    return PrefixSchedule(config, callbacks)


def get_forward_backward_func(
    *megatrons: Any,
    prefix_config: PrefixConfig | None = None,
    trained: Callable[[ModelCall], torch.Tensor | None] | None = None,
    routes: Callable[[ModelCall], torch.Tensor | None] | None = None,
    samples: Samples | None = None,
    **__: Any,
) -> PrefixSchedule:
    """Takes the place of megatron.core.pipeline_parallel.get_forward_backward_func.

    The same schedule every time for the same arguments, however often it is called.

    Args:
        prefix_config: what the user set; default: always share.
        trained: says which positions of a model call carry loss; see `Callbacks`.
        routes: says where routers are to send the tokens of a model call; see `Callbacks`.
        samples: says which positions of a microbatch carry loss; see `Callbacks`.

    Megatron's own arguments (pp_size, vp_size, and schedule_pg_collection from 0.19) are taken and
    not needed.

    Raises:
        UserError: a PrefixConfig that is not given by name.
    """
    if any(isinstance(argument, PrefixConfig) for argument in megatrons):
        raise UserError("give the configuration by name: prefix_config=PrefixConfig(...)")
    return _schedule(prefix_config or PrefixConfig(), Callbacks(trained, routes, samples))


def _check_features(model: Any) -> None:
    """Refuses a model chunk that cannot run in segments. Modules are looked at until it has hooks;
    options in every step, since Megatron reads some of them in every forward."""
    inner, hooks = language_model(model), installed(model)
    try:
        if hooks is not None:
            features.check_options(inner.config, hooks.mixers)
        else:
            features.check(inner, model)
    except UserError as error:
        raise CannotShare(str(error)) from None


def _alignment(config: Any) -> int:
    """Segment boundaries are multiples of it: tp under sequence parallelism, times 2*cp."""
    tp = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return tp * (2 * config.context_parallel_size if config.context_parallel_size > 1 else 1)
