"""States of recurrent layers: where they lie, who reads them, and that wrong orders raise."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings

from megatron_prefix.features.recurrent import states
from megatron_prefix.features.recurrent.spans import Spans
from megatron_prefix.plan.planner import make_plan
from megatron_prefix.sidecar.arena import Reading
from megatron_prefix.sidecar.cache import SegmentState, SidecarCache
from megatron_prefix.tree import build
from megatron_prefix.tree.payload_map import Form, payload_map
from tests.harness import sidecar
from tests.harness.sidecar import STEPS, Step
from tests.harness.trees import rollout_sets, tree_options

LAYER = 2
"""Of a recurrent layer behind two attention layers."""


@settings(max_examples=30)
@given(rollout_sets(), tree_options())
def test_rows_of_live_segments_never_overlap(drawn, options) -> None:  # type: ignore[no-untyped-def]
    rollouts, groups = drawn
    forest = build(rollouts, groups, options)
    segments, program = forest.segments, make_plan(forest, 1).actions_of(0, 0)
    planned = payload_map(segments, program)
    found = planned.spans
    live: dict[int, set[int]] = {}
    for kind, index in program:
        segment, rows = segments[index], found.intervals[index]
        for span, row in zip(segment.spans, planned.parents[index], strict=True):
            parent = span.parent
            assert (parent is None) == (row == 0)
            if parent is not None:  # its row, and still its own
                assert row in live[parent.segment]
                assert row == found.intervals[parent.segment].start + parent.number  # type: ignore[union-attr]
                assert parent.segment in found.visible[index]
        assert segment.inner == (rows is not None)
        if rows is None:
            continue
        if kind == "F":
            mine = {*range(rows.start, rows.stop)}
            assert len(mine) == len(segment.spans) and 0 not in mine and max(mine) < found.length
            assert not any(mine & other for other in live.values())
            live[index] = mine
        else:
            del live[index]
    assert not live


def captured(step: Step, *indices: int) -> SidecarCache:
    cache = SidecarCache(step.planned(), sidecar.forms(LAYER + 1, {LAYER}))
    for index in indices:
        num = len(step.segments[index].spans)
        state = torch.arange(num).float().add(10 * index + 1)[:, None, None].expand(num, 2, 3)
        cache.capture(LAYER, index, (state, state[:, :1].double()))
    return cache


def test_spans_read_their_parents_rows_and_zeros_without_one() -> None:
    step = sidecar.packed()
    cache = captured(step, 0, 1, 2)
    rows = torch.tensor(cache.map.parents[3])
    state, tail = cache.read(LAYER, 3, Reading(rows))
    assert state[:, 0, 0].tolist() == [11.0, 12.0, 12.0, 13.0, 21.0, 0.0]
    assert torch.equal(tail, state[:, :1].double())
    assert (
        cache.device_bytes.held
        == cache.device_bytes.peak
        == (2 * 3 * 4 + 3 * 8) * cache.map.spans.length
    )


def test_gradients_are_summed_in_fp32_and_taken_once() -> None:
    step = sidecar.packed()
    cache = captured(step, 0, 1, 2)
    for index in (3, 4):
        rows = torch.tensor(sorted({*cache.map.parents[index]} - {0}))
        ones = torch.ones(len(rows), 2, 3, dtype=torch.bfloat16)
        cache.add(LAYER, index, Reading(rows), (ones, ones[:, :1].double()))
    taken = cache.take(LAYER, 1)
    assert taken is not None and [part.dtype for part in taken] == [torch.float32, torch.float64]
    assert taken[0][:, 0, 0].tolist() == [2.0, 1.0, 1.0]  # segment 4 has one child of span 0
    with pytest.raises(RuntimeError, match="consumed, expected captured"):
        cache.take(LAYER, 1)
    with pytest.raises(RuntimeError, match="reads segment 1, which is consumed"):
        cache.read(LAYER, 3, Reading(torch.tensor([0])))


@pytest.mark.parametrize("kernels", [torch.float32, torch.bfloat16])
def test_final_states_are_kept_in_fp32_and_tails_as_they_are(kernels: torch.dtype) -> None:
    spans = Spans((3, 4), (0, 0), torch.device("cpu"))
    segment = mock.Mock(between={("spans", None): spans}, inner=True, backward=False)
    state = torch.full((2, 3), 1 + 2**-12).to(kernels)
    layer = states.LayerStates(segment, 0, state, before=3)
    row, _ = layer.edges(torch.ones(7, 4, dtype=torch.bfloat16))
    layer.leave(row, state)
    (_, _, kept), _ = segment.cache.capture.call_args
    assert [one.dtype for one in kept] == [torch.float32, torch.bfloat16]
    assert torch.equal(kept[0], state.float())


def test_a_segment_is_freed_when_all_its_layers_are_consumed() -> None:
    step = STEPS["a tree"]()
    cache = captured(step, 0)
    with pytest.raises(RuntimeError, match="empty, expected"):
        cache.free(0, consumed=False)  # nothing of its attention layers
    cache = SidecarCache(step.planned(), [Form.SPANS])
    cache.capture(0, 0, (torch.ones(1, 2), torch.ones(1, 2)))
    cache.capture(0, 0, (torch.zeros(1, 2), torch.zeros(1, 2)))  # recomputation
    first = Reading(torch.tensor(cache.map.parents[1]))
    assert cache.read(0, 1, first)[0].tolist() == [[1, 1]]
    assert cache.take(0, 0) is None
    cache.free(0, consumed=True)
    assert cache.state(0, 0) is SegmentState.FREED and cache.device_bytes.held == 0


def test_indices_of_short_spans() -> None:
    spans = Spans((1, 5, 3), (0, 2, 2), torch.device("cpu"))
    edges = spans.edges(3)
    assert edges.first.view(3, 3).tolist() == [[0, 0, 0], [1, 2, 3], [6, 7, 8]]
    assert edges.ends.tolist()[:9] == edges.first.tolist()
    assert edges.ends[9:].view(3, 3).tolist() == [[0, 0, 0], [3, 4, 5], [6, 7, 8]]
    assert edges.places.tolist() == [0, 1, 2, 3, 6, 7, 8]
    sides = torch.arange(27).view(3, 9).tolist()  # tail, first, last of every span
    moved = [sides[0][1:4], sides[1][6:], sides[2][6:]]
    assert edges.tail.view(3, 3).tolist() == moved
    assert [part.tolist() for part in spans.runs] == [[1, 2], [0, 2]]
    assert spans.cu_seqlens.tolist() == spans.cu_seqlens_cpu.tolist() == [0, 1, 6, 9]
    assert spans.cu_seqlens_cpu is spans.cu_seqlens_cpu and spans.has_parents  # fla's cache asks


def test_spans_of_like_length_are_one_batch() -> None:
    spans = Spans((1, 5, 3, 7), (0, 0, 0, 0), torch.device("cpu"))
    assert [batch.numbers for batch in spans.batches(3)] == [(0,), (2,), (1, 3)]
    last = spans.batches(3)[2]
    assert last.positions.view(2, 10)[0].tolist() == [1, 1, 1, 1, 2, 3, 4, 5, 5, 5]
    assert last.positions.view(2, 10)[1].tolist() == [9, 9, 9, *range(9, 16)]
    assert last.front.tolist() == [0, 1, 2, 10, 11, 12]
    assert last.padding is not None and last.padding.tolist() == [8, 9]
    assert last.blank.tolist() == last.front.tolist() + last.padding.tolist()
    assert spans.order.tolist() == [0, 2, 1, 3] and not spans.has_parents
    own, front = spans.unbatched(3)  # rows of 4, 6 and twice 10
    assert own.tolist() == [3, *range(13, 18), *range(7, 10), *range(23, 30)]
    assert front.tolist() == [0, 1, 2, 10, 11, 12, 4, 5, 6, 20, 21, 22]


def test_gradients_of_neighbours_are_summed_in_fp32() -> None:
    """In bf16 what is small beside the sum would be lost: 256 and eight halves."""
    sent = torch.full((10, 3), 0.5, dtype=torch.bfloat16)
    sent[0] = 256.0
    found = states.summed(sent, torch.tensor([9, 1]))
    assert found.dtype == torch.float32
    assert found.tolist() == [[260.0] * 3, [0.5] * 3]
