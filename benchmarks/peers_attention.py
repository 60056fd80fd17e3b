"""Attention of one group, forward and backward: by segments as the prefix schedule has them, and
of every rollout whole.

Every way to run it is a `Peer`; others are in peers_graphs.py. What it returns is compared as the
packed group: prompt once, then answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from benchmarks.bench_kernels import Shape
from megatron_prefix.layers.blocks.batched import Saved
from megatron_prefix.layers.blocks.core import segment_attention
from megatron_prefix.layers.blocks.kernels import Kernel, Runs
from megatron_prefix.layers.segment import SegmentContext
from megatron_prefix.sidecar.cache import SidecarCache
from megatron_prefix.tree import Forest, Pairs, Segment, TreeOptions, build
from megatron_prefix.tree.payload_map import Form, payload_map


class Results(NamedTuple):
    """Output and gradients of the packed group: [positions, heads, dim], kv_heads for dk, dv."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True)
class Inputs:
    """A packed group: `prefix` positions of the prompt, then `response` of each rollout.

    Attributes:
        shape: the group.
        q, dout: [positions, heads, dim].
        k, v: [positions, kv_heads, dim].
    """

    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @property
    def scale(self) -> float:
        """The softmax scale."""
        return self.q.shape[-1] ** -0.5

    def double(self) -> Inputs:
        """The same in fp64."""
        return Inputs(self.shape, *(x.double() for x in (self.q, self.k, self.v, self.dout)))


class Peer(Protocol):
    """One way; `forward` forgets what the call before it has left."""

    def forward(self) -> None:
        """Computes the outputs, and keeps what the backward needs."""
        ...

    def backward(self) -> None:
        """Computes the gradients of the last `forward`."""
        ...

    def results(self) -> Results:
        """What the last forward and backward have computed."""
        ...


class Ours:
    """Segments as the prefix schedule runs them: layers/blocks/core.py with its sidecar.

    All forwards run before all backwards, as in the other peers; the schedule itself takes a wave's
    backward right after its forward and needs less memory.

    Args:
        inputs: the group.
        kernel: runs the blocks.
        segment_tokens: most positions of a wave; see `PrefixConfig`.
    """

    def __init__(self, inputs: Inputs, kernel: Kernel, segment_tokens: int) -> None:
        forest = flat_forest(inputs.shape, segment_tokens)
        self._segments, self._scale, self._kernel = forest.segments, inputs.scale, kernel
        self._map = payload_map(forest.segments)
        rows = [_rows(segment, inputs.shape) for segment in forest.segments]
        self._leaves = [
            [x[mine].detach().requires_grad_() for mine in rows]
            for x in (inputs.q, inputs.k, inputs.v)
        ]
        self._dout = [inputs.dout[mine].flatten(1).unsqueeze(1) for mine in rows]
        self._outputs: list[Tensor] = []

    def forward(self) -> None:
        """See `Peer.forward`."""
        forget(self._leaves)
        self._outputs = []
        self._kernel.begin_step()
        self._cache = cache = SidecarCache(self._map, [Form.POSITIONS] * 1)
        none = torch.zeros(0)
        for index, segment in enumerate(self._segments):
            runs = Runs.own(tuple(span.padded for span in segment.spans))
            context = SegmentContext(index, segment.inner, runs, none, cache)
            q, k, v = (leaves[index].unsqueeze(1) for leaves in self._leaves)
            out = segment_attention(q, k, v, context, 0, self._scale, self._kernel)
            self._outputs.append(out)

    def backward(self) -> None:
        """See `Peer.backward`."""
        for index in reversed(range(len(self._segments))):
            self._outputs[index].backward(self._dout[index])
            if self._segments[index].inner:
                self._cache.free(index, consumed=True)

    def results(self) -> Results:
        """See `Peer.results`."""
        shape = self._leaves[0][0].shape[1:]
        outs = [out.detach().squeeze(1).unflatten(1, shape) for out in self._outputs]
        return Results(torch.cat(outs), *gradients_of(self._leaves))


