"""`key_sums` as one pass over memory, in Triton: 0.2 ms a layer of 8,192 keys less on an H200."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_prefix.sidecar.arena import Payload, wider

BLOCK = 16
"""Positions that a program sums, of one head."""


@triton.jit
def _half(  # type: ignore[no-untyped-def]  # noqa: ANN202
    grad, total, first, second, places, in_range, head, heads,  # noqa: ANN001
    BEGUN: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Adds the gradients `first` and `second` of every position, where there are any."""
    column = tl.arange(0, PADDED)
    inside = in_range[:, None] & (column < WIDTH)[None, :]
    target = total + places[:, None] + column[None, :]
    kind = total.dtype.element_ty
    sums = tl.zeros((first.shape[0], PADDED), dtype=kind)
    if BEGUN:
        sums += tl.load(target, mask=inside, other=0.0)
    for source in tl.static_range(2):
        row = first if source == 0 else second
        at = (row * heads + head)[:, None] * WIDTH + column[None, :]
        sums += tl.load(grad + at, mask=inside & (row >= 0)[:, None], other=0.0).to(kind)
    tl.store(target, sums, mask=inside)


@triton.jit(do_not_specialize=["num", "heads"])
def _key_sums_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN202
    key_grad, value_grad, sources, total, num, heads,  # noqa: ANN001
    BEGUN: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,  # noqa: N803
    PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    head, position = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_range = position < num
    first = tl.load(sources + position, mask=in_range, other=-1)
    second = tl.load(sources + num + position, mask=in_range, other=-1)
    places = (position.to(tl.int64) * heads + head) * (WIDTH + VALUE_WIDTH)
    _half(key_grad, total, first, second, places, in_range, head, heads, BEGUN, WIDTH, PADDED)
    _half(
        value_grad, total, first, second, places + WIDTH, in_range, head, heads, BEGUN, VALUE_WIDTH,
        VALUE_PADDED,
    )  # fmt: skip


def key_sums_triton(gradients: Payload, sources: Tensor, begin: Tensor | None) -> Tensor:
    """See `key_sums`; `sources` is `places.own_sums`, int64 [2, positions]."""
    key_grad, value_grad = (gradient.contiguous() for gradient in gradients)
    num, (heads, width), value_width = sources.shape[1], key_grad.shape[1:], value_grad.shape[-1]
    total = begin
    if total is None:
        total = key_grad.new_empty((num, heads, width + value_width), dtype=wider(key_grad.dtype))
    _key_sums_kernel[heads, triton.cdiv(num, BLOCK)](
        key_grad, value_grad, sources, total, num, heads, BEGUN=begin is not None, WIDTH=width,
        VALUE_WIDTH=value_width, PADDED=triton.next_power_of_2(width),
        VALUE_PADDED=triton.next_power_of_2(value_width), BLOCK=BLOCK,
    )  # fmt: skip
    return total
