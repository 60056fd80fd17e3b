"""Heads as trainers put them on Megatron's models, and forward steps that call them.

Each is written anew after the contract of its call: what it is given, what it returns, and what the
loss does with that.  `kernels` is verl's fused kernels, `moved` NeMo-RL's fused linear log-probs,
`filled` SkyRL's fused head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.run.calls import FILLED_BY_MODEL
from megatron_prefix.run.read.heads import MOVES_LABELS
from tests.harness.calls import Form, Trainer, nll_of

HEADS = ("kernels", "moved", "filled")


@dataclass(frozen=True)
class HeadForm(Form):
    """How a trainer calls a model that has a head of its own.

    Attributes:
        head: one of `HEADS`.
        scale: of hidden states, in the dict that `filled` fills; None: that is empty.
    """

    head: str = "kernels"
    scale: float | None = None


class HeadTrainer(Trainer):
    """Forward steps that call such a model; the loss goes on from what its head returns."""

    form: HeadForm

    def arguments(self, batch: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        if self.form.head == "filled":
            scale = self.form.scale
            batch["context"], given["labels"] = {} if scale is None else {"scale": scale}, None
            return {FILLED_BY_MODEL: batch["context"]}
        if self.form.head == "moved":
            if given.get("labels") is not None:
                given["labels"] = batch["tokens"]
            return {MOVES_LABELS: True}
        return {"temperature": 0.9}

    def loss_of(self, batch: dict[str, Any]) -> Callable[[Any], Any]:
        head, shares = self.form.head, self.layout.sequence_parallel
        cut = {name: batch[name][:, :-1] for name in ("loss_mask", "weight")}
        loss_of = super().loss_of(batch | cut if head == "moved" else batch)

        def loss_func(output: Any) -> Any:
            if head == "moved":  # it says nothing of the last position
                return loss_of(-output)
            if head == "filled":
                weight = batch["context"].pop("weight")
                assert batch["context"] in ({}, {"scale": self.form.scale})
                return loss_of(nll_of(_whole(output, shares) @ weight.T, batch["labels"]))
            loss, *others = loss_of(-output["log_probs"])
            hidden, mask = output["hidden_states"].transpose(0, 1), batch["loss_mask"]
            loss = loss + (output["entropy"] * mask).sum()
            if shares:  # each rank looks at its own rows
                rank = parallel_state.get_tensor_model_parallel_rank()
                mask = mask.chunk(self.layout.tp, 1)[rank]
            return loss + 1e-2 * (hidden.square().sum(-1) * mask).sum(), *others

        return loss_func


def put_into(chunk: Any, head: str) -> None:
    """Puts a head on a model chunk, as trainers replace its `forward`."""
    model = unwrap(chunk)

    def forward(
        input_ids: Any, position_ids: Any, attention_mask: Any, labels: Any = None,
        packed_seq_params: Any = None, loss_mask: Any = None, **given: Any,
    ) -> Any:  # fmt: skip
        inputs, rotary, *_ = model._preprocess(
            input_ids, position_ids, packed_seq_params=packed_seq_params
        )
        hidden = model.decoder(
            inputs, attention_mask, rotary_pos_emb=rotary, packed_seq_params=packed_seq_params
        )
        return _HEADS[head](model, hidden, labels, given) if model.post_process else hidden

    model.forward = forward


def _kernels(model: Any, hidden: Tensor, labels: Tensor, given: dict[str, Any]) -> Any:
    logits = _logits(model, hidden) / given["temperature"]
    entropy = -nll_of(logits, labels.new_zeros(labels.shape))
    return {"hidden_states": hidden, "log_probs": -nll_of(logits, labels), "entropy": entropy}


def _moved(model: Any, hidden: Tensor, labels: Tensor, given: dict[str, Any]) -> Any:
    assert given[MOVES_LABELS]
    return -nll_of(_logits(model, hidden), labels.roll(-1, -1))[:, :-1]


def _filled(model: Any, hidden: Tensor, _: None, given: dict[str, Any]) -> Any:
    given[FILLED_BY_MODEL]["weight"] = _weight(model)
    hidden = hidden * given[FILLED_BY_MODEL].get("scale", 1.0)
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden)
    return hidden.transpose(0, 1).contiguous()


_HEADS = {"kernels": _kernels, "moved": _moved, "filled": _filled}


def _weight(model: Any) -> Any:
    tied = model.share_embeddings_and_output_weights
    return model.shared_embedding_or_output_weight() if tied else model.output_layer.weight


def _logits(model: Any, hidden: Tensor) -> Tensor:
    shares = model.config.sequence_parallel
    if shares:
        hidden = gather_from_sequence_parallel_region(hidden)
    return _whole(hidden, shares).transpose(0, 1) @ _weight(model).T


def _whole(hidden: Tensor, gathered: bool) -> Tensor:
    """Hidden states whose gradient is summed over ranks, where a gather does not do that."""
    return hidden if gathered else copy_to_tensor_model_parallel_region(hidden)
