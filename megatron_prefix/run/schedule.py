"""Megatron's forward-backward function, with the prefix schedule behind it.

`get_forward_backward_func()` replaces Megatron's function of that name; what it returns
has Megatron's keyword contract (megatron/core/pipeline_parallel/schedules.py) and its return value.

A call becomes a request (request.py) that takes one of two routes (route.py): Megatron's schedule
runs the step, or its forward steps are suspended in their model calls. Then the step is **read**
(step_reader.py), **planned** (planning.py), and the plan is **run** (step_run.py); or the forward
steps go on with Megatron's schedule.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import CannotShare, UserError, keywords, unexpected
from megatron_prefix.megatron.stock import call_arguments, run_stock, stock_arguments
from megatron_prefix.parts import entered
from megatron_prefix.plan.gate import Decision
from megatron_prefix.plan.joint_forest import JointForest
from megatron_prefix.refusals.own_errors import as_refusal, softened
from megatron_prefix.run.agreement import tried
from megatron_prefix.run.calls import Callbacks, ModelCall, Samples
from megatron_prefix.run.execute.losses import are_in_order
from megatron_prefix.run.execute.memory_control import MemoryControl
from megatron_prefix.run.parts_of_call import around_calls
from megatron_prefix.run.planning import Planning
from megatron_prefix.run.read.loss_variables import code_name
from megatron_prefix.run.read.step import Step
from megatron_prefix.run.read.suspend import Capture
from megatron_prefix.run.report import Reports, StepReport, log_shared
from megatron_prefix.run.request import Request, StepKind
from megatron_prefix.run.restart import Restart
from megatron_prefix.run.route import LOSSES_EXCHANGE, Requests, route
from megatron_prefix.run.step_reader import StepReader, uncollected
from megatron_prefix.run.step_run import StepRun, StepUndone
from megatron_prefix.tree.cp_layout import Slices

logger = logging.getLogger(__name__)
NEW_FUNCTION = (
    "get_forward_backward_func got a new function with the same code: define it once, outside the"
    " step. Each new function starts a new schedule, and mode auto does not share its first step"
)
_num_alike: collections.Counter[Any] = collections.Counter()
"""Schedules that were made of the same configuration and of functions with the same code."""


@dataclass(eq=False)
class PrefixSchedule:
    """A forward-backward function with the arguments and results of Megatron-Core's schedules
    (megatron/core/pipeline_parallel/schedules.py).

    Keep one for all steps: it keeps plans, measurements and reports.

    Attributes:
        config: the settings.
        callbacks: what the trainer says of its microbatches that its model calls do not say.
        features: what runs around every call (watch, verify, watchdog, ...), the innermost first.
        reports: the last step's report, and which lines have been logged.
        looks_first: whether the first step of each kind is watched for what would not work in
            another order (docs/when-a-step-is-shared.md); modes "auto" and "observe" run it with
            the stock schedule. For trainers whose code is not known. Read when the schedule is
            made.
    """

    config: PrefixConfig = field(default_factory=PrefixConfig)
    callbacks: Callbacks = field(default_factory=Callbacks)
    looks_first: bool = False

    def __post_init__(self) -> None:
        self.memory = MemoryControl(self.config)
        self.planning = Planning(self.config, self.memory)
        self.reports = Reports(self.config.mode)
        self.requests = Requests(self.config)
        self._reader = StepReader(self.memory, self.planning, self.reports)
        self.features = around_calls(self.config, self.reports, looks_first=self.looks_first)

    @property
    def report(self) -> StepReport | None:
        """What the last step did; None before the first one, and in mode "off"."""
        return self.reports.last

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Enters what features do around a call, for callers who need it around more than that."""
        with contextlib.ExitStack() as stack:
            for feature in reversed(self.features):
                stack.enter_context(feature.call())
            yield

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
        """Runs forward and backward of a step's microbatches, and reduces gradients as Megatron's
        schedules do.

        All ranks that share a pipeline, tensors, context or experts call it for the same step, and
        wait for one another in it.

        Args:
            forward_step_func: (data iterator, model chunk) -> (output, loss function).
            data_iterator: yields the microbatches; a list with one for each model chunk under
                interleaving; None on ranks that read no data.
            model: the rank's model chunk, or a list of them.
            num_microbatches: of this step, on this data-parallel rank.
            forward_only: compute no gradients.
            collect_non_loss_data: return what the loss function gives for `non_loss_data=True`.
            pg_collection: the ranks' process groups; default: Megatron's global ones.
            force_all_reduce: all-reduce gradients where Megatron would reduce-scatter them.
            rest: `seq_length`, `micro_batch_size`, `decoder_seq_length`, `first_val_step`,
                `adjust_tensor_shapes_fn`, `p2p_communicator`: used by the stock schedule only. The
                prefix schedule takes shapes from the model calls.

        Returns:
            Megatron's `forward_data_store`: an entry for each microbatch, in their order, on the
            last pipeline stage; else an empty list.

        Raises:
            UserError: an invalid argument or model call.
            CannotShare: something that the prefix schedule cannot run, in mode "on".
            StepOutOfMemory: the step does not fit in device memory.
            StepFailed: another rank has failed.
            DataEnded: the iterator has fewer microbatches.
            TypeError: an argument that neither this nor Megatron's schedules have.
        """
        if unknown := rest.keys() - call_arguments():
            known = [*keywords(type(self).__call__), *sorted(call_arguments())]
            raise TypeError(unexpected(type(self).__call__, min(unknown), known))
        arguments = dict(
            rest, forward_step_func=forward_step_func, collect_non_loss_data=collect_non_loss_data,
            num_microbatches=num_microbatches, force_all_reduce=force_all_reduce, model=model,
            forward_only=forward_only, data_iterator=data_iterator, pg_collection=pg_collection,
        )  # fmt: skip
        with self.around():
            return self._run(arguments)

    def _run(self, arguments: Mapping[str, Any]) -> list[Any]:
        if self.config.mode == "off":
            return run_stock(arguments)
        request = self.requests.of(arguments, self.callbacks)
        if isinstance(request, UserError):
            return self._stock(request, arguments)
        if (reason := route(request.kind)) is not None:
            return self._stock(reason, arguments)
        run = self._captured
        for feature in self.features:
            run = functools.partial(feature.shared, run)
        return run(request)

    def _stock(self, reason: UserError | Decision, arguments: Mapping[str, Any]) -> list[Any]:
        """Megatron's schedule, for a reason that is reported; in mode "on" an error is raised."""
        if isinstance(reason, UserError):
            self.reports.refused(reason)
        else:
            self.reports.stock(reason)
        return run_stock(arguments)

    def _captured(self, request: Request) -> list[Any]:
        """Runs a step whose forward steps are suspended in their model calls."""
        if request.stock is not None:
            return request.stock()
        rank, iterator = request.rank, request.arguments["data_iterator"]
        request.costs.begin(rank)
        with contextlib.ExitStack() as stack:
            restart = None
            if self.config.mode != "on":
                restart = stack.enter_context(contextlib.closing(Restart(iterator, rank)))
                iterator = restart.data_iterator
            return self._suspended(Capture(request, iterator), restart, request)

    def _suspended(self, capture: Capture, restart: Restart | None, request: Request) -> list[Any]:
        """Reads, plans and runs a step, or gives it to the stock schedule: from its begin, where
        segments have run."""
        arguments = request.arguments
        with contextlib.ExitStack() as around, contextlib.ExitStack() as idle:
            around.enter_context(capture.running())
            around.callback(self.memory.end)
            idle.enter_context(uncollected())
            step, request = self._reader.read(capture, request)
            joint = None if step is None else self._plan(step, request)
            report: Any = self.report
            with entered(part.around_run(report, request) for part in request.parts):
                if step is not None and joint is not None:
                    capture.forget_arguments()
                    run = StepRun(self, capture, request, step, joint, idle)
                    try:
                        return run.run()
                    except StepUndone as undone:
                        self._undone(undone, request.kind)
                    # The frames of the attempt, and all tensors in them, are gone by now.
                    step = joint = run = None  # type: ignore[assignment]
                elif not capture.is_broken:
                    idle.close()
                    for part in request.parts:
                        part.stock()
                    return run_stock(arguments, forward_step_func=capture.stock_step)
                idle.close()
                around.close()
                if restart is None:
                    raise RuntimeError("mode on has not raised what is in the way of a step")
                return restart.run(arguments, capture.tokens)

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
        self.reports.refused(reason)

    def _plan(self, step: Step, request: Request) -> JointForest | None:
        """The segments that run; None if the stock schedule is the better one, or no plan can be
        made on a rank. Either is reported."""
        joint, error = tried(lambda: self._planned(step, request))
        problem = softened(error, self.config.mode)
        if problem is None:
            return joint
        self.planning.forget()
        if not isinstance(problem, CannotShare):
            raise problem
        self.reports.refused(problem)
        return None

    def _planned(self, step: Step, request: Request) -> JointForest | None:
        rank, kind = request.rank, request.kind
        report, joint = self.planning.decided(step, request)
        of_parts = (part.why_local for part in request.parts)
        report.why_alone = step.why_alone or next(filter(None, of_parts), "")
        if kind.ordered and report.decision.share:
            last = report.plan.actions_of(rank.num_stages - 1, len(rank.models) - 1)
            if not are_in_order(step, last):
                reason = f"{LOSSES_EXCHANGE}, and segments would call them in another order"
                stock = replace(report.decision, share=False, fallback=True, reason=reason)
                report.decision = stock
        self.reports.put(report)
        shares = report.decision.share
        if (shares or self.config.mode == "observe") and self.looks_first and not kind.logged:
            kind.logged = True
            log_shared(report, rank, self.reports.logged, shares)
        measures = any(part.measures for part in request.parts)
        if kind.backoff and not (rank.forward_only or measures):
            kind.backoff.note(useful=not report.decision.fallback)
        return joint if shares else None


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
    """Takes the place of megatron.core.pipeline_parallel.get_forward_backward_func.

    Call it as often as you like: the same arguments give the same schedule. Define functions that
    you pass once, outside the step. A function that is defined anew in every step starts a new
    schedule each time, and mode "auto" runs the first step of a schedule with Megatron's, so
    nothing would be shared. That is logged once.

    Args:
        megatrons: Megatron's own arguments (pp_size, vp_size), accepted and not used; so is
            schedule_pg_collection of 0.19, by name.
        prefix_config: the settings; default: `PrefixConfig()`, which shares every step.
        trained: says which positions of a model call carry loss; see `Callbacks`.
        routes: says which experts the tokens of a model call go to; see `Callbacks`.
        samples: says which positions of a microbatch carry loss; see `Callbacks`.
        passes_together: data-parallel ranks make equally many calls without gradients.
        slices: how model calls are cut for context-parallel ranks.
        masks_tokens: the loss_mask of a model call is over tokens, and so is ignored.
        sums_gradients: the trainer itself sums gradients over data-parallel ranks; see `Callbacks`.

    Returns:
        The schedule: call it as Megatron's, `schedule(forward_step_func=..., ...)`.

    Raises:
        UserError: a PrefixConfig that is not given by name.
        TypeError: an argument that neither this function nor Megatron's has.
    """
    if others and (unknown := others.keys() - stock_arguments()):
        names = keywords(get_forward_backward_func)
        raise TypeError(unexpected(get_forward_backward_func, min(unknown), names, PrefixConfig))
    if any(isinstance(argument, PrefixConfig) for argument in megatrons):
        raise UserError("give the configuration by name: prefix_config=PrefixConfig(...)")
    callbacks = Callbacks(
        trained, routes, samples, passes_together, slices, masks_tokens, sums_gradients
    )
    return _schedule(prefix_config or PrefixConfig(), callbacks)
