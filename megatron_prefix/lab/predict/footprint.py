"""Bytes of device memory that a position of a segment takes on one rank, predicted from a
configuration.  Pure.

It is a MemoryModel (plan/memory.py), as is what the core measures in its place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from megatron_prefix.lab.predict.kinds import SavedPayload
from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.memory import BuffersOf

if TYPE_CHECKING:
    from megatron_prefix.lab.predict.peak_memory import PredictedMemory


@dataclass(frozen=True)
class Footprint:
    """Bytes a position on one rank.

    Attributes:
        inner: saved by one layer for the backward of an inner segment, on average.
        wave: the same for a wave, whose payload is not in the sidecar.
        unread: saved by the last layer for an inner segment without loss.
        again: recomputed by Megatron's own recomputation during backward.
        act: of `inner` and of `wave`, what "recompute_act" drops.
        kv: payload of a position in the sidecar, one layer that leaves some.
        kv_grad: its gradient there.
        keys, keys_grad: K and V of a position as one layer's attention sees them, and their sums.
        tail: transient bytes a row of ancestors' last positions in one layer.
        attention: besides `unread`, saved by the last layer of all positions as soon as one of them
            is read.
        norm: saved after the last layer, without a loss.
        head: saved after the last layer, with a loss: norm, logits, cross entropy.
        stage_input: received by a stage; a stage sends as much.
        temporary: peak transient bytes of one layer.
        seen: transient bytes a key of an ancestor in one layer's backward.
        head_temporary: peak transient bytes of the output layer.
        head_weight: gradient of the output layer's weight, where it is transient; bytes in all, not
            a position.
        num_layers: layers of a model chunk.
        parts: context-parallel ranks, which share the positions.
        payloads: of every stage, those of its layers that leave one.
        behind_inner, behind_wave: saved by multi-token prediction, behind the last layer, for the
            backward of an inner segment and of a wave.
        host_layers: see PrefixConfig.cache_host_layers.
        state, state_grad: a final hidden state that crosses data-parallel ranks, and its gradient.
        shares: into how many parts K/V and gK/gV of inner segments are cut; a rank has one.
        keeps_outputs: whether a stage's output stays until its backward.
        buffers: makes those of a plan, a rank, its model chunk and a footprint, with what says
            which segments a segment reads; None: there are no further messages.
        ends_early: whether the last layer of the last stage runs on what is read only.
        checkpointed: whether Megatron recomputes every layer.
    """

    inner: float
    wave: float
    unread: float
    attention: float
    again: float
    kv: float
    kv_grad: float
    norm: float
    head: float
    stage_input: float
    temporary: float
    seen: float
    head_temporary: float
    num_layers: int
    act: float = 0.0
    keys: float = 0.0
    keys_grad: float = 0.0
    tail: float = 0.0
    head_weight: float = 0.0
    parts: int = 1
    shares: int = 1
    keeps_outputs: bool = True
    host_layers: int = 0
    payloads: tuple[tuple[SavedPayload, ...], ...] = ()
    behind_inner: float = 0.0
    behind_wave: float = 0.0
    state: float = 0.0
    state_grad: float = 0.0
    buffers: BuffersOf | None = None
    ends_early: bool = True
    checkpointed: bool = False

    def kept(self, policy: str, inner: bool, read: float, first: bool, last: bool) -> float:
        """Bytes a position that stay on the device between a segment's forward and backward.

        Args:
            policy: of the segment.
            inner: whether it is an inner segment.
            read: share of its positions that carry loss.
            first, last: whether the stage is the first, the last.
        """
        received = 0.0 if first else self.stage_input
        if policy == "recompute":
            return received
        output = self.stage_input if self.keeps_outputs and not last else 0.0
        if policy == "offload":  # what the output layer saves stays
            return received + (read * (self.head - self.norm) if last else output)
        act = self.act if policy == "recompute_act" else 0.0
        layer = (self.inner if inner else self.wave) - act
        if not last:
            return self.num_layers * layer + output
        # Of the last layer the MLP runs on what is read only, so no more is dropped there.
        last_layer = self.last_layer(read) - read * act + (layer + act - self.inner)
        last_layer += self.behind_inner if inner else self.behind_wave
        return (self.num_layers - 1) * layer + last_layer + self.after(read)

    def computed(self, policy: str, inner: bool) -> float:
        """Transient bytes a position of a layer's forward, beyond those that it saves; at least the
        last product and the residual."""
        layer = self.inner if inner else self.wave
        saved = layer - (self.act if policy == "recompute_act" else 0.0)
        return max(self.temporary - saved, 2 * self.stage_input)

    def exchanged(self, backward: bool) -> float:
        """Transient bytes of one layer's own attention with context parallelism: K/V of all ranks
        and of this rank's runs (tree/cp_layout.py, `own_runs`), with their gradients."""
        if self.parts == 1:
            return 0.0
        runs = self.parts + 0.5
        reduced = self.keys * runs + self.keys_grad * (self.parts + runs)
        return self.keys * (self.parts + runs) + (reduced if backward else 0.0)

    def last_layer(self, read: float) -> float:
        """Saved by the last layer of the last stage, where all after attention runs on scored
        positions only."""
        unscored = self.unread + (self.attention if read else 0.0)
        return unscored + read * max(0.0, self.inner - unscored)

    def after(self, read: float) -> float:
        """Saved after the last layer, a position of the segment."""
        return self.norm + read * (self.head - self.norm)

    def released(self, read: float) -> float:
        """The part of `after` that is freed before a layer's backward; with multi-token prediction
        the final norm is not."""
        return self.after(read) - (self.norm if self.behind_wave else 0.0)

    def peaks(self, plan: Plan) -> tuple[PredictedMemory, ...]:
        """See MemoryModel."""
        from megatron_prefix.lab.predict.peak_memory import predict_memory

        return predict_memory(plan, self)

    def of(self, plan: Plan) -> PredictedBytes:
        """See MemoryModel."""
        return PredictedBytes(plan, self)


class PredictedBytes(NamedTuple):
    """Memory of a plan with any policies; see PlanBytes."""

    plan: Plan
    footprint: Footprint

    def peaks(self, policies: tuple[str, ...]) -> tuple[PredictedMemory, ...]:
        """See PlanBytes."""
        return self.footprint.peaks(replace(self.plan, policies=policies))

    def saved(self, policies: tuple[str, ...]) -> list[float]:
        """See PlanBytes."""
        of, num_chunks = self.footprint, self.plan.num_chunks
        names = policies or ("retain",) * len(self.plan.segments)
        rows = [of.inner - of.act * (name == "recompute_act") for name in names]
        return [
            segment.padded_length / of.parts * row * of.num_layers * num_chunks
            for segment, row in zip(self.plan.segments, rows, strict=True)
        ]
