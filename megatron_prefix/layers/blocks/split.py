"""Causal runs with more keys than queries, for operators whose mask begins with the first key.

Such a run is two blocks: every query sees the keys before the last ones, and the last ones, as many
as there are queries, causally.
"""

from __future__ import annotations

from torch import Tensor

from megatron_prefix.layers.blocks.interface import Aux, Batched, Gradients, Partial, Saved, joined
from megatron_prefix.layers.blocks.merge import merge


class SplitCausal(Batched):
    """Batched calls of an operator that takes causal runs with as many keys as queries only."""

    def block(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Aux]:
        """See `Batched.block`."""
        more = k.shape[1] - q.shape[1]
        if not (causal and more):
            return self.attend(q, k, v, scale, causal)
        early = self.attend(q, k[:, :more], v[:, :more], scale, False)
        late = self.attend(q, k[:, more:], v[:, more:], scale, True)
        parts = [
            Partial(out.flatten(0, 1), lse.transpose(0, 1).flatten(1))
            for out, lse, _ in (early, late)
        ]
        out, lse = merge(parts)
        num = (q.shape[0], q.shape[1])
        return out.unflatten(0, num), lse.unflatten(1, num).transpose(0, 1), (early[2], late[2])

    def block_backward(self, saved: Saved, aux: Aux, scale: float, causal: bool) -> Gradients:
        """See `Batched.block_backward`."""
        more = saved.k.shape[1] - saved.q.shape[1]
        if not (causal and more):
            return self.attend_backward(saved, aux, scale, causal)
        shares = []
        for keys, part_aux, masked in (
            (slice(None, more), aux[0], False), (slice(more, None), aux[1], True),
        ):  # fmt: skip
            part = saved._replace(k=saved.k[:, keys], v=saved.v[:, keys])
            shares.append(self.attend_backward(part, part_aux, scale, masked))
        (dq, *early), (more_dq, *late) = shares
        dk, dv = (joined(pair, dim=1) for pair in zip(early, late, strict=True))
        return dq + more_dq, dk, dv
