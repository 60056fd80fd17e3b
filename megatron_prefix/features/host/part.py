"""Host memory as a part of the step: saved tensors of segments, and payloads of some layers."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.core.utils import get_model_config

from megatron_prefix.errors import refused
from megatron_prefix.features.host import rates
from megatron_prefix.features.host.arena import HostLayers
from megatron_prefix.features.host.segment import OffloadedSegment, Offloader, addresses
from megatron_prefix.features.host.transfers import transfers_of
from megatron_prefix.layers.precision import is_fp8
from megatron_prefix.parts import Attempt, StepPart
from megatron_prefix.plan.memory_policy import BACKWARDS_AHEAD
from megatron_prefix.refusals.table import HOST_LAYERS_CP, OFFLOAD_FP8, OFFLOAD_OVERLAP

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_prefix.config import PrefixConfig
    from megatron_prefix.errors import Reason
    from megatron_prefix.plan.actions import Action, Plan
    from megatron_prefix.plan.memory import Footprint, RankMemory
    from megatron_prefix.plan.memory_policy import Rates
    from megatron_prefix.run.calls import Callbacks
    from megatron_prefix.run.execute.executor import Stage
    from megatron_prefix.run.rank import Rank
    from megatron_prefix.sidecar.row_exchange import RowExchange
    from megatron_prefix.tree.payload_map import Form, PayloadMap

NAME = "host memory"
"""Of the `Counts` in `StepReport.features`."""
_OFFLOADER = "offloader"
"""What is kept from step to step: pinned memory takes long to get."""


class HostMemory(StepPart):
    """Takes tensors to the host and back. Arguments: see StepPart.

    Raises:
        CannotShare: context-parallel ranks have layers on the host.
    """

    def __init__(self, config: PrefixConfig, rank: Rank, callbacks: Callbacks) -> None:
        super().__init__(config, rank, callbacks)
        if config.cache_host_layers and rank.groups.cp.size() > 1:
            raise refused(HOST_LAYERS_CP)
        is_auto = config.memory == "auto" and config.memory_budget is not None
        self.may_offload = is_auto and not any(map(offload_refusal, rank.models))
        self._measures = is_auto
        self._offloader: Offloader | None = None
        self._segments: dict[tuple[int, int], OffloadedSegment] = {}
        self._soon: list[OffloadedSegment] = []
        self._latest: OffloadedSegment | None = None
        self._program: Sequence[Action] = ()
        self._place = 0
        self._stages: Sequence[Stage] = ()
        self._plan: Plan | None = None
        self._undo = contextlib.ExitStack()

    def rates(self) -> Rates | None:
        """See StepPart."""
        if not self._measures:
            return None
        return rates.measured(self.rank.device, self.rank.config.params_dtype)

    def footprint(self, footprint: Footprint) -> Footprint:
        """See StepPart."""
        return replace(footprint, host_layers=self.config.cache_host_layers)

    def prepare(self, plan: Plan, predicted: Callable[[], RankMemory]) -> None:
        """See StepPart. The first step with gradients in which all tensors stay on the device
        gives the host memory back.

        Raises:
            UserError: the model cannot run with "offload".
        """
        offloads = "offload" in plan.policies and not self.rank.forward_only
        self._plan, self._offloader = plan if offloads else None, None
        if not (offloads or self.config.cache_host_layers):
            if not self.rank.forward_only:
                self.kept.pop(_OFFLOADER, None)
            return
        reasons = [reason for reason in map(offload_refusal, self.rank.models) if reason]
        if offloads and reasons:
            raise reasons[0].error()
        if _OFFLOADER not in self.kept:
            transfers = transfers_of(self.rank.device, self.config.memory_budget)
            self.kept[_OFFLOADER] = Offloader(transfers)
        self._offloader = self.kept[_OFFLOADER]
        memory = predicted()
        staged = memory.staged if offloads else 0.0
        self._offloader.begin_step(memory.peak, staged + memory.cache_staged)

    def arenas(
        self, planned: PayloadMap, forms: Sequence[Form], exchange: RowExchange | None
    ) -> HostLayers | None:
        """See StepPart."""
        if self._offloader is None or not self.config.cache_host_layers:
            return None
        return HostLayers(self._offloader, len(forms), self.config.cache_host_layers)

    def begin(self, attempt: Attempt) -> None:
        """See StepPart."""
        self._stages, self._place = attempt.stages, 0
        self._program = attempt.plan.programs[self.rank.stage]
        if self._offloader is not None:
            attempt.report.features[NAME] = self._offloader.counts
        for stage in self._stages if self._plan is not None else ():
            for layer in stage.hooks.model.decoder.layers:
                self._undo.callback(layer.register_forward_hook(self._layer_done).remove)

    def action(self, action: Action | None) -> contextlib.AbstractContextManager:
        """See StepPart: backwards right behind a backward may load their segments in it."""
        if action is not None:
            self._soon[:] = self._wanted_behind(self._place) if self._segments else ()
            self._place += 1
        return contextlib.nullcontext()

    def saving(
        self, segment: int, chunk: int, received: Tensor | None
    ) -> Callable[[], contextlib.AbstractContextManager] | None:
        """See StepPart."""
        if self._plan is None or self._plan.policy(segment) != "offload":
            return None
        if self._offloader is None:
            raise RuntimeError("the plan offloads, and nothing is there to do it")
        model = self._stages[chunk].hooks.model
        resident = addresses(received, *model.parameters(), *model.buffers())
        self._latest = self._segments[segment, chunk] = self._offloader.segment(resident)
        return self._latest.saving

    def backward(self, segment: int, chunk: int) -> None:
        """See StepPart."""
        if (segment, chunk) in self._segments:
            self._segments[segment, chunk].prefetch()

    def layer_left(self) -> None:
        """See StepPart."""
        for offloaded in self._soon:
            offloaded.prefetch(early=True)

    def freed(self, segment: int, chunk: int) -> None:
        """See StepPart."""
        self._segments.pop((segment, chunk), None)

    def end(self) -> None:
        """See StepPart."""
        self._undo.close()
        self._segments.clear()
        self._soon.clear()
        self._stages, self._latest = (), None
        if self._offloader is not None:
            self._offloader.end_step()

    def _layer_done(self, *_: Any) -> None:
        """The forward of a layer is over: only the latest segment can be recording."""
        if self._latest is not None:
            self._latest.layer_done()

    def _wanted_behind(self, place: int) -> list[OffloadedSegment]:
        """Segments of the backwards right after the action there, if it is a backward."""
        near = self._program[place : place + 1 + BACKWARDS_AHEAD]
        backwards = itertools.takewhile(lambda action: action.kind == "B", near)
        places = [(action.segment, action.chunk) for action in backwards][1:]
        return [self._segments[each] for each in places if each in self._segments]


def offload_refusal(model: Any) -> Reason | None:
    """Why a model chunk cannot run with memory policy "offload"; None if it can.

    Fused weight gradients set a flag on the weight, which Megatron's overlapped reduction reads;
    but a weight that comes back through autograd's saved-tensor hooks is another object.
    """
    if is_fp8(get_model_config(model)):
        return OFFLOAD_FP8.given()
    ddp = getattr(model, "ddp_config", None)
    fused = getattr(get_model_config(model), "gradient_accumulation_fusion", False)
    if fused and ddp is not None and ddp.overlap_grad_reduce:
        return OFFLOAD_OVERLAP.given()
    return None
