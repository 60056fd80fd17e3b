"""The sidecar: what lies where, and that every wrong order raises."""

import pytest
import torch

from megatron_prefix.sidecar.cache import SidecarCache
from megatron_prefix.tree.payload_map import Form, payload_map
from tests.harness.sidecar import DIM, HEADS, VALUE_DIM, segment

# A chain of two chunks, a branch below it with a wave, and a wave of its own.
SEGMENTS = (
    segment((None, 4), inner=True), segment(((0, 0), 2), inner=True),
    segment(((1, 0), 3), inner=True), segment(((2, 0), 5), inner=False),
    segment(((1, 0), 5), inner=False),
)  # fmt: skip
CHUNK, BELOW_BRANCH, BELOW_CHAIN = 1, 3, 4
"""They see 4, all 9, and 6 rows."""


def cache_of(num_layers=1):
    return SidecarCache(payload_map(SEGMENTS), [Form.POSITIONS] * num_layers)


def kv(index, dtype=torch.float32):
    """Random K and V of a segment."""
    generator = torch.Generator().manual_seed(index)
    rows = SEGMENTS[index].padded_length
    key = torch.randn(rows, HEADS, DIM, generator=generator).to(dtype)
    return key, torch.randn(rows, HEADS, VALUE_DIM, generator=generator).to(dtype)


def seen(cache, layer, index, number):
    """What a segment reads of a level."""
    return cache.read(layer, index, cache.level(index, number))


def send(cache, layer, index, number, both):
    """What a segment sends to a level."""
    cache.add(layer, index, cache.level(index, number), both)


def ones(rows, value, dtype=torch.float32):
    """gK and gV of some rows, all of one value."""
    shapes = ((rows, HEADS, DIM), (rows, HEADS, VALUE_DIM))
    return tuple(torch.full(shape, value, dtype=dtype) for shape in shapes)


def captured(*indices, num_layers=1, dtype=torch.float32):
    cache = cache_of(num_layers)
    for layer in range(num_layers):
        for index in indices:
            cache.capture(layer, index, kv(index, dtype))
    return cache


@pytest.mark.parametrize(("dtype", "wide"), [
    (torch.bfloat16, torch.float32), (torch.float16, torch.float32),
    (torch.float32, torch.float32), (torch.float64, torch.float64),
])  # fmt: skip
@pytest.mark.parametrize("first", [BELOW_BRANCH, BELOW_CHAIN], ids=["whole arena", "part of it"])
def test_gradients_are_kept_in_fp32_or_wider(dtype, wide, first):
    cache = captured(0, 1, 2, dtype=dtype)
    key_grad, value_grad = ones({BELOW_BRANCH: 9, BELOW_CHAIN: 6}[first], 1.0, dtype)
    send(cache, 0, first, 0, (key_grad, value_grad))
    key_grad.zero_()  # what is given stays the caller's
    small = torch.finfo(torch.bfloat16).eps / 4
    send(cache, 0, CHUNK, 0, ones(4, small, torch.float32))
    for index, total in ((1, 1.0), (0, 1.0 + small)):
        sent = cache.take(0, index)
        assert sent is not None and all(x.dtype == wide and (x == total).all() for x in sent)


def test_what_was_sent_is_not_rounded_before_it_is_added():
    """257 is no bf16: rounded first it would be 256."""
    cache = captured(0, 1, dtype=torch.bfloat16)
    send(cache, 0, CHUNK, 0, ones(4, 257.0))
    keys = cache.own_keys(0, 0, True, kv(0, torch.bfloat16))
    keys.send(ones(4, 1.0, torch.bfloat16))
    for total in keys.take():
        assert total.dtype == torch.float32 and bool((total == 258.0).all())


NOT_THERE = "before its forward or after its backward"


def test_wrong_orders_raise():
    """Each would otherwise train on wrong numbers."""
    cache = cache_of()
    with pytest.raises(
        RuntimeError, match=f"layer 0: segment 1 reads segment 0, which is empty: {NOT_THERE}"
    ):
        seen(cache, 0, CHUNK, 0)
    with pytest.raises(RuntimeError, match=NOT_THERE):
        send(cache, 0, CHUNK, 0, ones(4, 1.0))
    with pytest.raises(RuntimeError, match="layer 0, segment 0: empty, expected captured"):
        cache.own(0, 0)
    with pytest.raises(RuntimeError, match="empty, expected captured"):
        cache.take(0, 0)
    cache.capture(0, 0, kv(0))
    with pytest.raises(RuntimeError, match=f"reads segment 1, which is empty: {NOT_THERE}"):
        seen(cache, 0, BELOW_CHAIN, 0)  # the second chunk has not run
    with pytest.raises(RuntimeError, match="captured, expected consumed"):
        cache.free(0, consumed=True)
    cache.capture(0, 1, kv(1))
    cache.take(0, 1)
    with pytest.raises(RuntimeError, match="consumed, expected captured"):
        cache.take(0, 1)
    with pytest.raises(RuntimeError, match="consumed, expected captured"):
        cache.own(0, 1)
    with pytest.raises(RuntimeError, match="consumed, expected empty"):
        cache.capture(0, 1, kv(1))
    with pytest.raises(RuntimeError, match=f"reads segment 1, which is consumed: {NOT_THERE}"):
        send(cache, 0, BELOW_CHAIN, 0, ones(6, 1.0))  # nobody would take it
    cache.take(0, 0)
    cache.free(1, consumed=True)
    cache.free(0, consumed=True)
    with pytest.raises(RuntimeError, match="freed, expected consumed"):
        cache.free(0, consumed=True)
    with pytest.raises(RuntimeError, match="freed, expected empty"):
        cache.capture(0, 0, kv(0))
    with pytest.raises(RuntimeError, match=f"which is freed: {NOT_THERE}"):
        seen(cache, 0, CHUNK, 0)
