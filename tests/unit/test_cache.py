"""The sidecar: what lies where, and that every wrong order raises."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_prefix.sidecar.cache import SegmentState, SidecarCache
from megatron_prefix.tree import Segment, Span
from megatron_prefix.tree.kv_layout import Block

HEADS, DIM, VALUE_DIM = 2, 4, 3


def segment(parent: int, length: int, *, inner: bool, extends: bool = False) -> Segment:
    return Segment(parent, 0, (Span(0, length, length, (0,)),), inner, extends, not inner)


# A chain of two chunks, a branch below it with a wave, and a wave of its own.
SEGMENTS = (
    segment(-1, 4, inner=True),
    segment(0, 2, inner=True, extends=True),
    segment(1, 3, inner=True),
    segment(2, 5, inner=False),
    segment(1, 5, inner=False),
)
CHAIN, ALL, BRANCH = Block(0, 4), Block(0, 6), Block(2, 3)


def kv(index: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Random K and V of a segment."""
    generator = torch.Generator().manual_seed(index)
    rows = SEGMENTS[index].padded_length
    key = torch.randn(rows, HEADS, DIM, generator=generator).to(dtype)
    return key, torch.randn(rows, HEADS, VALUE_DIM, generator=generator).to(dtype)


def ones(block: Block, value: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """gK and gV of a block, all of one value."""
    shapes = ((block.stop, HEADS, DIM), (block.stop, HEADS, VALUE_DIM))
    return tuple(torch.full(shape, value, dtype=dtype) for shape in shapes)  # type: ignore[return-value]


def captured(
    *indices: int, num_layers: int = 1, dtype: torch.dtype = torch.float32
) -> SidecarCache:
    cache = SidecarCache(SEGMENTS, num_layers)
    for layer in range(num_layers):
        for index in indices:
            cache.capture(layer, index, *kv(index, dtype))
    return cache


def test_a_chain_is_read_as_one_block() -> None:
    cache = captured(0, 1, 2)
    for number, expected in enumerate(zip(kv(0), kv(1), strict=True)):
        assert torch.equal(cache.read(0, ALL)[number], torch.cat(expected))
        assert torch.equal(cache.read(0, CHAIN)[number], expected[0])
        assert torch.equal(cache.own(0, 1)[number], expected[1])
        assert torch.equal(cache.read(0, BRANCH)[number], kv(2)[number])


def test_reads_are_views_and_captures_are_copies() -> None:
    cache = SidecarCache(SEGMENTS, 1)
    key, value = kv(0)
    cache.capture(0, 0, key, value)
    expected = key.clone()
    key.zero_(), value.untyped_storage().resize_(0)  # as Megatron frees storage
    read = cache.read(0, CHAIN)
    assert torch.equal(read[0], expected) and torch.equal(read[1], kv(0)[1])
    assert read[0].data_ptr() == cache.own(0, 0)[0].data_ptr() != key.data_ptr()


def test_the_second_capture_is_recomputation_and_changes_nothing() -> None:
    cache = captured(0)
    cache.capture(0, 0, torch.zeros(4, HEADS, DIM), torch.zeros(4, HEADS, VALUE_DIM))
    assert torch.equal(cache.read(0, CHAIN)[0], kv(0)[0])


def test_layers_are_apart() -> None:
    cache = captured(0, num_layers=2)
    cache.add_gradient(1, CHAIN, *ones(CHAIN, 3.0))
    assert cache.take_gradient(0, 0) is None
    sent = cache.take_gradient(1, 0)
    assert sent is not None and (sent[0] == 3).all() and (sent[1] == 3).all()


def test_gradients_add_up_over_the_blocks_that_cover_a_row() -> None:
    cache = captured(0, 1, 2)
    cache.add_gradient(0, ALL, *ones(ALL, 1.0))
    cache.add_gradient(0, BRANCH, *ones(BRANCH, 7.0))
    cache.add_gradient(0, ALL, *ones(ALL, 10.0))
    found = {2: cache.take_gradient(0, 2), 1: cache.take_gradient(0, 1)}
    cache.add_gradient(0, CHAIN, *ones(CHAIN, 100.0))  # the second chunk's own backward
    found[0] = cache.take_gradient(0, 0)
    for index, total in {2: 7.0, 1: 11.0, 0: 111.0}.items():
        sent = found[index]
        assert sent is not None
        assert [len(x) for x in sent] == [SEGMENTS[index].padded_length] * 2
        assert all((x == total).all() for x in sent)


def test_a_short_block_comes_first() -> None:
    """The rest of the chain begins at zero and not at what the memory held."""
    cache = captured(0, 1)
    cache.add_gradient(0, CHAIN, *ones(CHAIN, 2.0))
    sent = cache.take_gradient(0, 1)
    assert sent is not None and all((x == 0).all() for x in sent)


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_gradients_are_kept_in_fp32_or_wider(dtype: torch.dtype, wide: torch.dtype) -> None:
    cache = captured(0, 1, dtype=dtype)
    key_grad, value_grad = ones(ALL, 1.0, dtype)
    cache.add_gradient(0, ALL, key_grad, value_grad)
    key_grad.zero_()  # what is given stays the caller's
    small = torch.finfo(torch.bfloat16).eps / 4
    cache.add_gradient(0, CHAIN, *ones(CHAIN, small, torch.float32))
    for index, total in ((1, 1.0), (0, 1.0 + small)):
        sent = cache.take_gradient(0, index)
        assert sent is not None and all(x.dtype == wide and (x == total).all() for x in sent)


def test_memory_is_counted_and_given_back() -> None:
    cache = captured(0, 1, num_layers=2, dtype=torch.bfloat16)
    rows = 6 * HEADS * (DIM + VALUE_DIM)
    assert cache.num_bytes == 2 * rows * 2
    cache.add_gradient(0, CHAIN, *ones(CHAIN, 1.0))
    assert cache.num_bytes == 2 * rows * 2 + rows * 4
    for index in (1, 0):
        for layer in (1, 0):
            cache.take_gradient(layer, index)
        cache.free(index, consumed=True)
    assert cache.num_bytes == 0


def test_the_life_of_a_segment() -> None:
    cache = SidecarCache(SEGMENTS, 1)
    assert cache.state(0, 0) is SegmentState.EMPTY
    cache.capture(0, 0, *kv(0))
    assert cache.state(0, 0) is SegmentState.CAPTURED
    cache.take_gradient(0, 0)
    assert cache.state(0, 0) is SegmentState.CONSUMED
    cache.free(0, consumed=True)
    assert cache.state(0, 0) is SegmentState.FREED
    cache.clear()
    assert cache.state(0, 0) is SegmentState.EMPTY


def test_forward_only_frees_without_gradients() -> None:
    cache = captured(0, 1)
    cache.free(1, consumed=False)
    with pytest.raises(RuntimeError, match="positions up to 6 of the chain of segment 0"):
        cache.read(0, ALL)
    assert len(cache.read(0, CHAIN)[0]) == 4
    cache.free(0, consumed=False)
    assert cache.num_bytes == 0


def test_clearing_drops_everything_in_any_state() -> None:
    cache = captured(0, 1, 2)
    cache.add_gradient(0, BRANCH, *ones(BRANCH, 1.0))
    cache.take_gradient(0, 2)
    cache.clear()
    assert cache.num_bytes == 0
    cache.capture(0, 0, *kv(0))


NOT_THERE = "before their forward or after their backward"


def test_wrong_orders_raise() -> None:
    """Each would otherwise train on wrong numbers."""
    cache = SidecarCache(SEGMENTS, 1)
    with pytest.raises(
        RuntimeError, match=f"layer 0: positions up to 4 .* 0 are there: {NOT_THERE}"
    ):
        cache.read(0, CHAIN)
    with pytest.raises(RuntimeError, match=NOT_THERE):
        cache.add_gradient(0, CHAIN, *ones(CHAIN, 1.0))
    with pytest.raises(RuntimeError, match="layer 0, segment 0: empty, expected captured"):
        cache.own(0, 0)
    with pytest.raises(RuntimeError, match="empty, expected captured"):
        cache.take_gradient(0, 0)
    cache.capture(0, 0, *kv(0))
    with pytest.raises(RuntimeError, match=f"positions up to 6 .* 4 are there: {NOT_THERE}"):
        cache.read(0, ALL)  # the second chunk has not run
    with pytest.raises(RuntimeError, match="captured, expected consumed"):
        cache.free(0, consumed=True)
    cache.capture(0, 1, *kv(1))
    cache.take_gradient(0, 1)
    with pytest.raises(RuntimeError, match="consumed, expected captured"):
        cache.take_gradient(0, 1)
    with pytest.raises(RuntimeError, match="consumed, expected captured"):
        cache.own(0, 1)
    with pytest.raises(RuntimeError, match="consumed, expected empty"):
        cache.capture(0, 1, *kv(1))
    with pytest.raises(RuntimeError, match=f"positions up to 6 .* 4 are there: {NOT_THERE}"):
        cache.add_gradient(0, ALL, *ones(ALL, 1.0))  # nobody would take it
    cache.take_gradient(0, 0)
    cache.free(1, consumed=True)
    cache.free(0, consumed=True)
    with pytest.raises(RuntimeError, match="freed, expected consumed"):
        cache.free(0, consumed=True)
    with pytest.raises(RuntimeError, match="freed, expected empty"):
        cache.capture(0, 0, *kv(0))
    with pytest.raises(RuntimeError, match=NOT_THERE):
        cache.read(0, CHAIN)


def test_a_segment_is_freed_when_every_layer_is_done() -> None:
    cache = captured(0, num_layers=2)
    cache.take_gradient(0, 0)
    with pytest.raises(RuntimeError, match="layer 1, segment 0: captured, expected consumed"):
        cache.free(0, consumed=True)
