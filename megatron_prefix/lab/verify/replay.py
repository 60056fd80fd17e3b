"""Many GRPO steps from the same weights by either schedule: how far the parameters drift apart.

Three runs that know nothing of one another: the stock schedule; the stock schedule again, with the
same rollouts in another reduction order; the prefix schedule.  Every run makes its own old
log-probs, updates and optimizer states, step after step.  The distance between the two stock runs
is the noise floor: what rounding alone makes of one recipe.  If a model has experts, a rounding
can send a token to another one, and then distances are those of a choice; so the routers of all
three runs may be told to follow those that the stock run chose before each step (lab/rl/routes.py).

The other order: the microbatches and the rollouts of each backwards, and another attention kernel
(torch's instead of Megatron's).  So sums over keys, over positions and over microbatches are added
up in another order, as the prefix schedule does; turning microbatches round alone would leave the
forward pass as it is, bit by bit.  Microbatches keep their rollouts, since Megatron balances
experts by microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from megatron_prefix.lab.data.rollouts import Group
from megatron_prefix.lab.models.presets import ModelSpec
from megatron_prefix.lab.numerics.policy import DRIFT_RATIO
from megatron_prefix.lab.rl import snapshot
from megatron_prefix.lab.rl.dataset import RolloutSet
from megatron_prefix.lab.rl.job import ModelOptions
from megatron_prefix.lab.rl.settings import TrainSettings
from megatron_prefix.lab.rl.trainer import CompletedStep, Trainer
from megatron_prefix.lab.rl.updates import TrainingError
from megatron_prefix.lab.runtime.groups import World

RUNS = ("stock", "reordered", "prefix")
MEASURES = ("max", "mean", "rms")


@dataclass(frozen=True)
class Distance:
    """Between the parameters of two runs, over all elements of the model.

    Attributes:
        max: largest absolute difference.
        mean: mean absolute difference.
        rms: root of the mean squared difference.
    """

    max: float
    mean: float
    rms: float


@dataclass(frozen=True)
class ReplayStep:
    """One step of the three runs.

    Attributes:
        number: from 1.
        loss: by run, the mean over the trained tokens of the step's updates.
        weighted_logprob: likewise, of advantage times log-prob.
        drift: after the step, the prefix schedule's parameters from the stock schedule's.
        floor: likewise, the second stock run's.
        raw_tokens, executed_tokens: positions of the prefix run's updates, without and with
            sharing; equal if mode "auto" took the stock schedule.
        seconds: by run, the whole step.
        skipped: by run, updates of the step that were skipped: loss or gradient was not finite.
        updates: of the step, of one run.
    """

    number: int
    loss: dict[str, float]
    weighted_logprob: dict[str, float]
    drift: Distance
    floor: Distance
    raw_tokens: int
    executed_tokens: int
    seconds: dict[str, float]
    skipped: dict[str, int]
    updates: int

    def ratio(self, measure: str) -> float:
        """Drift over floor; 0 if neither run differs, infinite if only the drift does."""
        drift, floor = getattr(self.drift, measure), getattr(self.floor, measure)
        if drift == 0.0 and floor == 0.0:
            return 0.0
        return drift / floor if floor else math.inf


@dataclass
class Replay:
    """The result; the keys of `replay --json`.

    Attributes:
        steps: in order.
        limit: largest accepted ratio of drift to floor.
        ratio_max: the largest ratio of all steps, by measure.
        shared_steps: steps in which the prefix schedule computed fewer positions.
        failures: what is outside the limit, and what else went wrong.
        passed: nothing did, and the replay has ended.
        ended: whether all steps were run; false in what is written meanwhile.
    """

    steps: list[ReplayStep] = field(default_factory=list)
    limit: float = DRIFT_RATIO
    ratio_max: dict[str, float] = field(default_factory=dict)
    shared_steps: int = 0
    failures: list[str] = field(default_factory=list)
    passed: bool = False
    ended: bool = False


def trainers(
    settings: TrainSettings,
    groups: tuple[Group, ...],
    options: ModelOptions,
    spec: ModelSpec,
    world: World,
) -> dict[str, Trainer]:
    """The three runs, by name, with the same weights.

    Args:
        settings: of the prefix run; its `prefix.mode` is "auto" or "on", and its `routes` "given"
            if all runs are to follow the stock run's.
        groups: what is replayed, in order.
        options, spec, world: see Trainer.
    """
    stock = replace(settings, prefix=replace(settings.prefix, mode="off", plan_file=None))
    backwards = replace(stock, baseline=replace(settings.baseline, backwards=True))
    if settings.routes == "given":
        stock = replace(stock, routes="recorded")
    which = ((stock, options), (backwards, replace(options, sdpa=True)), (settings, options))
    return {
        name: Trainer(one, RolloutSet(groups), how, spec, world)
        for name, (one, how) in zip(RUNS, which, strict=True)
    }


def replayed(runs: dict[str, Trainer], steps: int) -> Iterator[ReplayStep]:
    """Steps of all runs; every rank gets the same ones.

    Raises:
        TrainingError: a loss or gradient that is not finite.
    """
    device = runs["stock"].world.device
    for number in range(1, steps + 1):
        done = {}
        for name, run in runs.items():  # the stock run first
            if run.settings.routes == "given":
                run.routes = runs["stock"].routes
            done[name] = run.step()
        of = {name: list(parameters(run)) for name, run in runs.items()}
        yield ReplayStep(
            number,
            _values(done, "train/loss"),
            _values(done, "train/weighted_logprob"),
            distance(of["stock"], of["prefix"], device),
            distance(of["stock"], of["reordered"], device),
            _tokens(done["prefix"], "raw"),
            _tokens(done["prefix"], "executed"),
            _values(done, "train/step_s"),
            {name: sum(u.skipped for u in step.updates) for name, step in done.items()},
            len(done["stock"].updates),
        )


def judged(
    steps: Iterable[ReplayStep], watch: Callable[[Replay], None] = lambda result: None
) -> Replay:
    """The result of all steps; an early end, at a loss that is not finite, is a failure.

    Args:
        steps: in order.
        watch: gets what there is after every step, judged as a replay that has not ended.
    """
    result = Replay()
    try:
        for step in steps:
            result.steps.append(step)
            watch(judge(Replay(list(result.steps))))
        result.ended = True
    except TrainingError as error:
        result.failures.append(str(error))
    return judge(result)


def judge(result: Replay) -> Replay:
    """Fills in the verdict: at every step, by every measure, drift within `limit` floors.

    A step whose numbers are not finite fails, and so does a replay that has not ended, or compared
    nothing: nothing was shared, a run made no update, or the two stock runs never differed.
    """
    if not (result.ended or result.failures):
        result.failures.append(f"the replay has not ended: these are its first {_steps(result)}")
    result.shared_steps = sum(step.executed_tokens < step.raw_tokens for step in result.steps)
    result.failures.extend(_not_finite(result.steps))
    for measure in MEASURES:
        ratios = {step.number: step.ratio(measure) for step in result.steps}
        worst = max(ratios, key=lambda number: _order(ratios[number]), default=None)
        if worst is None:
            continue
        result.ratio_max[measure] = ratios[worst]
        outside = [number for number, ratio in ratios.items() if not ratio <= result.limit]
        if outside:
            result.failures.append(
                f"{measure} difference: {len(outside)} of {len(ratios)} steps exceed"
                f" {result.limit:g} times the noise floor, from step {outside[0]} on; most"
                f" {ratios[worst]:.3g} times, step {worst}"
            )
    result.failures.extend(_nothing_compared(result))
    result.passed = not result.failures
    return result


def _steps(result: Replay) -> str:
    return f"{len(result.steps)} step{'' if len(result.steps) == 1 else 's'}"


def _not_finite(steps: Sequence[ReplayStep]) -> Iterator[str]:
    for what, curve in (("loss", "loss"), ("log-prob x advantage", "weighted_logprob")):
        for run in RUNS:
            bad = [s.number for s in steps if not math.isfinite(getattr(s, curve)[run])]
            if bad:
                yield (
                    f"{what} of the {run} run is not finite in {len(bad)} of {len(steps)} steps,"
                    f" from step {bad[0]} on"
                )


def _nothing_compared(result: Replay) -> Iterator[str]:
    """Why equal parameters would mean nothing."""
    if not result.shared_steps:
        yield "the prefix schedule ran in no step: there is nothing to compare"
    updates = sum(step.updates for step in result.steps)
    for run in RUNS:
        if updates and sum(step.skipped[run] for step in result.steps) == updates:
            yield f"the {run} run skipped all of its {updates} updates: there is nothing to compare"
    if result.steps and all(step.floor.max == 0.0 for step in result.steps):
        yield (
            "the two stock runs are equal after every step, so there is no noise to measure by: no"
            " update moved a parameter (look at --lr), or order makes no difference to these"
            " rollouts"
        )


def _order(ratio: float) -> float:
    return math.inf if math.isnan(ratio) else ratio


def _tokens(step: CompletedStep, which: str) -> int:
    return int(step.metrics[f"prefix_sharing/{which}_tokens"] or 0)


def _values(done: dict[str, CompletedStep], metric: str) -> dict[str, float]:
    values = {name: step.metrics[metric] for name, step in done.items()}
    return {n: math.nan if value is None else float(value) for n, value in values.items()}


# Parameters ---------------------------------------------------------------------------------------


def parameters(run: Trainer) -> Iterator[Tensor]:
    """The parameters of the whole model that this rank answers for, in a fixed order.

    In 16 bit the optimizer's fp32 main parameters: model parameters hide what is less than a
    rounding.  What several ranks hold (data-parallel copies, norms of tensor-parallel ranks, tied
    embeddings) the first of them answers for; the distributed optimizer's shards are all counted.
    """
    for _, parameter in snapshot.named_parameters(run.chunks):
        main = getattr(parameter, "main_param", parameter)
        sharded = getattr(parameter, "main_param_sharded", False)
        if main is None or not (sharded or _first_copy(parameter)):
            continue
        if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter):
            yield main.detach()


def _first_copy(parameter: Tensor) -> bool:
    if getattr(parameter, "allreduce", True):
        return int(parallel_state.get_data_parallel_rank(with_context_parallel=True)) == 0
    return int(parallel_state.get_expert_data_parallel_rank()) == 0


@torch.no_grad()
def distance(expected: Sequence[Tensor], found: Sequence[Tensor], device: torch.device) -> Distance:
    """Between two runs' parameters, over all ranks; every rank of the job calls this.

    Differences are taken in the parameters' dtype or fp32 and added up in fp64, on the device.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    largest = torch.zeros((), dtype=torch.float64, device=device)
    for one, other in zip(expected, found, strict=True):
        apart = (one - other).abs_()
        largest = torch.maximum(largest, apart.max().double())
        sums[0] += apart.sum(dtype=torch.float64)
        sums[1] += apart.square_().sum(dtype=torch.float64)
        sums[2] += apart.numel()
    dist.all_reduce(sums)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    absolute, squares, count = sums.tolist()
    return Distance(float(largest), absolute / count, math.sqrt(squares / count))
