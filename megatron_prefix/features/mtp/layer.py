"""Multi-token prediction: layers behind the decoder, each of which predicts one label further on.

Inside each is one of Megatron's layers, whose parts are of the kinds of layers/table.py and leave a
payload as any other's. Around it are two norms, a projection of what the layer before it has made
and an input further on, and the output layer once more. A segment runs the layers on its own
positions; inputs, labels and weights come from tables of the step (tables.py), where Megatron moves
those of a microbatch by one for every layer. The losses go into the backward as Megatron has them:
beside the decoder's output, with a scale that its schedule sets.  Pure, until it is hooked.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megatron_prefix.errors import Reason
from megatron_prefix.features.mtp.patches import is_verls
from megatron_prefix.features.mtp.tables import AheadTables, Division, FurtherRows
from megatron_prefix.layers.kind import Override, owner
from megatron_prefix.refusals.table import AHEAD_CUT_OFF, OTHER_AHEAD, OWN_POSTPROCESS

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_prefix.layers.segment import SegmentContext
    from megatron_prefix.megatron.install import Hooks

_MODEL = "megatron.core.models.gpt.gpt_model.GPTModel"
_BLOCK = "megatron.core.transformer.multi_token_prediction.MultiTokenPredictionBlock"
_LAYER = "megatron.core.transformer.multi_token_prediction.MultiTokenPredictionLayer"


def division(model: Any) -> Division:
    """How this release of Megatron, or what a trainer has put in its place, divides the loss of a
    microbatch."""
    from megatron_prefix.layers.releases import is_since

    per_token = bool(model.config.calculate_per_token_loss)
    clamps = _process() is not None or is_verls(_in_place(model, "_postprocess"))
    return Division(per_token, clamps, clamps_mean=is_since("0.18"))


def loss_scale() -> float:
    """By which Megatron multiplies the loss of a rank, as it has been set and rounded; the host
    waits for the device."""
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    return float(MTPLossAutoScaler.main_loss_backward_scale)


class WithoutLabels(Enum):
    """What Megatron does where calls have no labels."""

    FAILS = "before 0.17"
    NO_LOSS = "before 0.19: the layer runs, and has no loss of its own"
    MAKES_THEM = "of the tokens"


def without_labels(model: Any = None) -> WithoutLabels:
    """What this release of Megatron does, or what a trainer has put in its place in a model."""
    process = _process()
    if model is not None and is_verls(_in_place(model, "_postprocess")):
        return WithoutLabels.NO_LOSS
    if process is None:
        return WithoutLabels.FAILS
    makes = "input_ids" in inspect.signature(process).parameters
    return WithoutLabels.MAKES_THEM if makes else WithoutLabels.NO_LOSS


def refusals(model: Any) -> Iterator[Reason]:
    """What is refused of a model chunk that has the layer; in every step, since trainers replace
    these methods for the time of a pass."""
    block = getattr(model, "mtp", None)
    if model.config.mtp_num_layers and model.post_process != (block is not None):
        yield OTHER_AHEAD.given("another stage than the last, or by none")
    if block is None:
        return
    if hasattr(model, "_postprocess") and not _is(model, "_postprocess", _MODEL):
        yield OWN_POSTPROCESS.given(type(model).__name__)
    if not _is(block, "forward", _BLOCK):
        yield OTHER_AHEAD.given(type(block).__name__)
    num = model.config.mtp_num_layers
    if num and len(block.layers) != (1 if _repeats(block) else num):
        yield OTHER_AHEAD.given("more or fewer layers than mtp_num_layers says")
    for layer in block.layers:
        if not (_is(layer, "forward", _LAYER) and _is(layer, "_get_embeddings", _LAYER)):
            yield OTHER_AHEAD.given(type(layer).__name__)
        is_detached = is_verls(_in_place(layer, "_get_embeddings"))
        if is_detached and model.config.recompute_granularity == "full":
            yield AHEAD_CUT_OFF.given()


def _repeats(block: Any) -> bool:
    """Whether one layer runs for every further label (since 0.17)."""
    return bool(getattr(block, "mtp_use_repeated_layer", False))


def _is(module: Any, method: str, name: str) -> bool:
    """Whether a method is that of a class, what takes its place in segments, or verl's; nobody's
    that was put into the class: mcore_bridge's runs one layer several times."""
    if isinstance(_ours(module, method), LooksAhead | _Depth):
        return True
    return is_verls(vars(module).get(method)) or owner(module, method, patches=()) == name


