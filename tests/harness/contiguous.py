"""Calls that give every context-parallel rank one contiguous part of a row, and attention for them.

A pack is cut as a whole, as slime and miles do with `--allgather-cp`, and verl for models that have
it so: a part begins and ends inside a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.layers import attention as known
from tests.harness.calls import Trainer
from tests.oracle.attention import DefinedAttention


class ContiguousCore(DefinedAttention):
    """Softmax by its definition over what ranks hold that way."""

    def places(self, lengths: list[int], rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        """See `DefinedAttention.places`."""
        samples = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        places = torch.cat([torch.arange(length) for length in lengths])
        return samples.chunk(ranks)[rank], places.chunk(ranks)[rank]


class ContiguousAttention(SelfAttention):
    """Megatron's attention without rotary embeddings, around such a core."""


known.CORES.add(f"{ContiguousCore.__module__}.{ContiguousCore.__qualname__}")
known.TAKES_CONTIGUOUS.add(f"{ContiguousAttention.__module__}.{ContiguousAttention.__qualname__}")


def put_into(chunk: Any) -> None:
    """Gives every layer of a model chunk that attention."""
    for layer in unwrap(chunk).decoder.layers:
        module = layer.self_attention
        module.__class__ = ContiguousAttention
        module.core_attention = ContiguousCore(
            module.config, module.layer_number, module.attn_mask_type, module.attention_type,
            pg_collection=module.pg_collection,
        )  # fmt: skip


class ContiguousTrainer(Trainer):
    """Packs of samples of any length, padded by a sample at the end, as slime has them."""

    def batch_of(self, members: Sequence[Any], number: int, multiple: int) -> dict[str, Any]:
        """See `Trainer.batch_of`."""
        batch = super().batch_of(members, number, 1 if self.form.packed else multiple)
        more = -sum(batch["lengths"]) % self._multiple
        for name in ("lengths", "true") if more and self.form.packed else ():
            batch[name].append(more)
        return batch

    def cut(self, rows: list[np.ndarray]) -> list[np.ndarray]:
        """See `Trainer.cut`."""
        if self.form.packed:
            whole = np.concatenate(rows)
            rows = [np.pad(whole, (0, -len(whole) % self._multiple))]
        rank = parallel_state.get_context_parallel_rank()
        return [np.split(row, self.layout.cp)[rank] for row in rows]

    @property
    def _multiple(self) -> int:
        return 4 * self.layout.cp * self.layout.tp
