"""What multi-token prediction of the last stage is given at the beginning of a step."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_prefix.errors import Reason, refused
from megatron_prefix.features.across.communicator import Communicator
from megatron_prefix.features.across.part import Crossing
from megatron_prefix.features.mtp import given, methods
from megatron_prefix.features.mtp.layer import LooksAhead
from megatron_prefix.features.mtp.patches import (
    KEYWORD,
    TOKENS,
    further_tokens,
    moves_by_padded_ends,
    scales_microbatches,
)
from megatron_prefix.features.mtp.step import StepAhead
from megatron_prefix.features.mtp.tables import AheadTables, LossWeights, loss_sums
from megatron_prefix.megatron.families import has_mrope
from megatron_prefix.parts import Attempt, StepPart
from megatron_prefix.plan.actions import Action
from megatron_prefix.refusals.table import (
    AHEAD_BEHIND,
    AHEAD_FACTOR,
    AHEAD_IDLE,
    AHEAD_KEYWORD,
    AHEAD_LABELS,
    AHEAD_NOTHING,
    AHEAD_PADDED,
    AHEAD_TOKENS,
)
from megatron_prefix.run.calls import ModelCall
from megatron_prefix.run.execute.auxiliary import set_auxiliary_scales
from megatron_prefix.run.read.read_calls import CallTokens
from megatron_prefix.run.read.step import Step
from megatron_prefix.run.read.suspend import Capture
from megatron_prefix.tree import Forest


class MultiToken(StepPart):
    """Multi-token prediction in a call; without gradients it may have nothing to do."""

    _step: StepAhead | None = None  # of the last attempt
    _inside: LooksAhead | None = None
    _has_loss = True
    _has_labels = True
    _is_fp32 = False
    _beside: given.Numbers | None = None  # tokens of this rank's calls that have embeddings
    _whole: given.Numbers | None = None  # of all samples, where numbers stand for them

    def refusals(self) -> Iterator[Reason]:
        """See StepPart."""
        for model in self.rank.language_models:
            yield from methods.refusals(model)

    def read(self, capture: Capture) -> None:
        """See StepPart."""
        if self.rank.is_first:
            ranks = self.rank.model.sequence_ranks
            self._beside = given.beside_embeddings(capture.calls(0), ranks)

    def tokens(
        self, lengths: Sequence[int], tokens: NDArray[np.int64] | None
    ) -> NDArray[np.int64] | None:
        """See StepPart: beside rows of embeddings, those that the layers embed."""
        if not self.rank.predicts_further:
            return tokens
        own = tokens if self._beside is None else self._beside
        are_replaced = self._beside is not None or has_mrope(self.rank.language_models[0])
        if own is not None and are_replaced and self.rank.is_last:
            self._whole = given.whole_tokens(own, lengths, self.rank)
        return own

    def read_last(self, capture: Capture, last: CallTokens | None) -> None:
        """See StepPart: refuses calls with which Megatron's fails, or does not move all labels."""
        if not self.rank.is_last:
            return
        if last is None or (last.tokens is None and self._beside is None):
            raise refused(AHEAD_TOKENS)
        self._has_labels = last.labels is not None
        if last.weights is None and self.rank.predicts_further:
            raise refused(AHEAD_TOKENS)
        model, calls = self.rank.language_models[-1], capture.calls(-1)
        without = methods.without_labels(model, calls) if last.labels is None else None
        if without is methods.WithoutLabels.FAILS:
            raise refused(AHEAD_LABELS)
        are_run = methods.are_run(model, calls)
        if self.rank.predicts_further and self.rank.model.has_experts and not are_run:
            raise refused(AHEAD_IDLE)
        self._has_loss = are_run and without is not methods.WithoutLabels.NO_LOSS
        masks = [call["loss_mask"] for call in calls]
        self._is_fp32 = any(mask is None or mask.dtype != torch.float64 for mask in masks)
        _check_keyword(model, calls)
        packings = (call["packed_seq_params"] for call in calls)
        if scales_microbatches(packings, model.config):
            raise refused(AHEAD_FACTOR)
        is_checked = self.rank.predicts_further and not moves_by_padded_ends(model)
        if is_checked and leave_padding_out(calls):
            raise refused(AHEAD_PADDED)
        size = self.rank.groups.cp.size()
        ends = itertools.accumulate(sum(layout.lengths) // size for layout in last.layouts)
        for layout, end in zip(last.layouts, ends, strict=True):
            over = layout.behind // size
            behind = last.weights[end - over : end] if last.weights is not None else ()
            if np.any(behind) or (layout.behind and self.rank.model.counts_tokens):
                raise refused(AHEAD_BEHIND)

    def check(self, step: Step) -> None:
        """See StepPart.

        Raises:
            CannotShare: Megatron divides by zero: a microbatch has no weight on this rank.
        """
        samples, cp = step.samples, self.rank.groups.cp
        is_last = self.rank.is_last and self._has_loss
        if not (is_last and samples and samples[0].weights is not None):
            return
        division = methods.division(self.rank.language_models[-1])
        if division.per_token or division.clamps:
            return
        weights = [LossWeights.of(sample, cp.size()) for sample in samples]
        for depth in range(1, self.rank.model.looks_ahead + 1):
            remaining, _ = loss_sums(weights, step.microbatch_of, cp.size(), depth)
            if (remaining[:, cp.rank()] == 0).any():
                raise refused(AHEAD_NOTHING)

    def begin(self, attempt: Attempt) -> None:
        """See StepPart."""
        stage = attempt.stages[-1]
        hooks, model = stage.hooks, stage.hooks.model
        if not hasattr(model, "mtp"):
            return
        inside = hooks.kept.get(MultiToken)
        if inside is None or not inside.is_in_place:
            hooks.keep(MultiToken, None)
            inside = LooksAhead(model, hooks)
            hooks.keep(MultiToken, inside, inside.overrides())
        self._step = self._read_tables(attempt) if self.rank.predicts_further else None
        inside.step, self._inside = self._step, inside
        inside.gathers_output = stage.others.get("runtime_gather_output")

    def computing(self, action: Action) -> contextlib.AbstractContextManager[None]:
        """See StepPart."""
        if self._inside is None or action.chunk < len(self.rank.models) - 1:
            return contextlib.nullcontext()
        return self._inside.computing()

    def end(self) -> None:
        """See StepPart."""
        if self._inside is not None:
            self._inside.step = None

    def finished(self) -> None:
        """See StepPart."""
        if self._step is not None:
            self._step.log()
            self._step = None

    def _read_tables(self, attempt: Attempt) -> StepAhead:
        """What the layer reads in a step; with a communicator all its ranks call this."""
        step, contract, rank = attempt.step, attempt.contract, self.rank
        samples = step.samples
        if samples is None:
            raise RuntimeError("the last stage has no samples")
        model = rank.language_models[-1]
        if self._whole is not None:
            samples = given.with_tokens(samples, self._whole, labelled=self._has_labels)
        if not self._has_loss:
            samples = [replace(sample, weights=np.zeros(len(sample))) for sample in samples]
        cp, tp, ranks = rank.groups.cp, rank.groups.tp, rank.model.sequence_ranks
        division = replace(methods.division(model), is_fp32=self._is_fp32)
        tables = AheadTables(
            step.forest, samples, step.microbatch_of, division, cp.rank(), cp.size(),
            rank.model.looks_ahead, apart=contract.scales is not None,
        )  # fmt: skip
        if (communicator := _crossing_ranks(attempt)) is not None:
            scale = 1.0
            if not rank.forward_only:
                set_auxiliary_scales(contract, rank.models[-1], step.num_microbatches)
                scale = methods.loss_scale()
            _tell_owners(tables, step.forest, communicator, scale)
        return StepAhead(
            tables, rank.device, ranks, tp.rank() if ranks > 1 else 0,
            None if contract.scales is None else contract.scales.further,
            logs=model.training and self._has_loss,
        )  # fmt: skip


def _check_keyword(model: Any, calls: Sequence[ModelCall]) -> None:
    """Refuses a keyword that is not slime's and miles', or tokens in it that the call does not
    have."""
    if all(call.keyword(KEYWORD) is None for call in calls):
        return
    for call in calls:
        given = call[KEYWORD] or {}
        is_known = isinstance(given, Mapping) and given.keys() <= {TOKENS}
        if (
            not (is_known and methods.has_keyword(model))
            or further_tokens(call) is not call["input_ids"]
        ):
            raise refused(AHEAD_KEYWORD, KEYWORD)
        if call["labels"] is not None or call["loss_mask"] is None:
            raise refused(AHEAD_KEYWORD, KEYWORD)


def leave_padding_out(calls: Sequence[ModelCall]) -> bool:
    """Whether packs have padding that their `cu_seqlens_q` does not count; the host waits once."""
    packings = [call["packed_seq_params"] for call in calls]
    pairs = [
        (packing.cu_seqlens_q, padded)
        for packing in packings
        if (padded := getattr(packing, "cu_seqlens_q_padded", None)) is not None
        and padded is not packing.cu_seqlens_q
    ]
    return bool(pairs) and bool(torch.stack([(a != b).any() for a, b in pairs]).any())


def _crossing_ranks(attempt: Attempt) -> Communicator | None:
    """Of the data-parallel ranks that segments cross; None: they cross none."""
    crossing = (part for part in attempt.parts if isinstance(part, Crossing))
    return next((part.communicator for part in crossing), None)


def _tell_owners(
    tables: AheadTables, forest: Forest, communicator: Communicator, scale: float
) -> None:
    """Ranks tell the owners of what they have in common which labels follow there, and what each
    weighs in their losses.

    Args:
        tables: of this rank.
        forest: its segments.
        communicator: of the ranks.
        scale: of this rank's loss; by its number of microbatches it can be another on each.
    """
    outgoing: list[tuple[int, np.ndarray]] = []
    requests: list[tuple[int, int, tuple[int, ...]]] = []
    for exchange in forest.exchanges:
        for peer, spans in exchange.peers:
            if forest.segments[exchange.segment].source < 0:
                requests.append((peer, exchange.segment, spans))
                continue
            rows = tables.told(exchange.segment)
            rows[4] *= scale
            outgoing.append((peer, rows))
    sizes = [(peer, np.array([rows.shape[1]])) for peer, rows in outgoing]
    gathered = communicator.numbers(sizes, [(peer, (1,), torch.int64) for peer, *_ in requests])
    incoming = [
        (peer, (7, int(size[0])), torch.float64)
        for (peer, *_), size in zip(requests, gathered, strict=True)
    ]
    for (_, segment, spans), rows in zip(
        requests, communicator.numbers(outgoing, incoming), strict=True
    ):
        rows[4] /= scale
        tables.hear(segment, spans, rows)
