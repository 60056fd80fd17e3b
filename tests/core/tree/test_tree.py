"""The segment tree: cases by hand, real rollouts, and linear time."""

from __future__ import annotations

import sys
import time

import numpy as np
import pytest

from megatron_prefix.errors import UserError
from megatron_prefix.lab.data.pairs import pairs_of, pairs_of_groups
from megatron_prefix.lab.plans.forest import max_depth, num_trees, trees
from megatron_prefix.tree import Forest, Pairs, Place, TreeOptions, build
from tests.harness import data
from tests.harness.trees import as_pairs, exact, flat_rollouts, is_prefix_tree, trees_of, trie_size

# Cases by hand ------------------------------------------------------------------------------------


def shape(forest: Forest) -> list[tuple]:
    """Segments as (segments of the parents, [(start, length, rollouts)])."""
    return [
        (s.parents, [(span.start, span.length, span.rollouts) for span in s.spans])
        for s in forest.segments
    ]


def test_a_flat_group_is_one_inner_segment_and_a_wave() -> None:
    rollouts, groups = flat_rollouts(prefix=10, suffix=4, num=3, num_groups=1)
    forest = build(rollouts, groups, exact())
    assert shape(forest) == [
        ((), [(0, 10, (0, 1, 2))]),
        ((0,), [(10, 4, (0,)), (10, 4, (1,)), (10, 4, (2,))]),
    ]
    assert [segment.scored for segment in forest.segments] == [False, True]
    assert (forest.raw_tokens, forest.executed_tokens, max_depth(forest)) == (42, 22, 2)
    assert forest.paths == tuple((Place(0, 0), Place(1, number)) for number in range(3))
    assert [span.parent for span in forest.segments[1].spans] == [Place(0, 0)] * 3


def test_small_trees_share_segments_and_spans_know_their_parents() -> None:
    """Two flat groups, one of them with two levels, and a rollout that shares nothing."""
    rows = [[0] * 4 + [a] * 2 for a in (1, 2)]
    rows += [[3] * 3 + [4] * 2 + [a] * 2 for a in (5, 6)] + [[3] * 3 + [7], [8] * 5]
    rollouts = [as_pairs(row, row, [True] * len(row)) for row in rows]
    forest = build(rollouts, [0, 0, 1, 1, 1, 2], exact())
    assert shape(forest) == [
        ((), [(0, 4, (0, 1)), (0, 3, (2, 3, 4))]),
        ((0,), [(3, 2, (2, 3))]),
        ((0, 1), [
            (0, 5, (5,)), (4, 2, (0,)), (4, 2, (1,)), (3, 1, (4,)), (5, 2, (2,)), (5, 2, (3,)),
        ]),
    ]  # fmt: skip
    assert [span.parent for span in forest.segments[2].spans] == [
        None, Place(0, 0), Place(0, 0), Place(0, 1), Place(1, 0), Place(1, 0),
    ]  # fmt: skip
    assert trees(forest.segments) == [(0, 1), (1,), (2, 0, 0, 1, 1, 1)]
    assert (num_trees(forest.segments), max_depth(forest), forest.executed_tokens) == (3, 3, 23)
    assert forest.paths[3] == (Place(0, 1), Place(1, 0), Place(2, 5))


def test_the_last_prompt_token_joins_branches_by_its_label() -> None:
    prompt = [5, 6, 7]
    rollouts = [
        as_pairs([*prompt, *answer[:-1]], [*prompt[1:], *answer], [False, False, True, True])
        for answer in ([1, 9], [2, 9])
    ]
    assert shape(build(rollouts, None, exact())) == [
        ((), [(0, 2, (0, 1))]),
        ((0,), [(2, 2, (0,)), (2, 2, (1,))]),
    ]


def test_boundaries_round_toward_the_root() -> None:
    rollouts, groups = flat_rollouts(prefix=10, suffix=3, num=2, num_groups=1)
    assert shape(build(rollouts, groups, exact(multiple=4))) == [
        ((), [(0, 8, (0, 1))]),
        ((0,), [(8, 5, (0,)), (8, 5, (1,))]),
    ]
    wave = build(rollouts, groups, exact(multiple=4)).segments[1]
    assert [span.padded for span in wave.spans] == [8, 8]
    assert wave.padded_length == 16


def test_chunks_are_nearly_equal() -> None:
    rollouts, groups = flat_rollouts(prefix=10, suffix=3, num=2, num_groups=1)
    forest = build(rollouts, groups, exact(chunk_tokens=4))
    assert [span.length for s in forest.segments for span in s.spans] == [3, 3, 4, 3, 3]
    assert [s.parents for s in forest.segments] == [(), (0,), (1,), (2,)]


