"""The sidecar: what lies where, and that every wrong order raises."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_prefix.sidecar.cache import SegmentState, SidecarCache
from megatron_prefix.tree.payload_map import Form, payload_map
from tests.harness import sidecar
from tests.harness.sidecar import DIM, HEADS, VALUE_DIM, segment

# A chain of two chunks, a branch below it with a wave, and a wave of its own.
SEGMENTS = (
    segment((None, 4), inner=True),
    segment(((0, 0), 2), inner=True),
    segment(((1, 0), 3), inner=True),
    segment(((2, 0), 5), inner=False),
    segment(((1, 0), 5), inner=False),
)
CHUNK, BELOW_BRANCH, BELOW_CHAIN = 1, 3, 4
"""They see 4, all 9, and 6 rows."""
ROWS = 4 + 2 + 3


def cache_of(num_layers: int = 1) -> SidecarCache:
    return SidecarCache(payload_map(SEGMENTS), [Form.POSITIONS] * num_layers)


def kv(index: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Random K and V of a segment."""
    generator = torch.Generator().manual_seed(index)
    rows = SEGMENTS[index].padded_length
    key = torch.randn(rows, HEADS, DIM, generator=generator).to(dtype)
    return key, torch.randn(rows, HEADS, VALUE_DIM, generator=generator).to(dtype)


def seen(cache: SidecarCache, layer: int, index: int, number: int) -> tuple[Tensor, ...]:
    """What a segment reads of a level."""
    return cache.read(layer, index, cache.level(index, number))


def send(
    cache: SidecarCache, layer: int, index: int, number: int, both: tuple[Tensor, ...]
) -> None:
    """What a segment sends to a level."""
    cache.add(layer, index, cache.level(index, number), both)


