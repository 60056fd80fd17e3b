"""Tables of what segments read to predict further, against each microbatch by itself."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron_prefix.features.mtp.tables import AheadTables, Division, FurtherRows, loss_sums
from megatron_prefix.lab.plans.forest import max_depth
from megatron_prefix.run.read.step import with_next_tokens
from megatron_prefix.tree import Forest, Pairs, TreeOptions, build, cp_layout
from tests.core.tree.test_across_ranks import dealt, forests_of

DIVISIONS = [
    Division(per, *clamps)
    for per in (False, True)
    for clamps in ((False, False), (True, False), (True, True))
]


def samples(masked: bool = False, depths: int = 1) -> list[Pairs]:
    """Of two prompts, of lengths that two context-parallel ranks divide; weights differ."""
    draw = np.random.default_rng(3)
    prompts = [draw.integers(1, 50, n) for n in (12, 9)]
    found = []
    for number in range(6):
        end = draw.integers(1, 50, 17 - len(prompts[number % 2]) + 4 * (number % 3))
        tokens = np.r_[prompts[number % 2], end]
        labels = (
            np.where(np.arange(len(tokens) - 1) < 9, -100, tokens[1:]) if masked else tokens[1:]
        )
        weights = draw.choice([0.0, 1.0, 0.25], len(tokens) - 1)
        found.append(Pairs(tokens[:-1], labels, weights != 0, weights=weights))
    return with_next_tokens([*found, found[0]], depths)


MICROBATCHES = (0, 0, 1, 2, 2, 2, 1)


def forest_of(some: list[Pairs], multiple: int = 1) -> Forest:
    options = TreeOptions(multiple, chunk_tokens=8, segment_tokens=16, min_gain=0)
    return build(some, options=options, microbatch_of=MICROBATCHES)


def expected(
    some: list[Pairs], division: Division, size: int, owners: Sequence[int] = MICROBATCHES,
    depth: int = 1,
) -> Counter[tuple]:  # fmt: skip
    """By (depth, sample's first tokens up to a position, label): weights in loss and mean,
    summed."""
    total: Counter[tuple] = Counter()
    for m in sorted(set(owners)):
        mine = [one for one, of in zip(some, owners, strict=True) if of == m]
        for rank in range(size):
            held = [cp_layout.rank_positions(len(one), rank, size) for one in mine]
            moved = [np.append(one.weights[depth:], [0.0] * depth) for one in mine]  # type: ignore[index]
            left = sum(one[at].sum() for one, at in zip(moved, held, strict=True))
            whole = sum(one.weights[at].sum() for one, at in zip(mine, held, strict=True))  # type: ignore[index]
            least = max(left, 1.0) if division.clamps else left
            factor = 1 / least
            if division.per_token:
                factor = whole / least if division.clamps else 1.0
            for one, at, weights in zip(mine, held, moved, strict=True):
                for place in at[weights[at] != 0]:
                    label = int(one.labels[place + depth])
                    key = (depth, *one.inputs[: place + 1].tolist(), label)
                    total[key] += weights[place] * factor
                    total[("mean", *key)] += weights[place] / (
                        max(left, 1.0) if division.clamps_mean else left
                    )
                    total[("count", *key)] += 1
    return total


def found_in(
    forest: Forest, some: list[Pairs], division: Division, size: int, depths: int
) -> Counter:
    total: Counter[tuple] = Counter()
    for rank in range(size):
        tables = AheadTables(forest, some, MICROBATCHES, division, rank, size, depths)
        total.update(counted(tables, forest, some, rank, size))
    return total


def counted(
    tables: AheadTables, forest: Forest, some: list[Pairs], rank: int, size: int
) -> Counter[tuple]:
    """On one context-parallel rank."""
    total: Counter[tuple] = Counter()
    of_segments = [
        (segment, depth, rows)
        for segment, by_depth in zip(forest.segments, tables.rows(), strict=True)
        for depth, rows in enumerate(by_depth, 1)
    ]
    for segment, depth, rows in of_segments:
        assert (np.diff(rows.places) >= 0).all()
        assert len(rows.places) == len({*zip(rows.places, rows.labels, strict=True)})
        held = cp_layout.held_positions([s.padded for s in segment.spans], rank, size)
        places = [(span, span.start + n) for span in segment.spans for n in range(span.padded)]
        for place, label, weights in zip(rows.places, rows.labels, rows.weights.T, strict=True):
            span, position = places[held[place]]
            key = (depth, *some[span.rollouts[0]].inputs[: position + 1].tolist(), int(label))
            for name, weight in zip(((), ("mean",), ("count",)), weights, strict=True):
                total[(*name, *key)] += weight
    return total


@pytest.mark.parametrize(("size", "depths"), [(1, 1), (2, 1), (1, 3), (2, 2), (1, 7)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("division", DIVISIONS, ids=str)
def test_every_label_counts_as_in_its_microbatches(
    division: Division, masked: bool, size: int, depths: int
) -> None:
    some = samples(masked, depths)
    forest = forest_of(some, 1 if size == 1 else 2 * size)
    assert forest.executed_tokens < forest.raw_tokens and max_depth(forest) > 1
    found, wanted = found_in(forest, some, division, size, depths), Counter[tuple]()
    for depth in range(1, depths + 1):
        wanted.update(expected(some, division, size, depth=depth))
    assert found.keys() == wanted.keys()
    assert all(found[key] == pytest.approx(wanted[key], rel=1e-12) for key in wanted)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_owners_hear_what_counts_on_other_data_parallel_ranks(seed: int, size: int) -> None:
    draw = np.random.default_rng(seed)
    ranks = [with_next_tokens([weighed(one, draw) for one in rank]) for rank in dealt(seed, 3)]
    options = TreeOptions(1 if size == 1 else 2 * size, chunk_tokens=8, min_gain=0)
    forests, owners = forests_of(ranks, options)
    both = [*zip(forests, ranks, owners, strict=True)]
    division, total = DIVISIONS[5], Counter[tuple]()
    for place in range(size):
        tables = [AheadTables(*one, division, place, size) for one in both]
        told = {}
        for rank, forest in enumerate(forests):
            for one in forest.exchanges:
                if forest.segments[one.segment].source >= 0:
                    [(owner, _)] = one.peers
                    told.setdefault((rank, owner), []).append(tables[rank].told(one.segment))
        for rank, forest in enumerate(forests):
            for one in forest.exchanges:
                for peer, spans in one.peers if forest.segments[one.segment].source < 0 else ():
                    tables[rank].hear(one.segment, spans, told[peer, rank].pop(0))
        assert not any(told.values())
        for one, forest, rank in zip(tables, forests, ranks, strict=True):
            total.update(counted(one, forest, rank, place, size))
    wanted = sum((expected(s, division, size, of) for _, s, of in both), Counter())
    assert total.keys() == wanted.keys()
    assert all(total[key] == pytest.approx(wanted[key], rel=1e-12) for key in wanted)


def weighed(one: Pairs, draw: np.random.Generator) -> Pairs:
    """A sample as long as two context-parallel ranks need, with any weights; none is zero."""
    num = max(len(one) // 4 * 4, 4)
    inputs, labels = (np.resize(column, num) for column in (one.inputs, one.labels))
    return Pairs(inputs, labels, np.ones(num, bool), weights=draw.uniform(0.1, 1, num))


@pytest.mark.parametrize("depths", [1, 4])
def test_next_inputs_and_their_positions(depths: int) -> None:
    some = samples(depths=depths)
    forest = forest_of(some)
    tables = AheadTables(forest, some, MICROBATCHES, DIVISIONS[0], depths=depths)
    table: NDArray[np.int64] = tables.following()
    assert len(table) == depths
    offset = 0
    for span in (span for segment in forest.segments for span in segment.spans):
        for rollout, depth in itertools.product(span.rollouts, range(1, depths + 1)):
            places = np.arange(span.start, span.end) + depth
            places[places >= len(some[rollout])] = 0
            inputs = np.where(places > 0, some[rollout].inputs[places], 0)
            rows = table[depth - 1, :, offset : offset + span.length]
            assert rows.tolist() == [inputs.tolist(), places.tolist()]
        offset += span.padded
    assert offset == table.shape[2]


def test_a_position_is_shared_where_the_next_input_is() -> None:
    def made(inputs: list[int], labels: list[int]) -> Pairs:
        num = len(inputs)
        return Pairs(*map(np.array, (inputs, labels)), np.ones(num, bool), weights=np.ones(num))

    for masked in (False, True):
        pairs = ([5, 6, 7], [6, 7, 9]), ([5, 6, 8], [6, 8, 9]), ([5, 6], [6, 7])
        plain = [made(inputs, [0] * len(inputs) if masked else labels) for inputs, labels in pairs]
        one, other, shorter = with_next_tokens(plain)
        assert (one.following is not None) == masked
        assert one.codes().shape == (3, 1 + masked)
        assert (one.codes() == other.codes()).all(axis=1).tolist() == [True, False, False]
        assert (one.codes()[:2] == shorter.codes()).all(axis=1).tolist() == [True, False]
        for start, end in ((1, 2), (1, 3), (0, 3), (2, None)):
            assert (one.codes(start, end) == one.codes()[start:end]).all()


@pytest.mark.parametrize("depths", [1, 2, 3])
def test_spans_end_depth_minus_one_before_rollouts_differ(depths: int) -> None:
    rollouts = [np.array([5, 6, 7, 8, differs, 9, 9]) for differs in (1, 2)]
    first, second = with_next_tokens(
        [
            Pairs(tokens[:-1], tokens[1:], np.ones(6, bool), weights=np.ones(6))
            for tokens in rollouts
        ],
        depths,
    )
    same = (first.codes() == second.codes()).all(axis=1)
    assert same[:4].tolist() == [True] * (4 - depths) + [False] * depths


def test_one_masked_sample_is_enough() -> None:
    some = samples()
    assert all(one.following is None for one in some)
    last = replace(some[-1], labels=np.where(some[-1].labels > 20, -100, some[-1].labels))
    assert all(one.following is not None for one in with_next_tokens([*some[:-1], last]))


def test_megatron_divides_by_zero() -> None:
    some = samples()
    for one, of in zip(some, MICROBATCHES, strict=True):
        one.weights[:] *= of != 1  # type: ignore[index]
    forest = forest_of(some)
    assert loss_sums(some, MICROBATCHES)[0][:, 0].tolist().count(0.0) == 1
    for division in DIVISIONS:
        tables = AheadTables(forest, some, MICROBATCHES, division)
        assert tables.undefined == [not division.clamps]
        assert all(
            isinstance(rows, FurtherRows) and np.isfinite(rows.weights).all()
            for [rows] in tables.rows()
        )