def test_a_segment_that_saves_exactly_the_least_gain_stays() -> None:
    rollouts, groups = flat_rollouts(prefix=10, suffix=4, num=3, num_groups=1)
    assert build(rollouts, groups, exact(min_gain=20)).executed_tokens == 22
    assert shape(build(rollouts, groups, exact(min_gain=21))) == [
        ((), [(0, 14, (0,)), (0, 14, (1,)), (0, 14, (2,))])
    ]


def test_a_rollout_that_ends_inside_counts_as_a_branch() -> None:
    long = as_pairs(range(8), range(1, 9), [False] * 4 + [True] * 4)
    short = as_pairs(range(5), range(1, 6), [False] * 4 + [True])
    kept = build([long, short], None, exact(min_gain=5))
    assert shape(kept) == [((), [(0, 5, (0, 1))]), ((0,), [(5, 3, (0,))])]
    assert kept.paths == (((0, 0), (1, 0)), ((0, 0),)) and kept.segments[0].scored
    dissolved = build([long, short], None, exact(min_gain=6))
    spans = sorted(span[:4] for span in dissolved.segments[0].spans)
    assert spans == [(0, 5, 5, (1,)), (0, 8, 8, (0,))]


def test_dissolving_hands_the_positions_to_the_children() -> None:
    """Three levels; the short one in the middle goes, the ones around it stay."""
    rows = [[0] * 6 + [1] + [a] * 4 + [b] * 2 for a, b in ((2, 3), (2, 4), (5, 6), (5, 7))]
    rows += [[0] * 6 + [8] * 7]
    rollouts = [as_pairs(row, row, [True] * len(row)) for row in rows]
    assert shape(build(rollouts, None, exact(min_gain=3))) == [
        ((), [(0, 6, (0, 1, 2, 3, 4))]),
        ((0,), [(6, 5, (0, 1)), (6, 5, (2, 3))]),
        ((0, 1), [(6, 7, (4,)), *((11, 2, (rollout,)) for rollout in range(4))]),
    ]


def test_a_rollout_without_loss_counts_as_trained_at_its_end() -> None:
    rollout = as_pairs([1, 2, 3], [2, 3, 4], [False] * 3)
    assert rollout.first_trained == 2
    forest = build([rollout], None, exact(chunk_tokens=1))
    assert [segment.scored for segment in forest.segments] == [False, False, True]


def test_what_is_behind_the_last_loss_is_not_computed() -> None:
    """A tool's last answer, a rollout without loss, and one whose last position carries loss."""
    tokens = [1, 2, 3, 4, 5, 6, 7]
    flags = ([0, 0, 0, 1, 0, 0], [0] * 6, [0, 0, 0, 0, 0, 1])
    rollouts = [as_pairs(tokens[:-1], tokens[1:], one).up_to_loss() for one in flags]
    assert [one.num_needed for one in rollouts] == [4, 2, 6]
    forest = build(rollouts, options=exact())
    assert (forest.raw_tokens, forest.executed_tokens) == (18, 6)
    ends = [forest.segments[s].spans[n].end for s, n in (path[-1] for path in forest.paths)]
    assert ends == [4, 2, 6] and forest.first_trained == (3, 1, 5)
    assert all(forest.segments[path[-1].segment].scored for path in forest.paths)


def test_loss_in_leaves_heeds_the_earliest_loss_of_copies() -> None:
    """A copy that is trained earlier keeps its loss out of what others share too."""
    late = as_pairs([1, 2, 3, 4, 5], [2, 3, 4, 5, 6], [False, False, False, False, True])
    early = Pairs(late.inputs, late.labels, np.arange(5) >= 1)
    other = as_pairs([1, 2, 3, 4, 9], [2, 3, 4, 9, 9], [False, False, False, False, True])
    forest = build([late, early, other], None, exact(loss_in_leaves=True))
    assert shape(forest) == [((), [(0, 1, (0, 1, 2))]), ((0,), [(1, 4, (0, 1)), (1, 4, (2,))])]


def test_a_rollout_of_one_position() -> None:
    single = as_pairs([3], [4], [True])
    assert shape(build([single], None, exact(multiple=8, chunk_tokens=8))) == [((), [(0, 1, (0,))])]


def test_no_rollouts_make_no_segments() -> None:
    forest = build([], None, exact())
    assert (forest.segments, forest.raw_tokens, max_depth(forest)) == ((), 0, 0)