def ones(rows: int, value: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """gK and gV of some rows, all of one value."""
    shapes = ((rows, HEADS, DIM), (rows, HEADS, VALUE_DIM))
    return tuple(torch.full(shape, value, dtype=dtype) for shape in shapes)  # type: ignore[return-value]


def captured(
    *indices: int, num_layers: int = 1, dtype: torch.dtype = torch.float32
) -> SidecarCache:
    cache = cache_of(num_layers)
    for layer in range(num_layers):
        for index in indices:
            cache.capture(layer, index, kv(index, dtype))
    return cache


def test_a_chain_is_read_as_one_block() -> None:
    cache = captured(0, 1, 2)
    for number, parts in enumerate(zip(kv(0), kv(1), kv(2), strict=True)):
        assert torch.equal(seen(cache, 0, BELOW_BRANCH, 0)[number], torch.cat(parts))
        assert torch.equal(seen(cache, 0, BELOW_CHAIN, 0)[number], torch.cat(parts[:2]))
        assert torch.equal(seen(cache, 0, CHUNK, 0)[number], parts[0])
        assert torch.equal(cache.own(0, 1)[number], parts[1])
    assert [len(levels) for levels in cache.map.levels] == [0, 1, 1, 1, 1]


def test_reads_are_views_and_captures_are_copies() -> None:
    cache = cache_of()
    key, value = kv(0)
    cache.capture(0, 0, (key, value))
    expected = key.clone()
    key.zero_(), value.untyped_storage().resize_(0)  # as Megatron frees storage
    read = seen(cache, 0, CHUNK, 0)
    assert torch.equal(read[0], expected) and torch.equal(read[1], kv(0)[1])
    assert read[0].data_ptr() == cache.own(0, 0)[0].data_ptr() != key.data_ptr()


def test_the_second_capture_is_recomputation_and_changes_nothing() -> None:
    cache = captured(0)
    cache.capture(0, 0, (torch.zeros(4, HEADS, DIM), torch.zeros(4, HEADS, VALUE_DIM)))
    assert torch.equal(seen(cache, 0, CHUNK, 0)[0], kv(0)[0])


def test_layers_are_apart() -> None:
    cache = captured(0, num_layers=2)
    send(cache, 1, CHUNK, 0, ones(4, 3.0))
    assert cache.take(0, 0) is None
    sent = cache.take(1, 0)
    assert sent is not None and (sent[0] == 3).all() and (sent[1] == 3).all()


def test_gradients_add_up_over_the_segments_that_see_a_row() -> None:
    cache = captured(0, 1, 2)
    send(cache, 0, BELOW_CHAIN, 0, ones(6, 1.0))
    send(cache, 0, BELOW_BRANCH, 0, ones(9, 7.0))
    send(cache, 0, BELOW_CHAIN, 0, ones(6, 10.0))
    found = {2: cache.take(0, 2), 1: cache.take(0, 1)}
    send(cache, 0, CHUNK, 0, ones(4, 100.0))  # the second chunk's own backward
    found[0] = cache.take(0, 0)
    for index, total in {2: 7.0, 1: 18.0, 0: 118.0}.items():
        sent = found[index]
        assert sent is not None
        assert [len(x) for x in sent] == [SEGMENTS[index].padded_length] * 2
        assert all((x == total).all() for x in sent)


def test_a_short_block_comes_first() -> None:
    """The rest of the arena begins at zero and not at what the memory held."""
    cache = captured(0, 1)
    send(cache, 0, CHUNK, 0, ones(4, 2.0))
    sent = cache.take(0, 1)
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
@pytest.mark.parametrize("first", [BELOW_BRANCH, BELOW_CHAIN], ids=["whole arena", "part of it"])
def test_gradients_are_kept_in_fp32_or_wider(
    dtype: torch.dtype, wide: torch.dtype, first: int
) -> None:
    cache = captured(0, 1, 2, dtype=dtype)
    key_grad, value_grad = ones({BELOW_BRANCH: 9, BELOW_CHAIN: 6}[first], 1.0, dtype)
    send(cache, 0, first, 0, (key_grad, value_grad))
    key_grad.zero_()  # what is given stays the caller's
    small = torch.finfo(torch.bfloat16).eps / 4
    send(cache, 0, CHUNK, 0, ones(4, small, torch.float32))
    for index, total in ((1, 1.0), (0, 1.0 + small)):
        sent = cache.take(0, index)
        assert sent is not None and all(x.dtype == wide and (x == total).all() for x in sent)


def test_what_was_sent_is_not_rounded_before_it_is_added() -> None:
    """257 is no bf16: rounded first it would be 256."""
    cache = captured(0, 1, dtype=torch.bfloat16)
    send(cache, 0, CHUNK, 0, ones(4, 257.0))
    keys = cache.own_keys(0, 0, True, kv(0, torch.bfloat16))
    keys.send(ones(4, 1.0, torch.bfloat16))
    for total in keys.take():
        assert total.dtype == torch.float32 and bool((total == 258.0).all())


def test_memory_is_counted_and_given_back() -> None:
    """A layer's arena is taken as a whole, and goes with the last segment in it."""
    cache = captured(0, 1, num_layers=2, dtype=torch.bfloat16)
    rows = ROWS * HEADS * (DIM + VALUE_DIM)
    assert cache.device_bytes.held == 2 * rows * 2
    send(cache, 0, CHUNK, 0, ones(4, 1.0))
    assert cache.device_bytes.held == 2 * rows * 2 + rows * 4 == cache.device_bytes.peak
    for index in (1, 0):
        assert cache.device_bytes.held == cache.device_bytes.peak
        for layer in (1, 0):
            cache.take(layer, index)
        cache.free(index, consumed=True)
    assert cache.device_bytes.held == 0 and cache.device_bytes.peak == 2 * rows * 2 + rows * 4


def test_the_life_of_a_segment() -> None:
    cache = cache_of()
    assert cache.state(0, 0) is SegmentState.EMPTY
    cache.capture(0, 0, kv(0))
    assert cache.state(0, 0) is SegmentState.CAPTURED
    cache.take(0, 0)
    assert cache.state(0, 0) is SegmentState.CONSUMED
    cache.free(0, consumed=True)
    assert cache.state(0, 0) is SegmentState.FREED
    cache.clear()
    assert cache.state(0, 0) is SegmentState.EMPTY


def test_forward_only_frees_without_gradients() -> None:
    cache = captured(0, 1)
    cache.free(1, consumed=False)
    with pytest.raises(RuntimeError, match="segment 4 reads segment 1, which is freed"):
        seen(cache, 0, BELOW_CHAIN, 0)
    assert len(seen(cache, 0, CHUNK, 0)[0]) == 4
    cache.free(0, consumed=False)
    assert cache.device_bytes.held == 0


def test_clearing_drops_everything_in_any_state() -> None:
    cache = captured(0, 1, 2)
    send(cache, 0, BELOW_BRANCH, 0, ones(9, 1.0))
    cache.take(0, 2)
    cache.clear()
    assert cache.device_bytes.held == 0
    cache.capture(0, 0, kv(0))


NOT_THERE = "before its forward or after its backward"


def test_wrong_orders_raise() -> None:
    """Each would otherwise train on wrong numbers."""
    cache = cache_of()
    with pytest.raises(
        RuntimeError,
        match=f"layer 0: segment 1 reads segment 0, which is empty: {NOT_THERE}",
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


def test_a_wave_has_nothing_in_the_arena() -> None:
    cache = captured(0, 1)
    with pytest.raises(RuntimeError, match="segment 4 is a wave: it leaves nothing here"):
        cache.capture(0, BELOW_CHAIN, kv(BELOW_CHAIN))
    with pytest.raises(RuntimeError, match="segment 4: empty, expected captured"):
        cache.own(0, BELOW_CHAIN)


def test_a_segment_is_freed_when_every_layer_is_done() -> None:
    cache = captured(0, num_layers=2)
    cache.take(0, 0)
    with pytest.raises(RuntimeError, match="layer 1, segment 0: captured, expected consumed"):
        cache.free(0, consumed=True)


# Segments of several trees, and rows that are used again ------------------------------------------


def span_of(made: sidecar.Step, whole: Tensor, index: int, number: int) -> Tensor:
    """The rows of one span of a segment's tensor."""
    lengths = [span.padded for span in made.segments[index].spans]
    return whole.split(lengths)[number]


def test_every_run_of_a_level_reads_its_own_ancestor() -> None:
    made = sidecar.packed()
    cache = SidecarCache(made.planned(), [Form.POSITIONS] * 1)
    given = {}
    for index in (0, 1, 2):
        rows = made.segments[index].padded_length
        given[index] = [sidecar.random(rows, width, index) for width in (DIM, VALUE_DIM)]
        cache.capture(0, index, given[index])
    # (segment, level): queries, and the spans (segment, number) that their runs see.
    wanted = {
        (1, 0): ((5, 4), [(0, 0), (0, 1)]),
        (3, 0): ((6, 2, 4), [(0, 0), (0, 1), (2, 0)]),
        (3, 1): ((2, 4, 2), [(1, 0), (1, 1), (1, 2)]),
        (4, 0): ((3, 2), [(0, 1), (0, 0)]),
        (4, 1): ((2,), [(1, 0)]),
    }
    for (index, number), (queries, spans) in wanted.items():
        level = cache.level(index, number)
        for kind, found in enumerate(seen(cache, 0, index, number)):
            parts = [span_of(made, given[above][kind], above, n) for above, n in spans]
            assert torch.equal(found, torch.cat(parts))
            assert level.key_lengths == tuple(map(len, parts))
        assert level.query_lengths == queries
    assert cache.level(3, 0).queries == slice(0, 12)  # the last span is a root: it sees nothing
    assert cache.level(4, 1).queries == slice(3, 5)
    # Keys side by side are a view, others are gathered.
    ways = {key: type(cache.level(*key).rows) for key in wanted}
    assert ways == {(1, 0): slice, (3, 0): Tensor, (3, 1): slice, (4, 0): Tensor, (4, 1): slice}
    base = cache.own(0, 0)[0].untyped_storage().data_ptr()
    assert seen(cache, 0, 3, 1)[0].untyped_storage().data_ptr() == base
    assert seen(cache, 0, 3, 0)[0].untyped_storage().data_ptr() != base


@pytest.mark.parametrize("name", sidecar.STEPS)
def test_every_segment_gets_what_was_sent_to_its_rows(name: str) -> None:
    """In a whole step, in every layer: the sums of a dictionary of rows, span by span."""
    made = sidecar.STEPS[name]()
    cache = SidecarCache(made.planned(), [Form.POSITIONS] * sidecar.LAYERS)
    paths: dict[tuple[int, int], list[tuple[int, int]]] = {}
    sent: dict[tuple[int, int, int], Tensor] = {}
    num_taken = 0
    for action in made.order:
        index, backward = int(action[1:]), action[0] == "B"
        one = made.segments[index]
        for number, span in enumerate(one.spans):
            above = paths[span.parent] if span.parent else []
            paths[index, number] = [*above, (index, number)]
        for layer in range(sidecar.LAYERS)[:: -1 if backward else 1]:
            if backward:
                for number in range(len(one.spans)):
                    expect_of(made, sent, paths[index, number], index, layer)
            *_, value = sidecar.visit(cache, one, index, layer, backward)
            if backward and one.inner:
                zeros = torch.zeros(one.padded_length, HEADS, VALUE_DIM, dtype=torch.float64)
                wanted = sent.get((layer, index, 1), zeros)
                assert torch.equal(value, wanted), (index, layer)
                num_taken += 1
        if backward and one.inner:
            cache.free(index, consumed=True)
    assert num_taken == sidecar.LAYERS * sum(one.inner for one in made.segments)
    assert cache.device_bytes.held == 0


def expect_of(
    made: sidecar.Step,
    sent: dict[tuple[int, int, int], Tensor],
    path: list[tuple[int, int]],
    index: int,
    layer: int,
) -> None:
    """Adds what one span sends to its ancestors: once a run, so only the first of neighbours."""
    spans = made.segments[index].spans
    own = path[-1][1]
    for depth, (above, number) in enumerate(path[:-1]):
        same = [_path_to(made, span.parent)[depth : depth + 1] for span in spans[:own]]
        if same and same[-1] == [(above, number)]:
            continue
        rows = made.segments[above].padded_length
        whole = sidecar.random(rows, VALUE_DIM, 100 * layer + above)
        zeros = torch.zeros_like(whole)
        total = sent.setdefault((layer, above, 1), zeros)
        span_of(made, total, above, number).add_((index + 1) * span_of(made, whole, above, number))


def _path_to(made: sidecar.Step, place: tuple[int, int] | None) -> list[tuple[int, int]]:
    path: list[tuple[int, int]] = []
    while place is not None:
        path.insert(0, (place[0], place[1]))
        place = made.segments[place[0]].spans[place[1]].parent
    return path


def test_rows_of_a_finished_segment_are_reused_with_zero_grads() -> None:
    made = sidecar.tree()
    planned = made.planned()
    third, branch = planned.positions.intervals[2], planned.positions.intervals[3]
    assert third is not None and branch is not None and third.start == branch.start
    assert planned.positions.length < sum(one.padded_length for one in made.segments if one.inner)
    cache = SidecarCache(planned, [Form.POSITIONS] * 1)
    for index in (0, 1, 2):
        sidecar.visit(cache, made.segments[index], index, 0, backward=False)
    cache.add(
        0,
        5,
        cache.level(5, 0),
        tuple(torch.ones_like(x) for x in seen(cache, 0, 5, 0)),
    )
    cache.take(0, 2)
    cache.free(2, consumed=True)
    sidecar.visit(cache, made.segments[3], 3, 0, backward=False)
    for index, value in ((3, 0), (1, 1), (0, 1)):
        taken = cache.take(0, index)
        assert taken is not None and all((x == value).all() for x in taken), index
