"""Heads of trainers' own: what a model call asks of the end of the model.

Some trainers give the last stage a head that never makes logits.  Segments run it as calls do, on
positions of their own; what is told apart here is how its labels and its output lie.

1. It moves labels by one itself and returns nothing for the last position of a row: NeMo-RL's fused
   linear log-probs (`_gpt_forward_with_linear_ce_fusion` of nemo_rl.distributed.model_utils).
   Behind a span other labels follow than in a row, so segments give it labels that come out right
   once they are moved, and rows more, of which the last is left out.
2. It puts weights into a dict that the call has brought, and the loss goes on from there: SkyRL's
   fused head (`output_processor_context` of Megatron-Core 0.18 and newer).  Segments get what the
   call's dict has, and calls what a segment's call put into its own.
3. Ranks of sequence parallelism each return their rows of a tensor (verl's fused kernels return the
   hidden states, too): see run/execute/call_outputs.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import (
    _pytree as pytree,  # torch's own; torch.utils.pytree is not public before 2.9
)

from megatron_prefix.errors import refused
from megatron_prefix.refusals.table import AHEAD_HEAD, FILLED
from megatron_prefix.run.calls import FILLED_BY_MODEL, ModelCall

MOVES_LABELS = "return_logprobs_for_linear_ce_fusion"
"""Keyword of a call whose head moves labels by one itself."""
OWN_HEAD = "output_processor"
"""Keyword for a head instead of Megatron's."""


def moves_labels(arguments: Mapping[str, Any]) -> bool:
    """Whether the head of a call moves labels by one, and returns one position less."""
    return bool(arguments.get(MOVES_LABELS))


def fills(arguments: Mapping[str, Any]) -> bool:
    """Whether the head of a call may fill a dict of the call's."""
    return isinstance(arguments.get(FILLED_BY_MODEL), dict)


def check(calls: Sequence[ModelCall]) -> None:
    """Refuses heads of trainers' own, on models that have heads for further tokens."""
    for call in calls:
        if moves_labels(call.arguments) or fills(call.arguments) or call[OWN_HEAD] is not None:
            raise refused(AHEAD_HEAD)


def moved(call: ModelCall) -> Tensor | None:
    """What positions of a call whose head moves labels predict, int like these; behind a row's last
    one anything."""
    labels = call["labels"]
    return None if labels is None else labels.roll(-1, -1)


def before_moving(labels: Tensor, more: int) -> Tensor:
    """Labels [1, rows] as a head gets them that moves them by one, of rows and `more` others."""
    return torch.cat([labels[:, :1], labels, labels[:, -1:].expand(-1, more - 1)], 1)


def without_more(output: Any, num: int) -> Any:
    """What such a head returns for its first rows: tensors [1, positions]."""
    return pytree.tree_map(lambda leaf: leaf[:, :num] if isinstance(leaf, Tensor) else leaf, output)


def added(filled: Mapping[Any, Any], before: Mapping[Any, Any]) -> dict[Any, Any]:
    """What a dict has that it did not have before."""
    return {n: value for n, value in filled.items() if n not in before or before[n] is not value}


class FilledDict:
    """What segments put into the dict that calls bring: the same for all, so that calls can get it.

    Attributes:
        items: what segments have put there; None before the first.
    """

    def __init__(self, brought: Mapping[Any, Any]) -> None:
        # Weights are of a call that was answered in an attempt before.
        self.brought = {n: value for n, value in brought.items() if not isinstance(value, Tensor)}
        self.items: dict[Any, Any] | None = None

    def take(self, arguments: Mapping[str, Any], *, scored: bool) -> None:
        """Looks at what a segment's call has put into its dict.

        Raises:
            UserError: that is one thing per segment.
        """
        filled = added(arguments[FILLED_BY_MODEL], self.brought)
        before = filled if self.items is None or not scored else self.items
        same = filled.keys() == before.keys() and all(filled[n] is before[n] for n in filled)
        if (filled and not scored) or not same or not all(map(is_shared, filled.values())):
            raise refused(FILLED, FILLED_BY_MODEL)
        if scored:
            self.items = filled

    def give(self, call: ModelCall) -> None:
        call[FILLED_BY_MODEL].update(self.items or {})


def is_shared(value: Any) -> bool:
    """Whether what a model puts into a call's dict is not one call's."""
    return value is None or isinstance(value, nn.Parameter)
