"""Megatron's forward-backward function, with the prefix schedule behind it.

`get_forward_backward_func()` takes the place of Megatron's function of that name; what it returns
has Megatron's keyword contract (megatron/core/pipeline_parallel/schedules.py) and its return value.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func as stock_schedule
from megatron.core.pipeline_parallel.schedules import (
    clear_embedding_activation_buffer,
    finish_embedding_wgrad_compute,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.megatron.install import install
from megatron_prefix.offload.segment import Offloader
from megatron_prefix.offload.transfers import free_bytes
from megatron_prefix.plan.actions import Action, Plan
from megatron_prefix.plan.cost import CostModel, decide
from megatron_prefix.plan.joint_forest import JointForest
from megatron_prefix.plan.step_planner import StepPlanner
from megatron_prefix.run import channels, expert_sync, global_aux_sync, gradients
from megatron_prefix.run import routers as router
from megatron_prefix.run.batch import BatchAdapter, SegmentInputs, TensorBatchAdapter
from megatron_prefix.run.executor import Executor, Stage
from megatron_prefix.run.losses import LossContract, Scorer
from megatron_prefix.run.messages import Links, message_dtype, message_shape
from megatron_prefix.run.oom_retry import MemoryControl, device_of
from megatron_prefix.run.report import StepReport
from megatron_prefix.run.step import Step, read_step
from megatron_prefix.run.timing import Stopwatch
from megatron_prefix.sidecar.cache import SidecarCache
from megatron_prefix.sidecar.context_parallel import Exchange, ShardedCache
from megatron_prefix.sidecar.host_chains import HostLayers

logger = logging.getLogger(__name__)


class _Call(NamedTuple):
    """What a step's forward-backward call is about."""

    models: list[Any]
    step: Step
    joint: JointForest
    contract: LossContract
    groups: ProcessGroupCollection
    forward_only: bool


