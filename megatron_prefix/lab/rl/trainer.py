"""GRPO actor updates over rollouts that exist already, on one rank of a job.

A step takes the next groups, computes old log-probs (and the reference's) by forward passes through
the same schedule, and makes `ppo_epochs * num_minibatches` optimizer updates. All ranks call `step`
equally often; data-parallel ranks have their own groups and sum up gradients and logs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_prefix.errors import UserError
from megatron_prefix.features.measure.stopwatch import TimedActions
from megatron_prefix.lab.data.rollouts import Group
from megatron_prefix.lab.models.build import build_model, unwrap
from megatron_prefix.lab.models.config import alignment
from megatron_prefix.lab.models.optimizer import build_optimizer
from megatron_prefix.lab.models.presets import ModelSpec
from megatron_prefix.lab.models.weights import global_parameters
from megatron_prefix.lab.plans.dealing import deal
from megatron_prefix.lab.rl import batches, flops, loss, metrics, packing, passes, routes
from megatron_prefix.lab.rl.baseline import packs_of
from megatron_prefix.lab.rl.dataset import RolloutSet, minibatches
from megatron_prefix.lab.rl.job import ModelOptions
from megatron_prefix.lab.rl.metrics import Metrics
from megatron_prefix.lab.rl.passes import Microbatch
from megatron_prefix.lab.rl.recorded_routes import recorded
from megatron_prefix.lab.rl.settings import TrainSettings
from megatron_prefix.lab.rl.step_parts import WithPart
from megatron_prefix.lab.rl.updates import Update, Updater, now
from megatron_prefix.lab.runtime.groups import World
from megatron_prefix.lab.runtime.layout import Layout
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.report import StepReport
from megatron_prefix.run.schedule import PrefixSchedule

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompletedStep:
    """What a step did.

    Attributes:
        number: from 1.
        metrics: the same on every rank, except `prefix_sharing/active` and others that are the
            rank's own.
        updates: in order.
    """

    number: int
    metrics: Metrics
    updates: tuple[Update, ...]


class Trainer:
    """Model, optimizer and schedule of one rank.

    Args:
        settings: of the run.
        rollouts: what to train on.
        options: how the model is built.
        spec: its shape, vocabulary included.
        world: this rank's place.

    Attributes:
        chunks: the rank's model chunks.
        optimizer: Megatron's.
        schedule: of the updates.
        updater: makes the updates.
        routes: of every minibatch of the step, unless routers choose for themselves.
        num_steps: steps done.
        position: number of the next step's first group.

    Raises:
        UserError: settings that this layout cannot run.
    """

    def __init__(
        self,
        settings: TrainSettings,
        rollouts: RolloutSet,
        options: ModelOptions,
        spec: ModelSpec,
        world: World,
    ) -> None:
        check_layout(settings, rollouts, world.layout)
        minibatches(rollouts.take(0, settings.groups_per_step), settings.num_minibatches)
        self.settings, self.rollouts, self.world, self.spec = settings, rollouts, world, spec
        self.num_steps = self.position = 0
        self.routes: list[routes.Routes] = []
        if settings.routes != "own":
            routes.check(spec, options.recompute)
        self.chunks = _build(settings, options, spec, world)
        packing.check(self.chunks, settings.baseline)
        self.optimizer = build_optimizer(
            self.chunks,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            eps=settings.adam_eps,
            clip_grad=settings.clip_grad,
        )
        says = Callbacks(loss.trained, None if settings.routes == "own" else routes.of_call)
        self.schedule = PrefixSchedule(settings.prefix, says, looks_first=settings.looks_first)
        # Separate schedules, so that the report is that of an update. A user's plan is for updates,
        # too.
        passes_config = replace(settings.prefix, plan_file=None)
        self._passes = tuple(PrefixSchedule(passes_config, says) for _ in range(2))
        self._reference: list[Any] = []
        if settings.grpo.kl_coeff:
            self._reference = _build(settings, options, spec, world, reference=True)
        self._peak_flops, self._seed = flops.peak_flops(options.dtype), options.seed
        self._seconds: dict[str, float] = {}
        self.schedule.features.append(WithPart(self.schedule, TimedActions))  # the host waits
        self.updater = Updater(
            self.chunks, self.optimizer, self.schedule, settings, world.device,
            flops.cost_model(spec),
        )  # fmt: skip

    @property
    def report(self) -> StepReport | None:
        """What this rank's last update did; None before it, and in mode "off"."""
        return self.schedule.report

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of the rank's weights, by name in the whole model."""
        chunks = map(unwrap, self.chunks)
        return {n: p.detach().clone() for chunk in chunks for n, p in global_parameters(chunk)}

    def start_from(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copies weights of `weights` into the model, its optimizer and the reference."""
        with torch.no_grad():
            for chunk in map(unwrap, (*self.chunks, *self._reference)):
                for name, parameter in global_parameters(chunk):
                    parameter.copy_(weights[name])
        self.optimizer.reload_model_params()

    def step(self) -> CompletedStep:
        """The next step.

        Raises:
            TrainingError: too many updates in a row were skipped.
        """
        settings, device, begin = self.settings, self.world.device, now(self.world.device)
        self._seconds = {}
        groups = self.rollouts.take(self.position, settings.groups_per_step)
        if settings.routes != "given":
            self.routes = []
        several = minibatches(groups, settings.num_minibatches)
        parts = [self._minibatch(number, some) for number, some in enumerate(several)]
        prepared = now(device)
        updates = tuple(
            self.updater.update(items, weight, self.num_steps + 1)
            for _ in range(settings.ppo_epochs)
            for items, weight in parts
        )
        self.num_steps += 1
        self.position = (self.position + len(groups)) % len(self.rollouts.groups)
        values = self._metrics(groups, updates)
        times = {"train/logprobs_s": prepared - begin, "train/step_s": now(device) - begin}
        usual = metrics.under_verls_names({**values, **times}, self._seconds, self.world.world_size)
        return CompletedStep(self.num_steps, {**values, **times, **usual}, updates)

    def _minibatch(self, number: int, groups: Sequence[Group]) -> tuple[list[Microbatch], float]:
        """This rank's microbatches of a minibatch, and the weight of their losses.

        Ranks get rollouts of equal total cost, so not equally many.
        """
        settings, layout = self.settings, self.world.layout
        # Before groups are cut, since advantages are relative to the whole group.
        groups = [
            batches.with_advantages(group, divide_by_std=settings.divide_by_std) for group in groups
        ]
        stock = settings.prefix.mode != "on" or settings.compare
        ranks = deal(
            groups, self.spec, layout, settings.prefix, settings.baseline.deal,
            stock=stock, seed=self._seed + self.num_steps,
        )  # fmt: skip
        mine = parallel_state.get_data_parallel_rank()
        least = packs_of(ranks, settings.baseline, layout, self._multiple)[mine]
        own = self._routed(number, ranks[mine], least)
        items = self._with_all_logprobs(self._packed(own, least))
        if settings.loss_mean == "token":
            return items, 1.0
        # Megatron takes the mean over a rank's microbatches and then over ranks.
        everyone = sum(len(group.rollouts) for group in groups)
        return items, len(items) * layout.dp / everyone

    def _routed(self, number: int, groups: Sequence[Group], least: int) -> Sequence[Group]:
        """The groups with their routes, if routers are to follow some."""
        if self.settings.routes == "own":
            return groups
        if self.settings.routes == "recorded":
            items = self._packed(groups, least)
            self.routes.append(recorded(self.chunks, items, self.spec))
        return routes.with_routes(groups, self.routes[number], routes.shape_of(self.spec))

    @property
    def _multiple(self) -> int:
        """Of the positions of a microbatch."""
        return alignment(self.spec, self.world.layout)

    def _packed(self, groups: Sequence[Group], least: int) -> list[Microbatch]:
        """Microbatches with advantages, at least so many packs."""
        layout, rank = self.world.layout, parallel_state.get_context_parallel_rank()
        whole = [
            batches.microbatch(rollout, rollout.advantage or 0.0, multiple=self._multiple)
            for group in groups
            for rollout in group.rollouts
        ]
        slices = [batches.on_cp_rank(item, rank, layout.cp) for item in whole]
        baseline = self.settings.baseline
        return packing.microbatches(slices, baseline, cp_size=layout.cp, least=least)

    def _with_all_logprobs(self, items: list[Microbatch]) -> list[Microbatch]:
        """The microbatches with old log-probs and, if needed, the reference's."""
        items = self._with_logprobs(items, "old_logprobs", self._passes[0], self.chunks)
        if self._reference:
            items = self._with_logprobs(items, "ref_logprobs", self._passes[1], self._reference)
        return batches.pinned(items) if self.world.device.type == "cuda" else items

    def _with_logprobs(
        self, items: list[Microbatch], name: str, schedule: PrefixSchedule, chunks: list[Any]
    ) -> list[Microbatch]:
        """Adds the model's current log-probs to microbatches that have none, and takes the time.

        Only the last pipeline stage has and needs them.
        """
        begin = now(self.world.device)
        missing = [number for number, item in enumerate(items) if name not in item]
        made = passes.logprobs(schedule, chunks, [items[m] for m in missing]) if missing else None
        items = list(items)
        for number, values in zip(missing, made or (), strict=made is not None):
            items[number] = batches.with_logprobs(items[number], name, values)
        spent = now(self.world.device) - begin
        self._seconds[name] = self._seconds.get(name, 0.0) + spent
        return items

    def _metrics(self, groups: Sequence[Group], updates: Sequence[Update]) -> Metrics:
        layout = self.world.layout
        counted = {
            "raw_tokens": sum(update.raw_tokens for update in updates),
            "executed_tokens": sum(update.executed_tokens for update in updates),
            "logical_flops": sum(update.logical_flops for update in updates),
            "executed_flops": sum(update.executed_flops for update in updates),
        }
        copies = self.world.world_size // layout.dp
        sums = passes.sum_over_ranks(counted, self.world.device, copies)
        logical, executed = sums.pop("logical_flops"), sums.pop("executed_flops")
        seconds = sum(update.seconds for update in updates)
        rank_seconds = seconds * self.world.world_size
        rewards = [rollout.reward for group in groups for rollout in group.rollouts]
        return {
            **metrics.of_updates(updates),
            "train/reward_mean": sum(rewards) / len(rewards),
            "train/lr": self.settings.lr_at(self.num_steps),
            "train/skipped_updates": self.updater.skipped,
            **metrics.of_tokens(sums, seconds),
            **metrics.of_flops(logical, executed, rank_seconds, self._peak_flops),
            **metrics.of_device(self.world.device),
            **metrics.of_report(self.schedule.report),
        }


def _build(
    settings: TrainSettings,
    options: ModelOptions,
    spec: ModelSpec,
    world: World,
    reference: bool = False,
) -> list[Any]:
    """This rank's model chunks; the reference is the same model before any update, frozen."""
    chunks = build_model(
        spec,
        layout=world.layout,
        dtype=options.dtype,
        device=world.device,
        layer_spec=options.layer_spec,
        recompute="none" if reference else options.recompute,
        seed=options.seed,
        wrap_ddp=not reference,
        use_distributed_optimizer=settings.distributed_optimizer and not reference,
        overlap_grad_reduce=options.overlap_grad_reduce and not reference,
        config_overrides={
            "calculate_per_token_loss": settings.loss_mean == "token",
            **({} if settings.routes == "own" else routes.CONFIG),
        },
        load_hf=options.load_hf,
        sdpa=options.sdpa,
    )
    if reference:
        for chunk in chunks:
            chunk.requires_grad_(False)
    return chunks


def check_layout(settings: TrainSettings, rollouts: RolloutSet, layout: Layout) -> None:
    """Refuse layouts that would hang or compute another loss.

    Raises:
        UserError: see the messages.
    """
    if layout.cp > 1 and settings.loss_mean != "token":
        raise UserError(
            f"--cp {layout.cp} with --loss-mean {settings.loss_mean}: Megatron-Core takes the mean"
            " of each rank's part of a rollout, which is not the rollout's; use --loss-mean token"
        )
    sizes = {len(group.rollouts) for group in rollouts.groups}
    if layout.ep > 1 and len(sizes) > 1 and (settings.prefix.mode != "on" or settings.compare):
        raise UserError(
            f"--ep {layout.ep}: ranks meet in every expert layer, so for Megatron's schedule every"
            f" group must have as many rollouts as the others, and here they have {min(sizes)} to"
            f" {max(sizes)}; use --prefix-schedule on without --compare, or --ep 1"
        )
