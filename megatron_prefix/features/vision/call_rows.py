"""Rows that one model call gives instead of tokens, and the graphs behind them.

Calls of all microbatches are there at the same time, and most of their rows are copies.  So those
that segments are computed from are kept, and the call's own tensor is emptied, as Megatron does
with outputs that it has sent (`deallocate_output_tensor`): what made it needs its gradient only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.variable import Variable

from megatron_prefix.features.vision.fingerprints import combined, fingerprints
from megatron_prefix.run.calls import EMBEDDINGS, ModelCall

MASK, DEEPSTACK = "visual_pos_masks", "deepstack_visual_embeds"
"""Arguments of a call, or of its decoder: which positions are of images, and what first layers add
to these."""
Places = tuple[Tensor, Tensor]
"""Positions of a call on this rank, and their samples: int64 [rows] each."""


@dataclass
class CallRows:
    """Rows of one call on this rank.

    Attributes:
        hidden: embeddings [positions, samples, hidden_size]; empty after `keep`.
        deep: for each deepstack layer, rows [images' positions, hidden_size].
        numbers: of a position's deepstack row, int64 [positions, samples]; -1: it has none.
        shape: of `hidden`.
        kept: rows of it that segments are computed from, [rows, hidden_size]; None before `keep`.
        gradients: of `kept` and `deep`; empty before the first.
    """

    hidden: Tensor
    deep: list[Tensor]
    numbers: Tensor
    shape: torch.Size
    kept: Tensor | None = None
    gradients: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, call: ModelCall, positions_first: bool) -> CallRows:
        """Those of a call, whose mask of images is [samples, positions] or the other way round."""
        hidden, mask, deep = (call.keyword(name) for name in (EMBEDDINGS, MASK, DEEPSTACK))
        none = torch.full(hidden.shape[:2], -1, device=hidden.device)
        if mask is None or deep is None or not len(deep):
            return cls(hidden, [], none, hidden.shape)
        visible = mask.flatten().to(hidden.device)
        numbers = torch.where(visible, visible.cumsum(0) - 1, -1).view(mask.shape)
        return cls(hidden, [*deep], numbers if positions_first else numbers.T, hidden.shape)

    @property
    def trains(self) -> bool:
        """Whether gradients go on behind the rows."""
        return any(tensor.requires_grad for tensor in (self.hidden, *self.deep))

    def words(self) -> Tensor:
        """What tells two rows apart, int64 [positions, samples]: the bits of all of their parts."""
        numbers = fingerprints(self.hidden.detach())
        visible = self.numbers >= 0
        for layer in self.deep:  # text has none, be there images in its call or not
            rows = torch.cat([fingerprints(layer.detach()), numbers.new_zeros(1)])
            numbers = torch.where(visible, combined(numbers, rows[self.numbers]), numbers)
        return combined(numbers, visible.long())

    def keep(self, places: Places) -> None:
        """Keeps the rows that segments are computed from, and no others; once."""
        self._places = places
        self._slots = self.numbers.new_full(self.shape[:2], -1)
        self._slots[places] = torch.arange(len(places[0]), device=self._slots.device)
        self.kept = self.hidden.detach()[places]
        if not self.hidden.is_leaf:  # a leaf's gradient has its shape
            self.hidden.data = self.hidden.new_empty(1)

    def read(self, into: Tensor, places: Places, at: Tensor, images: Tensor) -> None:
        """Puts rows into some places of [1 + deepstack layers, positions, hidden_size]; `images`
        says which of `places` have deepstack rows, so that the host need not ask the device."""
        into[0, at] = self.kept[self._slots[places]]  # type: ignore[index]
        numbers, at = self.numbers[places][images], at[images]
        for layer, deep in enumerate(self.deep[: len(into) - 1], 1):
            into[layer, at] = deep.detach()[numbers].to(into.dtype)

    def write(self, gradients: Tensor, places: Places, at: Tensor, images: Tensor) -> None:
        """Stores `gradients[:, at]` for the rows at `places`; the inverse of `read`."""
        self.gradients[0][self._slots[places]] = gradients[0, at]
        numbers, at = self.numbers[places][images], at[images]
        for layer, gradient in enumerate(self.gradients[1 : len(gradients)], 1):
            gradient[numbers] = gradients[layer, at].to(gradient.dtype)

    def begin_gradients(self) -> None:
        """Makes room for them, once."""
        if not self.gradients:
            self.gradients = [torch.zeros_like(tensor) for tensor in (self.kept, *self.deep)]  # type: ignore[arg-type]

    def backward(self) -> None:
        """Goes on with the gradients, if any came, through what has made the rows."""
        if not self.gradients:
            return
        first, *deep_gradients = self.gradients
        full = first.new_zeros(self.shape).index_put_(self._places, first)
        every = zip((self.hidden, *self.deep), (full, *deep_gradients), strict=True)
        pairs = [(tensor, gradient) for tensor, gradient in every if tensor.requires_grad]
        self.gradients = []
        if pairs:  # together: they come from one graph. Not torch's own, which compares shapes
            Variable._execution_engine.run_backward(
                tuple(tensor for tensor, _ in pairs), tuple(grad for _, grad in pairs), False,
                False, (), allow_unreachable=True, accumulate_grad=True,
            )  # fmt: skip
