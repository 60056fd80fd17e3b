"""What features add to a step, and put around calls.

The core asks every part of a call what its methods say, in the order of the table of features, and
knows none of them by name. A part does not change the plan, and a step only by `build`, which
returns another one. Of other parts it changes only the experts': what counts or is around routers,
before the first action. What it has changed on the model it puts back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from megatron_prefix.config import PrefixConfig
    from megatron_prefix.errors import Reason
    from megatron_prefix.plan.actions import Action, Plan
    from megatron_prefix.plan.cost import CostModel
    from megatron_prefix.plan.gate import Decision
    from megatron_prefix.plan.joint_forest import JointForest
    from megatron_prefix.plan.memory import Footprint, RankMemory
    from megatron_prefix.plan.memory_policy import Rates
    from megatron_prefix.plan.timetable import Sum
    from megatron_prefix.run.calls import Callbacks, CallLayout
    from megatron_prefix.run.execute.executor import Executor, Stage
    from megatron_prefix.run.execute.losses import LossContract
    from megatron_prefix.run.planning import Planning
    from megatron_prefix.run.rank import Rank
    from megatron_prefix.run.read.forward_step_state import Swap
    from megatron_prefix.run.read.read_calls import CallTokens
    from megatron_prefix.run.read.step import Step
    from megatron_prefix.run.read.suspend import Capture, SuspendedStep
    from megatron_prefix.run.report import Reports, StepReport
    from megatron_prefix.run.request import Request
    from megatron_prefix.sidecar.arena import LayerArenas
    from megatron_prefix.sidecar.row_exchange import RowExchange
    from megatron_prefix.tree import Forest
    from megatron_prefix.tree.payload_map import Form, PayloadMap


class Attempt(NamedTuple):
    """One run of a plan; another one, of a leaner plan, follows if memory runs out."""

    step: Step
    joint: JointForest
    plan: Plan
    stages: Sequence[Stage]
    contract: LossContract
    parts: Sequence[StepPart]
    force_all_reduce: bool | None
    report: StepReport
    gathers: bool


class TimedStep(NamedTuple):
    """A step whose time was taken, on this rank.

    Attributes:
        predicted: seconds by prices that nothing measured has changed; 0: not comparable.
        is_settled: whether the first steps, which are measured in a row, are over with this one.
        groups: whose ranks measure the same steps.
        times: what has timed this rank's actions; None: nothing has.
    """

    report: StepReport
    seconds: float
    predicted: float
    is_settled: bool
    groups: Sequence[Any]
    times: Any


class StepPart:
    """What a feature adds to a step. One object a call; methods that a class leaves out do nothing.

    They are called in this order:

    - a call: `refusals`, `keep_local`;
    - its forward steps: `around_forward_steps` all, `swaps` before each begins, `suspended` at its
      model call;
    - reading: `check_model`, `read`, `read_last`, `same`, `tokens`, `check`, `build`, `built`;
      `stock` instead where the stock schedule takes the step now;
    - planning: `rates`, `footprint`, `times`, `decided`;
    - a step: `around_run`, `around_step`; then of each attempt `prepare`, `arenas`, `begin`;
    - an action: `action` around it, `starts`, `saving`, `computing` around what it computes,
      `arguments`, `backward`, `layer_left`, `freed`;
    - between actions and messages: `sum`;
    - behind the actions: `ran`, `end` (always), `input_backwards`, `behind`, `finished`, `timed`.

    Attributes:
        kept: what the feature keeps from call to call of a model in one layout, by name.
        runs_outside: whether what is around a language model runs in forward steps before that is
            called.
        counts_calls: whether a second call of the model in a forward step, without gradients, is
            one too many.
        measures: whether the step is timed, so that another schedule may run it than pays.
        is_tuning: whether later steps still change what the part does: times say nothing yet.
        renews: whether times of steps before the one that was timed last hold no longer.
        holds_memory: whether it keeps device memory from step to step.
        may_offload: whether tensors of segments may wait in host memory.
        even: segments of at most so many positions are padded so that lengths come again
            (TreeOptions); the same on all ranks. 0: none are.
        meets_data_ranks: whether all data-parallel ranks make the segments of this call together,
            and so end or fall back together.
        why_local: why they do not, where they could; "" if nobody wants that.
        why_final: why the step can no longer run again, nor be handed to the stock schedule; "" if
            it can.
        sums: over data-parallel ranks, where they begin in the plan's order; known behind `begin`.
        problem: what makes the step wrong, known when all actions have run; None: nothing.
    """

    runs_outside = counts_calls = is_tuning = holds_memory = may_offload = measures = False
    renews = False
    meets_data_ranks = False
    even = 0
    why_final = why_local = ""
    sums: Sequence[Sum] = ()
    problem: Exception | None = None

    def __init__(self, config: PrefixConfig, rank: Rank, callbacks: Callbacks) -> None:
        self.config, self.rank, self.callbacks = config, rank, callbacks
        self.kept: dict[str, Any] = {}

    def refusals(self) -> Iterator[Reason]:
        yield from ()

    def around_forward_steps(self, capture: Capture) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def check_model(self, chunk: int) -> None:
        """Raises CannotShare if a model chunk cannot be run in segments, in every step."""

    def swaps(self, chunk: int) -> Sequence[Swap]:
        """What else is put back when a forward step of a model chunk is suspended."""
        return ()

    def suspended(self, step: SuspendedStep) -> Any:
        """What of a forward step that calls its model now is needed later; in `step.notes`."""

    def read(self, capture: Capture) -> None:
        """Reads the model calls of this rank, before the core does.

        Raises:
            CannotShare: they cannot be run in segments.
        """

    def read_last(self, capture: Capture, last: CallTokens | None) -> None:
        """Reads what is left when the core has read the calls of this rank.

        Args:
            last: on the last stage what its calls say; None: nothing.

        Raises:
            CannotShare: they cannot be run in segments.
        """

    def same(self, layouts: Sequence[CallLayout]) -> Sequence[Tensor | None]:
        """Rows of every call [positions, ...]: positions are shared only where they are equal. All
        ranks of the pipeline call it.

        Args:
            layouts: of the first stage's calls; () on other stages, where it returns nothing.
        """
        return ()

    def tokens(
        self, lengths: Sequence[int], tokens: NDArray[np.int64] | None
    ) -> NDArray[np.int64] | None:
        """What stands for this rank's tokens, int64 [positions]: equal numbers where they may be
        shared. All ranks of the first stage call it.

        Args:
            lengths: positions of every sample, whole.
            tokens: those of the calls; None if they have none.
        """
        return tokens

    def stock(self) -> None:
        """The stock schedule takes the step: forward steps go on with the model itself."""

    def keep_local(self, why: str) -> None:
        """Data-parallel ranks cannot meet in the segments of this call."""

    def build(
        self,
        step: Step,
        request: Request,
        planning: Planning,
        build: Callable[..., Forest],
        build_alone: Callable[..., Forest],
    ) -> Step | None:
        """A step with segments that this part makes, on a first stage; None: the core makes them.

        Args:
            build: makes segments of samples and their microbatches.
            build_alone: the same where nothing crosses data-parallel ranks; all ranks that share
                experts call it.
        """
        return None

    def built(self, step: Step) -> None:
        """A step that ranks make together has segments, on all stages."""

    def check(self, step: Step) -> None:
        """Raises CannotShare if segments cannot do what the calls of a step ask."""

    def footprint(self, footprint: Footprint) -> Footprint:
        return footprint

    def times(self, times: CostModel) -> CostModel:
        return times

    def rates(self) -> Rates | None:
        """How fast this rank computes and copies, where policies depend on it; None: they do not.
        It may wait for the device."""
        return None

    def decided(self, decision: Decision) -> Decision:
        """What this rank would do with a step, where nothing else keeps it from the other schedule;
        the same on all ranks."""
        return decision

    def around_run(
        self, report: StepReport, request: Request
    ) -> contextlib.AbstractContextManager[Any]:
        """Around a step that was read and planned, whichever schedule runs it now.

        Args:
            request: the call, with all parts that the step has.
        """
        return contextlib.nullcontext()

    def around_step(self, step: Step) -> contextlib.AbstractContextManager:
        """Around all attempts of a step whose segments are known."""
        return contextlib.nullcontext()

    def prepare(self, plan: Plan, predicted: Callable[[], RankMemory]) -> None:
        """Before the stages of an attempt are made."""

    def arenas(
        self, planned: PayloadMap, forms: Sequence[Form], exchange: RowExchange | None
    ) -> LayerArenas | None:
        """What makes the arenas of some of a model chunk's layers; None: all are plain ones.

        Args:
            planned: places of payloads.
            forms: of the layers that leave one.
            exchange: of context-parallel ranks; None: there is one.
        """
        return None

    def begin(self, attempt: Attempt) -> None:
        """Before the first action of an attempt, whose stages are made."""

    def action(self, action: Action | None) -> contextlib.AbstractContextManager:
        """Around an action; None: around the backward of what has made the models' inputs."""
        return contextlib.nullcontext()

    def computing(self, action: Action) -> contextlib.AbstractContextManager[Any]:
        """Around what an action computes, without what it waits for; twice in a backward whose
        forward runs again."""
        return contextlib.nullcontext()

    def saving(
        self, segment: int, chunk: int, received: Tensor | None
    ) -> Callable[[], contextlib.AbstractContextManager] | None:
        """What is around the decoder in the forward of a segment whose backward needs what that
        saves; None: nothing.

        Args:
            received: the stage's input; None on the first.
        """
        return None

    def backward(self, segment: int, chunk: int) -> None:
        """The backward of a segment begins: the gradient of its output is there."""

    def layer_left(self) -> None:
        """In the backward of a segment a layer's mixer is done."""

    def starts(self, action: Action, executor: Executor) -> bool:
        """Before an action; inside of what is around it.

        Returns:
            Whether its segment runs on this rank.
        """
        return True

    def sum(self, number: int) -> None:
        """Sums over data-parallel ranks begin, of so many microbatches from the first on."""

    def ran(self) -> None:
        """All actions have run here."""

    def freed(self, segment: int, chunk: int) -> None:
        """What a segment's forward has saved in a model chunk is gone: after its backward, or after
        the forward itself where that runs again."""

    def arguments(self, segment: int, chunk: int) -> dict[str, Any]:
        return {}

    def input_backwards(self) -> Sequence[Callable[[], None]]:
        """Backwards of what has made the models' inputs, to run behind an attempt's actions."""
        return ()

    def behind(self) -> None:
        """All actions of the step have run here, or the step has failed here; before ranks ask one
        another, and before gradients are finalized."""

    def finished(self) -> None:
        """The step is good on all ranks, and its gradients are final.

        Raises:
            Exception: it is not, after all.
        """

    def end(self) -> None:
        """An attempt is over, whatever has happened: nothing of it is left."""

    def timed(self, step: TimedStep) -> bool:
        """After a step whose time was taken, whichever schedule ran it; all ranks that measure it
        call this.

        Returns:
            Whether its times say what later steps take; the same on all ranks.
        """
        return True


def around(parts: Sequence[StepPart], action: Action | None) -> contextlib.AbstractContextManager:
    """What all parts have around an action."""
    return entered(part.action(action) for part in parts)


def entered(
    contexts: Iterable[contextlib.AbstractContextManager],
) -> contextlib.AbstractContextManager:
    """Contexts one in another, entered now and left together."""
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        return stack.pop_all()


Run = Callable[["Request"], list[Any]]
"""Runs a call with the prefix schedule, or leaves it to the stock one; returns what Megatron's
schedules return."""


class Around:
    """A feature around the calls of one schedule: what a class leaves out changes nothing."""

    def __init__(self, config: PrefixConfig, reports: Reports) -> None:
        self.config, self.reports = config, reports

    def call(self) -> contextlib.AbstractContextManager[Any]:
        """Entered around every call, whichever schedule runs it."""
        return contextlib.nullcontext()

    def shared(self, run: Run, request: Request) -> list[Any]:
        """Runs a call that may be shared; all ranks that make a step together come here.

        Args:
            run: what this is around; it may be given a changed request.
        """
        return run(request)