@pytest.mark.parametrize("even", [100, 256, 1000])
@pytest.mark.parametrize("multiple", [1, 4])
def test_only_what_may_have_graphs_is_padded_for_them(even: int, multiple: int) -> None:
    options = TreeOptions(even=even, multiple=multiple)
    for length in range(multiple, 2 * even, multiple):
        missing = options.missing(length)
        assert missing % multiple == 0 and (not missing or length + missing <= even)
    assert len({n + options.missing(n) for n in range(multiple, even + 1, multiple)}) <= 40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"multiple": 0}, "multiple is 0"),
        ({"chunk_tokens": -1}, "chunk_tokens is -1"),
        ({"segment_tokens": -2}, "segment_tokens is -2"),
        ({"min_gain": -3}, "min_gain is -3"),
        ({"cut": 0}, "cut is 0"),
        ({"multiple": 8, "chunk_tokens": 4}, "chunk_tokens 4 is below the alignment 8"),
        ({"multiple": 4, "cut": 6, "chunk_tokens": 8}, "below the alignment 12"),
        ({"share": "all"}, "share is 'all'"),
        (dict(joins=True, chunk_tokens=8), "joins with chunk_tokens"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message) -> None:
    with pytest.raises(UserError, match=message):
        TreeOptions(**options)


def test_rollouts_that_mean_nothing_are_refused() -> None:
    good = as_pairs([1], [2], [True])
    with pytest.raises(UserError, match="rollout 1: 0 inputs"):
        build([good, as_pairs([], [], [])])
    with pytest.raises(UserError, match="rollout 0: 1 inputs, 2 labels"):
        build([as_pairs([1], [2, 3], [True])])
    with pytest.raises(UserError, match="1 group numbers for 2 rollouts"):
        build([good, good], [0])


# Real rollouts and time ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_groups"), [("gsm8k", 20), ("math_cot", 10), ("rag_hotpot_llm", 2)]
)
def test_real_rollouts_share_what_their_trie_shares(name, num_groups) -> None:
    groups = data.groups(name, num_groups)
    rollouts, numbers = pairs_of_groups(groups)
    forest = build(rollouts, numbers, exact())
    is_prefix_tree(forest)
    assert forest.executed_tokens == sum(map(trie_size, trees_of(rollouts, numbers, "group")))


def test_pairs_of_a_rollout() -> None:
    rollout = data.groups("gsm8k", 1)[0].rollouts[0]
    pairs = pairs_of(rollout)
    assert len(pairs) == len(rollout) - 1
    assert np.array_equal(pairs.inputs[1:], pairs.labels[:-1])
    trained = [start - 1 for start, _ in rollout.loss]
    assert pairs.first_trained == trained[0]
    assert pairs.trained.sum() == rollout.num_trained


def caterpillar(num: int, length: int) -> list[Pairs]:
    """Each rollout leaves the common one a little later: as deep as there are rollouts."""
    rng = np.random.default_rng(0)
    base = rng.integers(0, 1000, length + 1)
    rollouts = []
    for index in range(num):
        tokens, parted = base.copy(), length * (index + 1) // (num + 1)
        tokens[parted:] = rng.integers(1000, 2000, length + 1 - parted)
        rollouts.append(Pairs(tokens[:-1], tokens[1:], np.arange(length) >= length // 2))
    return rollouts


@pytest.mark.parametrize("kind", ["flat", "caterpillar", "own"])
def test_a_thousand_rollouts_of_ten_thousand_tokens_take_seconds(kind) -> None:
    """The bound is the issue's; what it takes on one core is a tenth of it."""
    num, length = 1000, 10_000
    if kind == "flat":
        rollouts, _ = flat_rollouts(length // 2, length // 2, num, 1)
    elif kind == "caterpillar":
        rollouts = caterpillar(num, length)
    else:
        tokens = np.random.default_rng(0).integers(0, 1000, (num, length + 1))
        rollouts = [Pairs(row[:-1], row[1:], np.arange(length) >= 100) for row in tokens]
    begin = time.process_time()
    forest = build(rollouts, None, TreeOptions(multiple=8, chunk_tokens=512))
    assert time.process_time() - begin < 5
    assert forest.raw_tokens == num * length


def test_deep_trees_need_no_recursion() -> None:
    """More levels than Python has stack frames."""
    length = sys.getrecursionlimit() + 200
    rollouts = [
        as_pairs(range(n), range(1, n + 1), [False] * (n - 1) + [True]) for n in range(1, length)
    ]
    forest = build(rollouts, None, exact())
    assert (max_depth(forest), forest.executed_tokens) == (length - 1, length - 1)