@dataclass
class PrefixSchedule:
    """A forward-backward function; call it as Megatron's.

    Attributes:
        config: what the user set.
        adapter: knows the form of the trainer's microbatches.
        report: what the last step did; None before the first.
        measures: times every action of the next steps (`report.stopwatch`); costs a barrier a step.
        watch: runs around the computation of every action, in the place of `measures`.
    """

    config: PrefixConfig = field(default_factory=PrefixConfig)
    adapter: BatchAdapter = field(default_factory=TensorBatchAdapter)
    report: StepReport | None = None
    measures: bool = False
    watch: Callable[[Action], contextlib.AbstractContextManager] | None = None
    _planners: dict[Any, StepPlanner] = field(default_factory=dict, init=False, repr=False)
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
            UserError: a feature or a form of microbatch that the schedule cannot run.
        """
        arguments = dict(
            rest, forward_step_func=forward_step_func, model=model, forward_only=forward_only,
            num_microbatches=num_microbatches, collect_non_loss_data=collect_non_loss_data,
            pg_collection=pg_collection, force_all_reduce=force_all_reduce,
        )  # fmt: skip
        if self.config.mode == "off":
            return stock_schedule()(data_iterator=data_iterator, **arguments)
        models = model if isinstance(model, list) else [model]
        config = get_model_config(models[0])
        groups = self._groups(pg_collection)
        if self.config.mode != "observe":  # by all ranks, whichever schedule each of them takes
            channels.channels_of(groups.pp, device_of(models))
        planner = self._planner(config, groups.pp.size(), len(models))
        step = read_step(
            data_iterator, num_microbatches, self.adapter, groups.pp, groups.cp,
            router.builder(planner.build, config, forward_only), device_of(models),
        )  # fmt: skip
        experts = expert_sync.expert_group(groups)
        joint = expert_sync.meet(step.forest, step.microbatch_of, experts)
        self.report = report = self._decided(models, step, joint, planner.plan(joint), groups)
        expert_sync.check(self._unplanned(num_microbatches, groups.pp.rank()), experts)
        if not report.decision.share:
            return stock_schedule()(data_iterator=step.replay(data_iterator), **arguments)
        expert_sync.check_dispatcher(config, joint)
        contract = LossContract(forward_step_func, config, groups.cp.size(), collect_non_loss_data)
        call = _Call(models, step, joint, contract, groups, forward_only)
        return self._run(call, report, force_all_reduce)

    def _groups(self, given: ProcessGroupCollection | None) -> ProcessGroupCollection:
        """The process groups, which the configuration has to suit."""
        groups = given or gradients.default_groups()
        if self.config.cache_host_layers and groups.cp.size() > 1:
            raise UserError(
                "cache_host_layers is for whole sequences: with context parallelism every rank has"
                " its share of K/V and gK/gV only; set it to 0"
            )
        return groups

    def _decided(
        self, models: list[Any], step: Step, joint: JointForest, plan: Plan, groups: Any
    ) -> StepReport:
        """Which schedule runs, and the count of fallbacks."""
        config = get_model_config(models[0])
        decision = decide(self.config, joint.union, CostModel.of_config(config))
        if step.forest.ordered:
            decision = global_aux_sync.together(
                decision, step.num_microbatches, groups.dp_cp, device_of(models)
            )
            global_aux_sync.prove(plan, joint, groups.pp.rank())
        if decision.fallback:
            logger.warning("stock schedule for this step: %s", decision.reason)
        before = self.report.fallback_count if self.report else 0
        union = replace(plan, segments=joint.union.segments)
        return StepReport(step.forest, decision, before + bool(decision.fallback), plan, union)

    def _unplanned(self, num_microbatches: int, rank: int) -> Sequence[Any] | None:
        """Actions of a rank that were not planned together with those of other pipelines."""
        if not self.report.decision.share:  # type: ignore[union-attr]
            return range(num_microbatches)
        return self.report.plan.programs[rank] if self.config.plan_file else None  # type: ignore[union-attr]

    def _planner(self, config: Any, num_ranks: int, num_chunks: int) -> StepPlanner:
        """The planner of this pipeline, which remembers its plans."""
        turn = config.microbatch_group_size_per_vp_stage
        shape = (_alignment(config), num_ranks, num_chunks, turn)
        if shape not in self._planners:
            self._planners[shape] = StepPlanner(self.config, CostModel.of_config(config), *shape)
        return self._planners[shape]

    def _run(self, call: _Call, report: StepReport, force_all_reduce: bool | None) -> list[Any]:
        """The prefix schedule proper."""
        call = call._replace(step=replace(call.step, forest=call.joint.forest))
        models, groups, config = call.models, call.groups, call.contract.config
        device, is_last = device_of(models), groups.pp.rank() == groups.pp.size() - 1
        report.stopwatch = Stopwatch(groups.pp, device) if self.measures else None
        if device.type == "cuda":
            report.base_bytes = torch.cuda.memory_allocated(device)
            report.room_bytes = free_bytes(device, self.config.memory_budget)
        if self.config.memory == "auto" and not call.forward_only:
            report.plan = self._memory.chosen(report.plan, call.joint, models, groups)
        with _timed(config), channels.closing_on_failure(groups.pp):
            (scorer, embedding), plan = self._memory.run(
                lambda plan: self._attempt(plan, call, report), report.plan, models, groups,
                call.forward_only,
            )  # fmt: skip
            report.retried, report.plan = plan is not report.plan, plan
            if not call.forward_only:
                report.memory = self._memory.predicted(plan, models, groups.pp.rank())
                finish_embedding_wgrad_compute(config, embedding, is_last, groups.tp)
                num_tokens = scorer.num_tokens if scorer is not None else 0
                gradients.finish(models, config, num_tokens, groups, force_all_reduce)
        return scorer.forward_data_store if scorer is not None else []

    def _attempt(self, plan: Plan, call: _Call, report: StepReport) -> tuple[Scorer | None, Any]:
        """Runs a plan on this rank, but for what follows its last backward."""
        models, step, _, contract, groups, forward_only = call
        config, device = contract.config, device_of(models)
        offloader = self._memory.offloader(plan, models, groups.pp.rank(), forward_only)
        stages = self._stages(call, plan, offloader)
        router.begin(stages, step, contract, groups, device, forward_only)
        if report.stopwatch is not None:
            report.stopwatch.forget()
        links = Links(
            channels.channels_of(groups.pp, device), report.joint, message_shape(config, plan),
            message_dtype(config), device, not forward_only,
        )  # fmt: skip
        executor = Executor(
            plan, stages,
            SegmentInputs(step.forest, step.rollouts, device, groups.cp.rank(), groups.cp.size()),
            self.adapter, links, forward_only,
            self.watch or (report.stopwatch.timing if report.stopwatch else None),
            offloader,
        )  # fmt: skip
        is_last = stages[-1].scorer is not None
        embedding = clear_embedding_activation_buffer(config, models, is_last)
        with contextlib.nullcontext() if forward_only else gradients.no_sync(models, config):
            executor.run(groups.pp.rank())
        report.cache_bytes = sum(stage.cache.peak_bytes for stage in stages)
        return stages[-1].scorer, embedding

    def _stages(self, call: _Call, plan: Plan, offloader: Offloader | None) -> list[Stage]:
        """The rank's model chunks with hooks and sidecars; the last stage's has the losses."""
        models, step, _, contract, groups, _ = call
        exchange = Exchange(groups.cp) if groups.cp.size() > 1 else None
        stages = []
        for chunk, model in enumerate(models):
            hooks, number = install(model, self.config.kernel), plan.stage(groups.pp.rank(), chunk)
            cache = self._cache(plan, hooks.num_layers, exchange, offloader)
            stage = Stage(model, hooks, cache, number == 0, number == plan.num_stages - 1)
            if stage.is_last:
                stage.scorer = Scorer(step, contract, self.adapter, model, hooks, exchange)
            stages.append(stage)
        return stages

    def _cache(
        self,
        plan: Plan,
        num_layers: int,
        exchange: Exchange | None,
        offloader: Offloader | None,
    ) -> SidecarCache:
        """The sidecar of one model chunk on this rank."""
        if exchange is None:
            share = self.config.cache_host_layers
            host = HostLayers(offloader, num_layers, share) if offloader and share else None
            return SidecarCache(plan.segments, num_layers, host=host)
        return ShardedCache(plan.segments, num_layers, exchange, self.config.cp_reduce)


def get_forward_backward_func(
    *_: Any,
    prefix_config: PrefixConfig | None = None,
    adapter: BatchAdapter | None = None,
    **__: Any,
) -> PrefixSchedule:
    """Takes the place of megatron.core.pipeline_parallel.get_forward_backward_func.

    Args:
        prefix_config: what the user set; default: always share.
        adapter: knows the trainer's microbatches; default: mappings of tensors.

    Megatron's own arguments (pp_size, vp_size, and schedule_pg_collection from 0.19) are taken and
    not needed.
    """
    return PrefixSchedule(prefix_config or PrefixConfig(), adapter or TensorBatchAdapter())


def _alignment(config: Any) -> int:
    """Segment boundaries are multiples of it: tp under sequence parallelism, times 2*cp."""
    tp = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return tp * (2 * config.context_parallel_size if config.context_parallel_size > 1 else 1)


@contextlib.contextmanager
def _timed(config: Any) -> Iterator[None]:
    """Megatron's timer around the whole step."""
    timers = config.timers
    if timers is not None:
        timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    try:
        yield
    finally:
        if timers is not None:
            timers("forward-backward").stop()