def _ours(module: Any, method: str) -> Any:
    return getattr(vars(module).get(method), "__self__", None)


def _in_place(module: Any, method: str) -> Any:
    """What Megatron calls outside of segments."""
    ours = _ours(module, method)
    is_ours = isinstance(ours, LooksAhead | _Depth)
    return ours.stock if is_ours else getattr(module, method, None)


class _Shares(NamedTuple):
    """What rows of logits weigh in the loss of single microbatches, [shares] each."""

    microbatch: Tensor
    row: Tensor
    weight: Tensor


class _FurtherSegment(NamedTuple):
    """What one segment reads at one depth, on the model's device.

    Attributes:
        following: inputs so far behind and their positions, int64 [2, 1, positions].
        distinct: positions with rows of logits, int64; those that this rank of sequence parallelism
            computes.
        repeats: per row of logits which of them it is of; likewise.
        labels: int64 [1, rows], of all ranks of sequence parallelism.
        weights: see `tables.Rows`, float64 [3, rows].
        shares: of the first of these; None where microbatches are not told apart.
    """

    following: Tensor
    distinct: Tensor
    repeats: Tensor
    labels: Tensor
    weights: Tensor
    shares: _Shares | None


class StepAhead:
    """Multi-token prediction in one step.

    Args:
        tables: the step's.
        device: where the model is.
        ranks, rank: sequence-parallel ranks, and this one's place among them.
        logs: whether Megatron logs the losses of this step.
        scales: by which the loss of each microbatch is multiplied, [microbatches], where they may
            differ: filled in before a backward reads them. None: what Megatron's schedule has set.
    """

    def __init__(
        self,
        tables: AheadTables,
        device: Any,
        ranks: int,
        rank: int,
        scales: Tensor | None = None,
        *,
        logs: bool,
    ) -> None:
        import torch

        self._logs, self._undefined = logs, tables.undefined
        self._segments = _on_device(tables, device, ranks, rank)
        self._scales = scales
        self._means: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self._nothing = torch.zeros((), device=device, dtype=torch.float64)

    def __getitem__(self, index: int) -> list[_FurtherSegment]:
        """What a segment reads, by depth."""
        return self._segments[index]

    def attached(
        self, segment: _FurtherSegment, hidden: Tensor, losses: Tensor, factor: float
    ) -> Tensor:
        """The decoder's output; a backward from it goes to the losses of a segment's rows, too.

        Args:
            segment: what it reads at this depth.
            hidden: the decoder's output.
            losses: [1, rows].
            factor: of this loss in the model's.
        """
        from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

        from megatron_prefix.layers.own_backward import with_backward

        scales = self._scales
        if segment.shares is None or scales is None:
            result: Tensor = MTPLossAutoScaler.apply(
                hidden, factor * losses * segment.weights[0].to(losses.dtype)
            )
            return result
        microbatch, row, weight = segment.shares
        shape, dtype = losses.shape, losses.dtype

        def pull(gradient: Tensor) -> tuple[Tensor, Tensor]:
            weights = weight.new_zeros(shape[-1])
            weights.index_add_(0, row, weight * scales[microbatch])
            return gradient, (factor * weights).to(dtype).expand(shape)

        return with_backward(  # type: ignore[no-any-return]
            lambda hidden, _: hidden.view_as(hidden), pull, hidden, losses
        )

    def note(self, index: int, depth: int, *sums: Tensor) -> None:
        """Keeps what a segment adds to Megatron's log; a second forward of it changes nothing.

        Args:
            index: the segment.
            depth: from 0.
            sums: of the loss; since 0.19 how many guesses are right, and how many there are.
        """
        self._means.setdefault((index, depth), tuple(total.detach().double() for total in sums))

    def log(self) -> None:
        """Adds the step to Megatron's log of these losses; call it when the step is over."""
        from megatron.core import parallel_state
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper as Log

        if not self._logs:
            return
        save = getattr(Log, "save_metrics_to_tracker", None)
        num, depths = 1 if save is None else 3, len(self._undefined)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        for depth, undefined in enumerate(self._undefined):
            sums_at = [sums for (_, place), sums in self._means.items() if place == depth]
            totals = [sum((sums[n] for sums in sums_at), self._nothing) for n in range(num)]
            if undefined:  # Megatron divides by zero
                totals[0] = totals[0] * float("nan")
            (save or Log.save_loss_to_tracker)(*totals, depth, depths, avg_group=group)


