"""What a `_postprocess` with slime's and miles' keyword does, seen on five positions.

Older patches of theirs have the keyword, too, and let gradients into the output layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_prefix.features.mtp.patches import KEYWORD, TOKENS


class _OwnLogits(Exception):
    """The output layer is asked for the model's own logits: losses further on are done."""


class _Head(nn.Module):
    """An output layer that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 2))
        self.inputs: list[Tensor] = []

    def forward(self, input_: Tensor, weight: Any = None, **_: Any) -> tuple[Tensor, None]:
        """Logits of further labels, [positions, 1, 8]."""
        self.inputs.append(input_)
        if len(self.inputs) > 1:
            raise _OwnLogits
        return input_ @ (self.weight if weight is None else weight).T, None


@functools.cache
def follows_rule(postprocess: Callable[..., Any]) -> bool:
    """Whether labels and weights move by two at the first layer, a loss is divided by the weights
    that are left, whatever they are, and no gradient goes into the output layer.

    Args:
        postprocess: a function, as it stands in the model's class.
    """
    with torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():
        tokens, mask = torch.arange(3, 8)[None], torch.tensor([[1, 2, 0.25, 0.125, 0.0625]])
        try:
            labels, weights, trains_head = _seen(postprocess, tokens, mask)
        except Exception:  # noqa: BLE001  # it asks the model for what `_seen` does not know
            return False
        left = _moved(mask)
        is_same = torch.equal(labels, _moved(tokens)) and torch.allclose(weights, left / left.sum())
        return is_same and not trains_head


def _seen(postprocess: Any, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Labels and weights of the first layer, and whether its logits have a gradient."""
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler as Scaler

    head, losses = _Head(), torch.zeros(mask.shape, requires_grad=True)
    seen: list[tuple[Tensor, Tensor]] = []

    def loss(labels: Tensor, logits: Tensor) -> Tensor:
        seen.append((labels, logits))
        return losses

    config = SimpleNamespace(
        mtp_num_layers=1, mtp_loss_scaling_factor=1.0, calculate_per_token_loss=False
    )
    model = SimpleNamespace(
        config=config, training=False, post_process=True, share_embeddings_and_output_weights=False,
        cp_group=None, fuse_linear_cross_entropy=False, embedding=None, output_layer=head,
        mtp=lambda hidden_states, **_: torch.cat([hidden_states] * 2),
        compute_language_model_loss=loss,
    )  # fmt: skip
    before, Scaler.main_loss_backward_scale = Scaler.main_loss_backward_scale, torch.ones(())
    try:
        postprocess(
            model, torch.ones(mask.shape[1], 1, 2), tokens, None, None, None, None, None,
            mtp_in_postprocess=True, loss_mask=mask, **{KEYWORD: {TOKENS: tokens}},
        )  # fmt: skip
    except _OwnLogits:
        (weights,) = torch.autograd.grad(head.inputs[-1].sum(), losses)
    finally:
        Scaler.main_loss_backward_scale = before
    [(labels, logits)] = seen
    return labels, weights, logits.requires_grad


def _moved(row: Tensor) -> Tensor:
    """[1, positions], by two; zeros behind."""
    return torch.cat([row[:, 2:], torch.zeros_like(row[:, :2])], 1)
