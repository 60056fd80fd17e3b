"""The packed graph: a prompt once with every answer behind it, one sequence and a block mask.

FlexAttention runs it on CUDA, compiled. On the CPU it has no backward ("FlexAttention does not
support backward on CPU", torch 2.13), so there torch's attention gets the same mask as a tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

BLOCK = 128
"""FlexAttention's blocks; where every part begins at one, fewest blocks need the mask's formula."""
PROMPT, PADDING = 0, -1
BACKENDS = ("triton", "fa4")
_VERSIONS = 64
"""Masks and shapes in one process; torch stops compiling a function after eight by itself."""


def documents(prompt: int, answers: Sequence[int], multiple: int = 1) -> Tensor:
    """What every position of a packed graph belongs to, int32 [positions].

    Args:
        prompt: its positions.
        answers: positions of each answer.
        multiple: prompt and answers are each padded to a multiple of it. Padding behind the prompt
            is `PADDING`; behind an answer it is the answer's, whose own positions come before it.
    """
    padding = -prompt % multiple
    numbers = [PROMPT] * prompt + [PADDING] * padding
    for number, length in enumerate(answers, 1):
        numbers += [number] * (length + -length % multiple)
    return torch.tensor(numbers, dtype=torch.int32)


class PackedAttention:
    """Attention in a packed graph: answers see the prompt and themselves, all causally.

    The block mask is made once: a model's layers share it. FlexAttention compiles for every mask,
    so an object should serve all calls with the same one (`packed_attention`).

    Args:
        belongs: of `documents`, on the device.
        backend: "triton", FlexAttention's own kernel, or "fa4", its experimental one.
        mode: of torch.compile; None: the default.
    """

    def __init__(self, belongs: Tensor, backend: str = "triton", mode: str | None = None) -> None:
        self._belongs = belongs
        self._options: dict[str, Any] = {}
        if backend == "fa4":
            self._options["kernel_options"] = {"BACKEND": "FLASH"}
        on_cpu = belongs.device.type == "cpu"
        self._call = self.masked if on_cpu else functools.partial(self.flex, compiled(mode))

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            same = belongs[key] == belongs[query]
            return (key <= query) & (same | (belongs[key] == PROMPT))

        self._sees = sees  # a closure and no method: it is compiled into the kernels

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """[positions, heads, dim] and K, V [positions, kv_heads, dim] to [positions, heads, dim]"""
        heads = (x.transpose(0, 1)[None] for x in (query, key, value))
        grouped = query.shape[1] != key.shape[1]
        return self._call(*heads, scale=scale, enable_gqa=grouped)[0].transpose(0, 1)

    def flex(
        self, function: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, **how: Any
    ) -> Tensor:
        """By FlexAttention, compiled or not; [1, heads, positions, dim]."""
        return function(query, key, value, block_mask=self.block_mask, **how, **self._options)

    def masked(self, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        """By torch's attention with the whole mask."""
        place = torch.arange(len(self._belongs), device=query.device)
        seen = self._sees(place, place, place[:, None], place)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, **how)

    @functools.cached_property
    def block_mask(self) -> BlockMask:
        """Which blocks are computed, and which of them need its formula.

        Made without torch.compile, which would save memory here and can fail.
        """
        length, device = len(self._belongs), self._belongs.device
        return create_block_mask(
            self._sees, None, None, length, length, device=str(device), BLOCK_SIZE=BLOCK
        )


@functools.cache
def packed_attention(
    prompt: int,
    answers: tuple[int, ...],
    multiple: int,
    device: torch.device,
    backend: str = BACKENDS[0],
    mode: str | None = None,
) -> PackedAttention:
    """The attention of a graph; arguments as in `documents` and `PackedAttention`."""
    return PackedAttention(documents(prompt, answers, multiple).to(device), backend, mode)


@functools.cache
def compiled(mode: str | None) -> Callable[..., Tensor]:
    """FlexAttention; if it cannot be compiled it fails, and does not run uncompiled."""
    torch._dynamo.config.recompile_limit = _VERSIONS
    return torch.compile(flex_attention, dynamic=False, fullgraph=True, mode=mode)
