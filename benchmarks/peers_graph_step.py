"""A group as one microbatch, the packed graph, for Megatron's stock schedule.

The prompt comes once. Behind it come the answers, each with the prompt's last token in front: that
position's label is the answer's first token, and differs by rollout. Positions go on from the
prompt's in every answer, and core attention is FlexAttention with a block mask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.peers_flex import PackedAttention
from megatron_prefix.lab.models.build import unwrap

Microbatch = dict[str, Any]
PER_POSITION = ("labels", "loss_mask", "advantages", "old_logprobs")
"""Fields of the loss."""


@dataclass(frozen=True)
class PackedGraph:
    """A group's microbatch.

    Attributes:
        item: what the forward step gets.
        lengths: of its answers, padding not counted.
        first: positions at the front whose output nobody reads, and which have no fields of the
            loss; 0: the output layer runs on the prompt as well.
    """

    item: Microbatch
    lengths: tuple[int, ...]
    first: int


def packed_graph(
    items: Sequence[Microbatch],
    shared: int,
    *,
    multiple: int = 1,
    answers_only: bool = False,
) -> PackedGraph:
    """The rollouts of a group as one microbatch.

    Args:
        items: of `batches.microbatch`, unpadded.
        shared: positions at the front that are the same in all and carry no loss: all of the prompt
            but its last.
        multiple: prompt and answers are each padded to a multiple of it.
        answers_only: leave the prompt out of the output layer and the loss.
    """
    lengths = tuple(item["tokens"].shape[1] - shared for item in items)
    first = shared + -shared % multiple

    def packed(name: str) -> Tensor:
        parts = [items[0][name][:, :shared], *(item[name][:, shared:] for item in items)]
        return torch.cat([F.pad(part, (0, -part.shape[1] % multiple)) for part in parts], 1)

    names = [name for name, value in items[0].items() if isinstance(value, Tensor)]
    fields: Microbatch = {name: packed(name) for name in names}
    if bool((fields["loss_mask"][:, :first] != 0).any()):
        raise ValueError("a packed graph trains no position of the prompt but its last")
    if answers_only:
        fields |= {name: fields[name][:, first:] for name in PER_POSITION if name in fields}
    uids = tuple(item["uid"] for item in items)
    item = {**fields, "group": items[0]["group"], "uid": uids}
    return PackedGraph(item, lengths, first if answers_only else 0)


@contextlib.contextmanager
def running(model: Any, graph: PackedGraph, attention: PackedAttention) -> Iterator[None]:
    """Makes a model run one packed graph, with the stock schedule.

    Args:
        model: a chunk that has all layers, wrapped or not, with rotary embeddings.
        graph: the microbatch.
        attention: of the same prompt, answers and multiple.
    """
    inner = unwrap(model)
    positions = graph.item["position_ids"][0]
    table = inner.rotary_pos_emb.get_emb(int(positions.max()) + 1)
    table = table[0] if isinstance(table, tuple) else table
    rotary = table.index_select(0, positions.to(table.device))

    def restarted(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return args, {**kwargs, "rotary_pos_emb": rotary}

    def read(_: nn.Module, __: Any, hidden: Tensor) -> Tensor:
        return hidden[graph.first :]

    with contextlib.ExitStack() as stack:
        handle = inner.decoder.register_forward_pre_hook(restarted, with_kwargs=True)
        stack.callback(handle.remove)
        stack.callback(inner.decoder.register_forward_hook(read).remove)
        for layer in inner.decoder.layers:
            core = layer.self_attention.core_attention
            scale = layer.self_attention.config.kv_channels**-0.5
            stack.enter_context(_replaced(core, _core_attention(attention, scale)))
        yield


def _core_attention(attention: PackedAttention, scale: float) -> Callable[..., Tensor]:
    """Replaces Megatron's: [positions, 1, heads, dim] to [positions, 1, heads * dim]."""

    def forward(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        out = attention(query.squeeze(1), key.squeeze(1), value.squeeze(1), scale)
        return out.flatten(1).unsqueeze(1)

    return forward


@contextlib.contextmanager
def _replaced(module: nn.Module, forward: Callable[..., Tensor]) -> Iterator[None]:
    """A module's forward, on the instance; what was there on the instance comes back."""
    before = vars(module).get("forward")
    module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before  # type: ignore[method-assign]