class Copies:
    """Every rollout whole, prompt and answer, with a causal mask.

    Args:
        inputs: the group.
        kernel: one with `attend` (megatron_prefix/layers/blocks/interface.py, `Batched`).
        call_tokens: most positions of a call, which has one rollout at least. A call of all could
            have more elements than 32 bits count.
    """

    def __init__(self, inputs: Inputs, kernel: Any, call_tokens: int) -> None:
        self._shape, self._scale, self._kernel = inputs.shape, inputs.scale, kernel
        num, length = inputs.shape.num, inputs.shape.prefix + inputs.shape.response
        most = max(1, min(num, call_tokens // length))
        calls = -(-num // most)
        sizes = [num * (i + 1) // calls - num * i // calls for i in range(calls)]
        whole = [self._whole(x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout)]
        whole[3][1:, : inputs.shape.prefix] = 0  # the prompt's gradient comes once
        self._calls = list(zip(*(x.split(sizes) for x in whole), strict=True))
        self._parts: list[Any] = []
        self._found: list[Any] = []

    def _whole(self, x: Tensor) -> Tensor:
        """The packed group as [rollouts, prompt + answer, heads, dim], a copy."""
        prompt, answers = x.split([self._shape.prefix, self._shape.rows])
        return torch.cat(side_by_side(prompt, answers, self._shape), 1)

    def forward(self) -> None:
        """See `Peer.forward`."""
        self._parts, self._found = [], []
        for q, k, v, _ in self._calls:
            self._parts.append(self._kernel.attend(q, k, v, self._scale, True))

    def backward(self) -> None:
        """See `Peer.backward`."""
        for (q, k, v, dout), (out, lse, aux) in zip(self._calls, self._parts, strict=True):
            saved = Saved(dout, q, k, v, out, lse)
            self._found.append(self._kernel.attend_backward(saved, aux, self._scale, True))

    def results(self) -> Results:
        """See `Peer.results`; the prompt's gradients are those of all copies."""
        prefix = self._shape.prefix
        out = torch.cat([part[0] for part in self._parts])
        gradients = [torch.cat(each) for each in zip(*self._found, strict=True)]
        wide = torch.promote_types(out.dtype, torch.float32)
        return Results(
            torch.cat([out[0, :prefix], out[:, prefix:].flatten(0, 1)]),
            *(
                torch.cat([x[:, :prefix].to(wide).sum(0), x[:, prefix:].flatten(0, 1).to(wide)])
                for x in gradients
            ),
        )  # fmt: skip


def pairs(shape: Shape, dense: bool) -> float:
    """Queries times keys that they see, of N copies or with the prompt once."""
    if dense:
        return shape.num * (shape.prefix + shape.response) ** 2 / 2
    return shape.prefix**2 / 2 + shape.rows * (shape.prefix + shape.response / 2)


def flat_forest(shape: Shape, segment_tokens: int) -> Forest:
    """The group's segments: the prompt, and waves of some answers each."""
    rollouts = []
    for number in range(shape.num):
        first = shape.prefix + number * shape.response
        answer = np.arange(first, first + shape.response)
        tokens = np.concatenate([np.arange(shape.prefix), answer])
        rollouts.append(Pairs(tokens, tokens, np.arange(len(tokens)) >= shape.prefix))
    return build(rollouts, options=TreeOptions(segment_tokens=segment_tokens, min_gain=0))


def _rows(segment: Segment, shape: Shape) -> slice:
    """The positions of a segment in the packed group."""
    if segment.inner:
        return slice(0, shape.prefix)
    numbers = [span.rollouts[0] for span in segment.spans]
    if numbers != list(range(numbers[0], numbers[-1] + 1)):
        raise RuntimeError(f"a wave has the rollouts {numbers}, which are not neighbours")
    first = shape.prefix + numbers[0] * shape.response
    return slice(first, first + len(numbers) * shape.response)


def side_by_side(prompt: Tensor, answers: Tensor, shape: Shape) -> list[Tensor]:
    """The prompt for every rollout, [rollouts, prefix, ...], and the answers; both are views."""
    own = answers.unflatten(0, (shape.num, shape.response))
    return [prompt.expand(shape.num, *prompt.shape), own]


def gradients_of(leaves: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Of queries, keys and values, each from its parts."""
    return [torch.cat([part.grad for part in each]) for each in leaves]  # type: ignore[misc]


def forget(leaves: Sequence[Sequence[Tensor]]) -> None:
    """Drops all gradients."""
    for each in leaves:
        for part in each:
            part.grad = None
