"""Tables of what segments read to predict further, against each microbatch by itself."""

from collections import Counter

import numpy as np
import pytest

from megatron_prefix.features.mtp.tables import AheadTables, Division, FurtherRows, loss_sums
from megatron_prefix.lab.plans.forest import max_depth
from megatron_prefix.run.read.step import with_next_tokens
from megatron_prefix.tree import Pairs, TreeOptions, build, cp_layout

DIVISIONS = [
    Division(per, *clamps)
    for per in (False, True)
    for clamps in ((False, False), (True, False), (True, True))
]


def samples(masked=False, depths=1):
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


def forest_of(some, multiple=1):
    options = TreeOptions(multiple, chunk_tokens=8, segment_tokens=16, min_gain=0)
    return build(some, options=options, microbatch_of=MICROBATCHES)


def expected(
    some, division, size, owners = MICROBATCHES,
    depth = 1,
):  # fmt: skip
    """By (depth, sample's first tokens up to a position, label): weights in loss and mean,
    summed."""
    total = Counter()
    for m in sorted(set(owners)):
        mine = [one for one, of in zip(some, owners, strict=True) if of == m]
        for rank in range(size):
            held = [cp_layout.rank_positions(len(one), rank, size) for one in mine]
            moved = [np.append(one.weights[depth:], [0.0] * depth) for one in mine]
            left = sum(one[at].sum() for one, at in zip(moved, held, strict=True))
            whole = sum(one.weights[at].sum() for one, at in zip(mine, held, strict=True))
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


def found_in(forest, some, division, size, depths):
    total = Counter()
    for rank in range(size):
        tables = AheadTables(forest, some, MICROBATCHES, division, rank, size, depths)
        total.update(counted(tables, forest, some, rank, size))
    return total


def counted(tables, forest, some, rank, size):
    """On one context-parallel rank."""
    total = Counter()
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
def test_every_label_counts_as_in_its_microbatches(division, masked, size, depths):
    some = samples(masked, depths)
    forest = forest_of(some, 1 if size == 1 else 2 * size)
    assert forest.executed_tokens < forest.raw_tokens and max_depth(forest) > 1
    found, wanted = found_in(forest, some, division, size, depths), Counter[tuple]()
    for depth in range(1, depths + 1):
        wanted.update(expected(some, division, size, depth=depth))
    assert found.keys() == wanted.keys()
    assert all(found[key] == pytest.approx(wanted[key], rel=1e-12) for key in wanted)


def test_megatron_divides_by_zero():
    some = samples()
    for one, of in zip(some, MICROBATCHES, strict=True):
        one.weights[:] *= of != 1
    forest = forest_of(some)
    assert loss_sums(some, MICROBATCHES)[0][:, 0].tolist().count(0.0) == 1
    for division in DIVISIONS:
        tables = AheadTables(forest, some, MICROBATCHES, division)
        assert tables.undefined == [not division.clamps]
        assert all(
            isinstance(rows, FurtherRows) and np.isfinite(rows.weights).all()
            for [rows] in tables.rows()
        )