class _Depth:
    """One of Megatron's layers of multi-token prediction, in segments.

    Args:
        layer: it.
        depth: its place among them, from 0; of one that runs again the first.
        block: all of them.
    """

    def __init__(self, layer: Any, depth: int, block: LooksAhead) -> None:
        self._layer, self._depth, self._block = layer, depth, block
        self.stock = layer._get_embeddings

    def embeddings(self, *args: Any, embedding: Any, **named: Any) -> Any:
        """Megatron's, with the embedding of the segment's inputs further on."""
        following = self._block.following(self._depth)
        if following is None:
            return self.stock(*args, embedding=embedding, **named)
        inputs, positions = following
        group, self._layer.cp_group = self._layer.cp_group, None  # nothing to exchange
        try:
            return self.stock(
                *args, **named,
                embedding=lambda **_: embedding(input_ids=inputs, position_ids=positions),
            )  # fmt: skip
        finally:
            self._layer.cp_group = group


class LooksAhead:
    """The layers of multi-token prediction of a model chunk, in segments.

    Args:
        model: the language model that has it.
        hooks: its own; they say which segment runs.

    Attributes:
        gathers_output: the model calls' `runtime_gather_output`, which a hybrid model does not
            hand to its block.
        step: what the layers read in this step; None if they do not run.
        device_bytes: that it holds between steps.
    """

    device_bytes = 0

    def __init__(self, model: Any, hooks: Hooks) -> None:
        self._model, self._hooks = model, hooks
        self.step: StepAhead | None = None
        self._layers, self._repeats = [*model.mtp.layers], _repeats(model.mtp)
        self._is_hybrid = not hasattr(model, "_postprocess")
        self._detaches = any(is_verls(layer._get_embeddings) for layer in self._layers)
        self.stock = model.mtp.forward if self._is_hybrid else model._postprocess
        self.gathers_output: bool | None = None

    def overrides(self) -> Iterable[Override]:
        """See Kind."""
        if self._is_hybrid:
            yield self._model.mtp, "forward", self._behind_decoder
        else:
            yield self._model, "_postprocess", self._after_decoder
        for depth, layer in enumerate(self._layers):
            yield layer, "_get_embeddings", _Depth(layer, depth, self).embeddings

    @property
    def is_in_place(self) -> bool:
        """Whether nobody has replaced its methods since."""
        methods = ((module, name) for module, name, _ in self.overrides())
        return all(isinstance(_ours(*method), LooksAhead | _Depth) for method in methods)

    def following(self, depth: int) -> Tensor | None:
        """Inputs and their positions that a depth reads of the segment that runs; None outside of
        segments."""
        current = self._hooks.current
        if current is None:
            return None
        return self._step[current.index][depth + self._hooks.turn].following

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Around a call of the model, or a backward: what a hybrid model does behind its block of
        further labels is done then."""
        process = getattr(self._model, "mtp_process", None)
        try:
            yield
        finally:
            if self._is_hybrid:
                self._model.mtp_process = process

    def _behind_decoder(self, *args: Any, **named: Any) -> Any:
        """Of a hybrid model, in the place of its block: as `_after_decoder`."""
        current = self._hooks.current
        if current is None:
            return self.stock(*args, **named)
        hidden = named.pop("hidden_states")
        if self.step is not None and current.decoded is None:
            named["runtime_gather_output"] = self.gathers_output
            hidden = self._with_loss(hidden, current, named)
        self._model.mtp_process = False  # that tells which weights are shared, until here
        return self._hooks.read(hidden, current.rows)

    def _after_decoder(self, *args: Any, **named: Any) -> Any:
        """Megatron's, for a segment: the loss goes along with the decoder's output, of which the
        positions that are read go on."""
        current = self._hooks.current
        if current is None:
            return self.stock(*args, **named)
        hidden = named.pop("hidden_states")
        if self.step is not None and current.decoded is None:  # else its owner has it
            hidden = self._with_loss(hidden, current, named)
        config, num = self._model.config, self._model.config.mtp_num_layers
        config.mtp_num_layers = None
        try:
            return self.stock(
                *args, **{**named, "mtp_in_postprocess": False},
                hidden_states=self._hooks.read(hidden, current.rows),
            )  # fmt: skip
        finally:
            config.mtp_num_layers = num

    @property
    def _step(self) -> StepAhead:
        if self.step is None:
            raise RuntimeError("a segment predicts further, and its step has no tables")
        return self.step

    def _with_loss(self, hidden: Tensor, current: SegmentContext, named: Any) -> Tensor:
        """The decoder's output [positions, 1, hidden_size]; backward from it begins with the
        layers' own losses, too."""
        config, index = self._model.config, current.index
        factor = config.mtp_loss_scaling_factor / config.mtp_num_layers
        is_detached = self._detaches or self._is_detached
        predicted = hidden.detach() if is_detached else hidden
        for depth, segment in enumerate(self._step[index]):
            predicted = self._predicted(depth, predicted, current, named)
            if not segment.labels.numel():  # children may read it, and the next may be detached
                hidden = _reaching(hidden, predicted)
                continue
            logits = self._logits(predicted, segment, named)
            losses = self._model.compute_language_model_loss(segment.labels, logits)
            weights = segment.weights.to(losses.dtype)
            sums = [(losses * weights[1]).sum(), *self._guesses(logits, segment, named)]
            self._step.note(index, depth, *sums)
            hidden = self._step.attached(segment, hidden, losses, factor)
        return hidden

    def _predicted(self, depth: int, hidden: Tensor, current: SegmentContext, named: Any) -> Tensor:
        """A layer's output, like the decoder's."""
        if self._repeats:
            layer, self._hooks.turn = self._layers[0], depth
        else:
            layer = self._layers[depth]
        with contextlib.nullcontext() if current.saving is None else current.saving():
            result: Tensor = layer(
                input_ids=named["input_ids"], position_ids=named["position_ids"],
                hidden_states=hidden, attention_mask=None, rotary_pos_emb=self._hooks.turned,
                embedding=self._model.embedding, **(named.get("extra_block_kwargs") or {}),
            )[0]  # fmt: skip
        return self._in_turn(depth, result) if self._repeats else result

    def _in_turn(self, depth: int, predicted: Tensor) -> Tensor:
        """What a layer that runs again has made; where its backward runs parts of it once more they
        know at which depth."""
        from megatron.core.utils import make_viewless_tensor

        from megatron_prefix.layers.own_backward import with_backward

        def pull(gradient: Tensor) -> Tensor:
            self._hooks.turn = depth
            return gradient

        result = with_backward(lambda hidden: hidden.view_as(hidden), pull, predicted)
        # verl's patch drops the graph of a view.
        viewless: Tensor = make_viewless_tensor(result, requires_grad=True, keep_graph=True)
        return viewless

    def _logits(self, predicted: Tensor, segment: _FurtherSegment, named: Any) -> Tensor:
        """[rows, 1, vocabulary of this rank]."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        from megatron_prefix.layers.blocks.unread import picked

        model, config, weight = self._model, self._model.config, None
        if model.share_embeddings_and_output_weights:
            weight = model.shared_embedding_or_output_weight()
        detaches = _process() is None and is_verls(self.stock)
        if detaches or self._is_detached:
            weight = (model.output_layer.weight if weight is None else weight).detach()
        if config.sequence_parallel:
            group = model.pg_collection.tp
            predicted = gather_from_sequence_parallel_region(predicted, group=group)
        rows = picked(picked(predicted, segment.distinct), segment.repeats, repeats=True)
        gather = named.get("runtime_gather_output")
        logits: Tensor = model.output_layer(rows, weight=weight, runtime_gather_output=gather)[0]
        return model._scale_logits(logits) if getattr(config, "use_mup", False) else logits

    def _guesses(self, logits: Tensor, segment: _FurtherSegment, named: Any) -> Sequence[Tensor]:
        """Since 0.19: how many guesses are right, and how many there are, as Megatron counts in
        `_compute_mtp_acceptance_counts`."""
        from megatron.core.transformer import multi_token_prediction as megatrons

        if not hasattr(megatrons, "_compute_mtp_acceptance_counts"):
            return ()
        model, gather = self._model, named.get("runtime_gather_output")
        group, guesses = model.pg_collection.tp, logits.detach().argmax(-1)
        if megatrons._mtp_logits_are_vocab_sharded(model.output_layer, gather) and group.size() > 1:
            guesses = megatrons._vocab_parallel_argmax(logits.detach(), group, group.size())
        counts = segment.weights[2]
        return ((guesses.squeeze(1) == segment.labels[0]) * counts).sum(), counts.sum()

    @property
    def _is_detached(self) -> bool:
        """Whether nothing of this loss goes into the rest of the model (since 0.19)."""
        return bool(getattr(self._model.config, "mtp_detach_heads", False))


def _reaching(hidden: Tensor, predicted: Tensor) -> Tensor:
    """`hidden`; a backward from it goes to `predicted` as well, with zeros."""
    from megatron_prefix.layers.own_backward import with_backward

    shape = predicted.shape
    result: Tensor = with_backward(
        lambda hidden, _: hidden.view_as(hidden),
        lambda gradient: (gradient, gradient.new_zeros(shape)),
        hidden, predicted,
    )  # fmt: skip
    return result


def _process() -> Any:
    """Megatron's function that makes the loss of the layer's output; None before 0.17."""
    from megatron.core.transformer import multi_token_prediction

    return getattr(multi_token_prediction, "process_mtp_loss", None)


def _on_device(
    tables: AheadTables, device: Any, ranks: int, rank: int
) -> list[list[_FurtherSegment]]:
    """What the segments of a step read, by depth.

    Args:
        tables: the step's.
        device: where the model is.
        ranks, rank: see `StepAhead`.
    """
    from megatron_prefix.device.transfer import to_device

    rows = [_padded_rows(row, ranks) for by_depth in tables.rows() for row in by_depth]
    nums = [len(segment.labels) for segment in rows]
    local = [
        np.unique(np.split(segment.places, ranks)[rank], return_inverse=True) for segment in rows
    ]
    labels, *place_columns = (
        to_device(device, np.concatenate([np.zeros(0, np.int64), *parts]))
        for parts in ([segment.labels for segment in rows], *zip(*local, strict=True))
    )
    distinct, repeats = place_columns or (labels, labels)
    parts = [np.zeros((3, 0)), *(segment.weights[:3] for segment in rows)]
    weights = to_device(device, np.concatenate(parts, 1))
    following = to_device(device, tables.following())[:, :, None]
    depths, by_segment = len(following), following.split(tables.lengths, 3)
    parts_read = [
        _FurtherSegment(*columns)
        for columns in zip(
            [of_depth for of_segment in by_segment for of_depth in of_segment],
            distinct.split([len(unique) for unique, _ in local]),
            repeats.split([len(numbers) for _, numbers in local]),
            labels[None].split(nums, 1),
            weights.split(nums, 1),
            _shares(rows, device),
            strict=True,
        )
    ]
    return [parts_read[first : first + depths] for first in range(0, len(parts_read), depths)]


def _shares(rows: Sequence[FurtherRows], device: Any) -> Iterable[_Shares | None]:
    """Of all segments, on the model's device; None where microbatches are not told apart."""
    from megatron_prefix.device.transfer import to_device

    if all(len(segment.weights) == 3 for segment in rows):
        return [None] * len(rows)
    places = [np.stack(np.nonzero(segment.weights[3:])) for segment in rows]
    weights = [
        segment.weights[3:][tuple(place)] for segment, place in zip(rows, places, strict=True)
    ]
    sizes = [len(weight) for weight in weights]
    microbatch, row = to_device(device, np.concatenate(places, axis=1))
    columns = microbatch, row, to_device(device, np.concatenate(weights))
    return [*map(_Shares, *(column.split(sizes) for column in columns))]


def _padded_rows(rows: FurtherRows, ranks: int) -> FurtherRows:
    """As many rows for every sequence-parallel rank: the last one again, without a weight."""
    extra = -len(rows.places) % ranks
    places = np.pad(rows.places, (0, extra), "edge") if extra else rows.places
    labels, weights = np.pad(rows.labels, (0, extra)), np.pad(rows.weights, ((0, 0), (0, extra)))
    return FurtherRows(places, labels, weights)
