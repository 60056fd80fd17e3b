"""What actions and steps take on this machine, for the gate's next decisions.

A few steps are measured: in mode "auto" the first ones and then one in 50, in mode "on" those of
the first that parts of steps tune themselves by. In those the host waits for the device
at the beginning and at the end, and all ranks put together what they have measured; all others run
as without it. Ranks that must decide alike have the same numbers: those of the first rank.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import time
from collections.abc import Iterator, Sequence

import torch

from megatron_prefix import __version__
from megatron_prefix.config import PrefixConfig
from megatron_prefix.device.clock import wait_for
from megatron_prefix.errors import UserError
from megatron_prefix.features.measure.byte_meter import ByteMeter, SegmentBytes
from megatron_prefix.features.measure.cost_file import Measured, read_costs, write_costs
from megatron_prefix.features.measure.cost_fit import KEPT, Evidence, StepTime, together
from megatron_prefix.features.measure.outlines import Outlines
from megatron_prefix.features.measure.stopwatch import NAME as STOPWATCH
from megatron_prefix.features.measure.stopwatch import Stopwatch
from megatron_prefix.parts import StepPart, TimedStep
from megatron_prefix.plan.cost import CostModel, action_features
from megatron_prefix.plan.files import check_writable
from megatron_prefix.plan.gate import Decision, decide
from megatron_prefix.run.agreement import all_say, first_says
from megatron_prefix.run.costs import Costs, guessed, judging_alike
from megatron_prefix.run.rank import Rank
from megatron_prefix.run.report import StepReport
from megatron_prefix.run.request import Request

logger = logging.getLogger(__name__)

FIRST, EVERY = (2, 3, 4, 5), 50
"""Steps with gradients that are measured: these, and every so many."""
TUNED = 16
"""Up to this step parts may ask for more."""
DOUBT = 1.5
"""A schedule that was never timed gets a step to itself where the prediction is this close."""
_KERNELS = ("flash-attn", "flash-attn-4", "nvidia-cudnn-frontend", "transformer-engine")


def other_way(config: PrefixConfig, decision: Decision) -> Decision:
    """The other schedule, to time it, if the prediction is close to the bar; else the decision."""
    ratio = decision.predicted_speedup / config.min_speedup
    if config.mode != "auto" or not 1 / DOUBT <= ratio <= DOUBT:
        return decision
    name = "stock" if decision.share else "prefix"
    reason = f"predicted speedup {decision.predicted_speedup:.2f}: times the {name} schedule"
    return Decision(not decision.share, reason, decision.share, decision.predicted_speedup)


class CostMeter:
    """Times work of one model in one layout, for its `Costs`; ranks of one schedule time theirs
    together.

    Attributes:
        due: whether the step that runs is measured.
    """

    def __init__(
        self, config: PrefixConfig, rank: Rank, costs: Costs, num_bytes: ByteMeter
    ) -> None:
        self._costs, self._bytes = costs, num_bytes
        self._config, self._key, self._device = config, key_of(rank, config.kernel), rank.device
        self._prior = guessed(rank, rank.frozen_share)
        self._groups = judging_alike(rank)
        self._measured = Evidence()
        self._num_steps = 0
        self._ran: set[bool] = set()
        # A trainer's groups that do not tell which ranks are data-parallel: these may meet later,
        # without having agreed on a schedule. For experts see `Planning.proposed`.
        self._agrees = rank.data_ranks is not None and rank.experts is None
        self._doubted: float | None = None
        self.due = False

    def _loaded(self) -> Evidence:
        read: Measured | str = Measured()
        path = self._config.cost_file or ""
        try:
            read = read_costs(path).get(self._key, Measured())
            check_writable(path, makes_folders=True)
        except UserError as error:
            read = str(error)
        read = first_says(read, self._groups)
        if isinstance(read, str):
            raise UserError(read)
        self._costs.num_bytes = read.num_bytes
        return read.times

    def begin(self, request: Request) -> Decision | None:
        """Counts a step; all ranks call this for every step, and measure the same ones (`due`).

        Returns:
            The decision for a step that times the stock schedule, where all ranks know it before
            they read the step: an earlier one's prediction has left open which is faster.

        Raises:
            UserError: the user's file cannot be read or written; on every rank.
        """
        self.due = False
        if request.rank.forward_only:
            return None
        if not self._num_steps:
            if self._config.cost_file:
                self._measured = self._loaded()
                self._costs.times = self._measured.times(self._costs.times)
            if self._costs.counts:
                self._bytes.tell(self._groups)
        self._num_steps += 1
        tunes = any(part.is_tuning for part in request.parts)
        self.due = tunes and FIRST[0] <= self._num_steps <= TUNED
        if self._config.mode != "auto":
            return None
        self.due |= self._num_steps in FIRST and not self._knows_both
        self.due |= self._num_steps % EVERY == 0
        if not self.due or self._doubted is None or self._measured.measured(False):
            return None
        return other_way(self._config, decide(self._config, self._doubted))

    @property
    def _knows_both(self) -> bool:
        return bool(self._measured.measured(True) and self._measured.measured(False))

    def ran_stock(self) -> None:
        """The stock schedule has run a step with gradients: its next one is no longer its first."""
        self._ran.add(False)

    def chosen(self, decision: Decision) -> Decision:
        """The decision, or the other schedule where that was never timed and could be faster.

        The first run of a schedule is not timed, so a schedule that is new runs twice.
        """
        if self.due and self._measured.measured(decision.share) and not self._knows_both:
            return other_way(self._config, decision)
        return decision

    @contextlib.contextmanager
    def step(
        self, report: StepReport, request: Request, outlines: Outlines | None = None
    ) -> Iterator[SegmentBytes | None]:
        """Surrounds a step after its planning, whichever schedule runs it; gives what counts the
        bytes of its segments, if any do.

        Args:
            outlines: of a step that was not read.
        """
        begin = 0.0
        if due := self.due:
            wait_for(self._device)
            begin = time.perf_counter()
        with self._bytes.step(report, request, self._groups, self._num_steps) as counter:
            yield counter
            if due:
                wait_for(self._device)
            seconds = time.perf_counter() - begin
        if due:
            if outlines is not None:
                report.prediction = outlines.predicted(request)
            self._learn(report, request, seconds)
        elif self._bytes.is_due(self._num_steps) and not request.rank.forward_only:
            self._save()
        self._ran.add(report.decision.share)

    def _learn(self, report: StepReport, request: Request, seconds: float) -> None:
        evidence, share = Evidence(), report.decision.share
        stopwatch: Stopwatch | None = report.features.get(STOPWATCH)
        if stopwatch is not None and share and not report.retried:
            timed = stopwatch.seconds()
            work = [action_features(report.plan, action, request.rank.stage) for action in timed]
            evidence = Evidence.of_actions(work, list(timed.values()), self._prior)
        if report.prediction is not None and share in self._ran and not report.retried:
            prediction = report.prediction
            features = prediction.prefix_features if share else prediction.stock_features
            if features.any():
                step = StepTime(share, tuple(features.tolist()), seconds)
                evidence = evidence.and_also(Evidence(steps=(step,)))
        for group in self._groups:
            evidence = together(all_say(evidence, group), self._costs.times)
        if self._is_typical(report, request.parts, seconds):
            renewed = any(part.renews for part in request.parts)
            self._measured = self._measured.and_also(evidence, 0.0 if renewed else KEPT)
        times = self._measured.times(self._prior)
        learned = times, self._doubt(report, times)
        self._costs.times, self._doubted = first_says(learned, self._groups)
        logger.info("measured step %d: %s", self._num_steps, self._costs.times)
        self._save()

    def _is_typical(self, report: StepReport, parts: Sequence[StepPart], seconds: float) -> bool:
        prediction, predicted = report.prediction, 0.0
        if prediction is not None and report.decision.share in self._ran and not report.retried:
            share = report.decision.share
            features = prediction.prefix_features if share else prediction.stock_features
            predicted = self._prior.of(features)
        is_settled = self._num_steps >= FIRST[-1]
        times = report.features.get(STOPWATCH)
        step = TimedStep(report, seconds, predicted, is_settled, self._groups, times)
        typical = [part.timed(step) for part in parts]  # all parts see it
        return all(typical)

    def _doubt(self, report: StepReport, times: CostModel) -> float | None:
        """The predicted speedup of a step, by what is known now, if it is so close that the stock
        schedule is to be timed; of a step that has no prediction what was said before."""
        prediction = report.prediction
        if prediction is None or not prediction.prefix_features.any():
            return self._doubted
        if not self._agrees or report.crossed is not None or not self._measured.measured(True):
            return None
        stock = times.stock_factor * times.of(prediction.stock_features)
        speedup = stock / (times.prefix_factor * times.of(prediction.prefix_features))
        decision = decide(self._config, speedup)
        close = decision.share and not other_way(self._config, decision).share
        return speedup if close else None

    def _save(self) -> None:
        path = self._config.cost_file
        if path is None or any(group.rank() for group in self._groups):
            return
        try:
            write_costs(path, self._key, Measured(self._measured, self._costs.num_bytes))
        except UserError as error:  # a full disk must not end the training
            logger.warning("the measured costs could not be saved: %s", error)


def key_of(rank: Rank, kernel: str) -> str:
    """Names what measurements are good for: a model, layout, device and version."""
    config, device, unit = rank.config, rank.device, rank.model.cost.forward
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    versions = [f"megatron_prefix {__version__}", f"torch {torch.__version__}"]
    for package in _KERNELS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    layout = (
        f"pp {rank.num_stages} vpp {len(rank.models)} tp {config.tensor_model_parallel_size}"
        f" cp {config.context_parallel_size} ep {config.expert_model_parallel_size}"
        f" sp {int(bool(config.sequence_parallel))}"
    )
    model = (
        f"{config.num_layers} layers, {unit.positions:.6g} + {unit.scored:.6g} FLOPs a position,"
        f" {unit.pairs:.6g} a pair, {config.params_dtype}"
    )
    if rank.frozen_share:
        model += f", {rank.frozen_share:.2f} of the weights frozen"
    recompute = f"recompute {config.recompute_granularity or 'none'}"
    if config.recompute_granularity:
        how = config.recompute_method, config.recompute_num_layers, config.recompute_modules
        recompute += " " + " ".join(map(str, filter(None, how)))
    if config.fp8:
        recompute += f"; fp8 {config.fp8} {config.fp8_recipe}"
    return "; ".join([model, layout, recompute, name, f"kernel {kernel}", ", ".join(versions)])
