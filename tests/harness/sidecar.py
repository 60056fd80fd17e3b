"""Uses a sidecar as attention does in a whole step, without a model."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_prefix.sidecar.cache import SidecarCache
from megatron_prefix.tree import Segment, Span

HEADS, DIM, VALUE_DIM, LAYERS = 2, 4, 3, 4
ORDER = ("F0", "F1", "F2", "F5", "B5", "B2", "F3", "F7", "B7", "F4", "F6", "B6", "B4", "B3", "B1",
         "B0")  # fmt: skip


def tree(scale: int = 1) -> tuple[Segment, ...]:
    """Three chunks, a branch below the second one in two chunks, and waves below all of them."""
    return (
        _segment(-1, 5 * scale, inner=True),
        _segment(0, 4 * scale, inner=True, extends=True),
        _segment(1, 3 * scale, inner=True, extends=True),
        _segment(1, 6 * scale, inner=True),
        _segment(3, 2 * scale, inner=True, extends=True),
        _segment(2, 3 * scale, inner=False),
        _segment(4, 3 * scale, inner=False),
        _segment(3, 2 * scale, inner=False),
    )


def _segment(parent: int, length: int, *, inner: bool, extends: bool = False) -> Segment:
    return Segment(parent, 0, (Span(0, length, length, (0,)),), inner, extends, not inner)


def random(length: int, width: int, seed: int, device: str = "cpu") -> Tensor:
    """[length, HEADS, width], fp64."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(length, HEADS, width, generator=generator, dtype=torch.float64)
    return made.to(device)


def visit(
    cache: SidecarCache, one: Segment, index: int, layer: int, backward: bool, device: str = "cpu"
) -> list[Tensor]:
    """One segment in one layer; returns all that it gets from the cache."""
    seen: list[Tensor] = []
    if one.inner and not backward:
        widths = (DIM, VALUE_DIM)
        key, value = (random(one.padded_length, w, 100 * layer + index, device) for w in widths)
        cache.capture(layer, index, key, value)
        key.fill_(torch.nan), value.fill_(torch.nan)  # as Megatron frees storage
    if one.inner:
        seen += cache.own(layer, index)
    for ahead in (layer, layer - 1 if backward else layer + 1):
        cache.prefetch(ahead, index, backward=backward)
    for block in cache.map.blocks[index]:
        key, value = cache.read(layer, block)
        seen += [key, value]
        if backward:
            half = block.stop // 2  # in two pieces
            cache.add_gradient(layer, block, 2 * key[half:], value[half:], half)
            cache.add_gradient(layer, block, 2 * key[:half], value[:half])
    if backward and one.inner:
        seen += cache.take_gradient(layer, index) or ()
    seen = [tensor.clone() for tensor in seen]
    cache.release(layer)
    return seen


def step(
    cache: SidecarCache, segments: tuple[Segment, ...], until: str = "", device: str = "cpu"
) -> list[Tensor]:
    """Everything that a step's segments get from the cache, in order, up to an action."""
    found: list[Tensor] = []
    for action in ORDER:
        if action == until:
            break
        index, backward = int(action[1:]), action[0] == "B"
        for layer in range(LAYERS)[:: -1 if backward else 1]:
            found += visit(cache, segments[index], index, layer, backward, device)
        if backward and segments[index].inner:
            cache.free(index, consumed=True)
    return found
