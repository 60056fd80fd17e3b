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
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megatron_prefix.features.mtp.methods import (
    Substitute,
    detaches_head,
    in_place,
    repeats,
    substitute_of,
)
from megatron_prefix.features.mtp.step import FurtherSegment, StepAhead
from megatron_prefix.layers.kind import Override

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_prefix.layers.segment import SegmentContext
    from megatron_prefix.megatron.install import Hooks


class _Embedding:
    """A model's embedding of a segment's inputs further on, whatever it is called with."""

    def __init__(self, stock: Any, inputs: dict[str, Tensor]) -> None:
        self._stock, self._inputs = stock, inputs

    def __call__(self, **_: Any) -> Tensor:
        rows: Tensor = self._stock(**self._inputs)
        return rows

    def __getattr__(self, name: str) -> Any:  # newer layers ask whether it scatters
        return getattr(self._stock, name)


class _Depth(Substitute):
    """One of Megatron's layers of multi-token prediction, in segments.

    Args:
        layer: it.
        depth: its place among them, from 0; of one that runs again the first.
        block: all of them.
    """

    def __init__(self, layer: Any, depth: int, block: LooksAhead) -> None:
        self._layer, self._depth, self.block = layer, depth, block
        self.stock = in_place(layer, "_get_embeddings")

    def embeddings(self, *args: Any, embedding: Any, **named: Any) -> Any:
        """Megatron's, with the embedding of the segment's inputs further on."""
        following = self.block.following(self._depth)
        if following is None:
            return self.stock(*args, embedding=embedding, **named)
        inputs, positions = following
        # What Megatron moves of these nobody looks at; a call with embeddings may have no others.
        own = {"input_ids": inputs, "position_ids": positions}
        group, self._layer.cp_group = self._layer.cp_group, None  # nothing to exchange
        try:
            return self.stock(*args, **{**named, **own, "embedding": _Embedding(embedding, own)})
        finally:
            self._layer.cp_group = group


class LooksAhead(Substitute):
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
        self._layers, self._repeats = [*model.mtp.layers], repeats(model.mtp)
        self._is_hybrid = not hasattr(model, "_postprocess")
        self._detaches_head = detaches_head(model)
        replaced = (model.mtp, "forward") if self._is_hybrid else (model, "_postprocess")
        self.stock, self.block = in_place(*replaced), self
        self.gathers_output: bool | None = None

    def give_back(self) -> None:
        """See Kept: it holds nothing."""

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
        places = (substitute_of(module, name) for module, name, _ in self.overrides())
        return all(place is not None and place.block is self for place in places)

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
        # As Megatron hands it on: patches drop the graph of a view.
        predicted = hidden.detach() if self._is_detached else hidden.view_as(hidden)
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
                hidden_states=hidden, attention_mask=None, rotary_pos_emb=self._hooks.angles,
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

    def _logits(self, predicted: Tensor, segment: FurtherSegment, named: Any) -> Tensor:
        """[rows, 1, vocabulary of this rank]."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        from megatron_prefix.layers.blocks.unread import picked

        model, config, weight = self._model, self._model.config, None
        if model.share_embeddings_and_output_weights:
            weight = model.shared_embedding_or_output_weight()
        if self._detaches_head:
            weight = (model.output_layer.weight if weight is None else weight).detach()
        if config.sequence_parallel:
            group = model.pg_collection.tp
            predicted = gather_from_sequence_parallel_region(predicted, group=group)
        rows = picked(picked(predicted, segment.distinct), segment.repeats, repeats=True)
        gather = named.get("runtime_gather_output")
        logits: Tensor = model.output_layer(rows, weight=weight, runtime_gather_output=gather)[0]
        return model._scale_logits(logits) if getattr(config, "use_mup", False) else logits

    def _guesses(self, logits: Tensor, segment: FurtherSegment, named: Any) -> Sequence[Tensor]:
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
