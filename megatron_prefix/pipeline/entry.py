"""Megatron's forward-backward function, with the prefix schedule behind it.

`get_forward_backward_func()` takes the place of Megatron's function of that name; what it returns
has Megatron's keyword contract (megatron/core/pipeline_parallel/schedules.py) and its return value.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func as stock_schedule
from megatron.core.pipeline_parallel.schedules import (
    clear_embedding_activation_buffer,
    finish_embedding_wgrad_compute,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron_prefix.cache import SidecarCache
from megatron_prefix.config import PrefixConfig
from megatron_prefix.data.batch import BatchAdapter, SegmentInputs, TensorBatchAdapter
from megatron_prefix.errors import UserError
from megatron_prefix.install import Hooks, install
from megatron_prefix.pipeline import gradients
from megatron_prefix.pipeline.cost import CostModel, Decision, decide
from megatron_prefix.pipeline.executor import Executor, Stage
from megatron_prefix.pipeline.planner import make_plan
from megatron_prefix.pipeline.scoring import LossContract, Microbatches, Scorer
from megatron_prefix.tree import Forest, Pairs, build

logger = logging.getLogger(__name__)


@dataclass
class StepReport:
    """What the last step did; the numbers behind the `prefix_sharing/` metrics.

    Attributes:
        forest: the step's segments.
        decision: which schedule ran and why.
        fallback_count: steps so far in which the stock schedule ran although sharing was wanted.
    """

    forest: Forest
    decision: Decision
    fallback_count: int


@dataclass
class PrefixSchedule:
    """A forward-backward function; call it as Megatron's.

    Attributes:
        config: what the user set.
        adapter: knows the form of the trainer's microbatches.
        report: what the last step did; None before the first.
    """

    config: PrefixConfig = field(default_factory=PrefixConfig)
    adapter: BatchAdapter = field(default_factory=TensorBatchAdapter)
    report: StepReport | None = None

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
        **contract: Any,
    ) -> list[Any]:
        """Runs forward and backward of a step's microbatches; see Megatron's schedules.

        `seq_length`, `micro_batch_size`, `decoder_seq_length`, `first_val_step`,
        `adjust_tensor_shapes_fn` and `p2p_communicator` are taken for the stock schedule's sake; the
        prefix schedule knows its shapes from the plan.

        Returns:
            Megatron's `forward_data_store`, in the order of the microbatches.

        Raises:
            UserError: a feature or a form of microbatch that the schedule cannot run.
        """
        arguments = dict(
            contract, forward_step_func=forward_step_func, model=model, forward_only=forward_only,
            num_microbatches=num_microbatches, collect_non_loss_data=collect_non_loss_data,
            pg_collection=pg_collection, force_all_reduce=force_all_reduce,
        )  # fmt: skip
        if self.config.mode == "off":
            return stock_schedule()(data_iterator=data_iterator, **arguments)
        models = model if isinstance(model, list) else [model]
        source = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
        microbatches, rollouts, groups = self._read(source, num_microbatches)
        config = get_model_config(models[0])
        forest = build(rollouts, groups, self.config.tree_options(_alignment(config)))
        decision = decide(self.config, forest, CostModel.of_config(config))
        fallbacks = (self.report.fallback_count if self.report else 0) + bool(decision.fallback)
        self.report = StepReport(forest, decision, fallbacks)
        if not decision.share:
            if decision.fallback:
                logger.warning("stock schedule for this step: %s", decision.reason)
            return stock_schedule()(data_iterator=iter(microbatches.items), **arguments)
        return self._run(
            models, config, forest, rollouts, microbatches, forward_step_func,
            forward_only, collect_non_loss_data, pg_collection, force_all_reduce,
        )  # fmt: skip

    def _read(
        self, source: Iterator[Any], num_microbatches: int
    ) -> tuple[Microbatches, list[Pairs], list[int]]:
        """Takes the step's microbatches from the trainer's iterator."""
        items, members, pairs, groups = [], [], [], []
        numbers: dict[Any, int] = {}
        for _ in range(num_microbatches):
            item = next(source)
            samples = list(self.adapter.pairs(item))
            name = self.adapter.group(item)
            members.append(list(range(len(pairs), len(pairs) + len(samples))))
            groups += [numbers.setdefault(name, len(numbers))] * len(samples)
            pairs += samples
            items.append(item)
        return Microbatches(items, members), pairs, groups

    def _run(
        self, models: list, config: Any, forest: Forest, rollouts: list[Pairs],
        microbatches: Microbatches, forward_step_func: Any, forward_only: bool,
        collect_non_loss_data: bool, pg_collection: Any, force_all_reduce: bool | None,
    ) -> list[Any]:  # fmt: skip
        """The prefix schedule proper."""
        groups = pg_collection or gradients.default_groups()
        hooks = [install(chunk, self.config.kernel) for chunk in models]
        plan = make_plan(
            forest, groups.pp.size(), microbatches=microbatches.owner, extra=self.config.extra
        )
        contract = LossContract(forward_step_func, config, groups.cp.size(), collect_non_loss_data)
        scorer = Scorer(forest, microbatches, contract, self.adapter, models[-1], hooks[-1])
        stages = [
            Stage(chunk, hook, SidecarCache(forest.segments, hook.num_layers))
            for chunk, hook in zip(models, hooks, strict=True)
        ]
        stages[-1].scorer = scorer
        inputs = SegmentInputs(forest, rollouts, next(models[0].parameters()).device)
        executor = Executor(plan, stages, inputs, self.adapter, forward_only)
        with _timed(config):
            embedding = clear_embedding_activation_buffer(config, models, True)
            with contextlib.nullcontext() if forward_only else gradients.no_sync(models, config):
                executor.run(groups.pp.rank())
            if not forward_only:
                finish_embedding_wgrad_compute(config, embedding, True, groups.tp)
                gradients.finish(models, config, scorer.num_tokens, groups, force_all_reduce)
        return scorer.forward_data_store


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
    """Segment boundaries are multiples of this (design: tp under sequence parallelism, times 2*cp)."""
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
