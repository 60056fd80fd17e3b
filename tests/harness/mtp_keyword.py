"""Megatron as slime and miles change it: models that predict further where calls have a keyword."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import multi_token_prediction as mtp
from megatron.core.utils import make_viewless_tensor
from torch import Tensor


@contextlib.contextmanager
def keyword(*, trains_head: bool = False, moves_mask: bool = True) -> Iterator[None]:
    """Meanwhile models have the keyword: see features/mtp/patches.py.

    Args:
        trains_head: gradients of further labels go into the output layer, as before.
        moves_mask: as labels.
    """
    head = GPTModel._postprocess

    def _postprocess(self: Any, hidden_states: Tensor, input_ids: Any, position_ids: Any,
                     labels: Any, rotary_pos_emb: Any, rotary_pos_cos: Any, rotary_pos_sin: Any,
                     mtp_in_postprocess: Any = None, loss_mask: Any = None, mtp_kwargs: Any = None,
                     **named: Any) -> Any:  # fmt: skip
        given = mtp_kwargs or vars(self).get("further")
        if mtp_in_postprocess and given:
            hidden_states = _with_losses(
                self, hidden_states, given["mtp_labels"], loss_mask, trains_head, moves_mask,
                input_ids=input_ids, position_ids=position_ids, rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=named.get("packed_seq_params"), attention_mask=None,
            )  # fmt: skip
        with mock.patch.object(self.config, "mtp_num_layers", None):
            return head(
                self, hidden_states, input_ids, position_ids, labels, rotary_pos_emb,
                rotary_pos_cos, rotary_pos_sin, **named,
            )  # fmt: skip

    patches = (
        (GPTModel, _forward(GPTModel.forward)),
        (GPTModel, _postprocess),
        (mtp.MultiTokenPredictionLayer, _embeddings(mtp.MultiTokenPredictionLayer._get_embeddings)),
    )
    with contextlib.ExitStack() as stack:
        for owner, method in patches:
            method.__module__ = owner.__module__  # as in a changed file of Megatron's
            stack.enter_context(mock.patch.object(owner, method.__name__, method))
        yield


def _forward(stock: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self, input_ids, position_ids, attention_mask, mtp_kwargs=None, **named):
        self.further = mtp_kwargs
        try:
            return stock(self, input_ids, position_ids, attention_mask, **named)
        finally:
            self.further = None

    return forward


def _embeddings(stock: Callable[..., Any]) -> Callable[..., Any]:
    """No gradient leaves the first layer."""

    def _get_embeddings(self: Any, *args: Any, hidden_states: Tensor, **named: Any) -> Any:
        hidden = make_viewless_tensor(hidden_states, requires_grad=True, keep_graph=False)
        *ids, rows, hidden = stock(self, *args, hidden_states=hidden, **named)
        return *ids, rows.detach(), hidden

    return _get_embeddings


def _with_losses(model, hidden, labels, mask, trains_head, moves_mask, **named):
    """The decoder's output, with the losses of further labels."""
    packed, config = named["packed_seq_params"], model.config
    roll = functools.partial(mtp.roll_tensor, cp_group=model.cp_group, packed_seq_params=packed)
    (labels, _), mask = roll(labels), roll(mask)[0] if moves_mask else mask
    num = config.mtp_num_layers
    hidden, *further = model.mtp(
        hidden_states=hidden, embedding=model.embedding, **named
    ).chunk(1 + num)  # fmt: skip
    weight = model.output_layer.weight
    if model.share_embeddings_and_output_weights:
        weight = model.shared_embedding_or_output_weight()
    for depth, predicted in enumerate(further):
        (labels, _), (mask, left) = roll(labels), roll(mask)
        logits, _ = model.output_layer(predicted, weight=weight if trains_head else weight.detach())
        loss = mask * model.compute_language_model_loss(labels, logits)
        if model.training:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            mtp.MTPLossLoggingHelper.save_loss_to_tracker(
                loss.sum() / left, depth, num, avg_group=group
            )
        factor = (
            config.mtp_loss_scaling_factor / num / (1 if config.calculate_per_token_loss else left)
        )
        hidden = mtp.MTPLossAutoScaler.apply(hidden, factor * loss)
    return hidden
