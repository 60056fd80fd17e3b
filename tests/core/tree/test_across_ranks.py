"""What data-parallel ranks have in common: every beginning once in the job, and plans that run."""

import collections
import itertools
import pickle
import random
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_prefix.features.across import common, ranges
from megatron_prefix.features.across.block_tree import BlockTree
from megatron_prefix.features.across.common import BLOCK, beginnings_of, common_spans
from megatron_prefix.features.across.owners import EVEN, owners_of
from megatron_prefix.features.across.tries import find_below
from megatron_prefix.features.plan_files.table import from_csv, to_csv
from megatron_prefix.lab.plans.job import simulate_job
from megatron_prefix.lab.plans.messages import with_messages, without_messages
from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.plan.planner import best_plan, loss_ready_after
from megatron_prefix.tree import Pairs, TreeOptions, beginnings, build
from megatron_prefix.tree.beginnings import most_saved
from tests.harness.fuzzing import rounds
from tests.harness.trees import received, rollout_sets, tree_options, trie_size, with_routes


def dealt(seed, num_ranks):
    """Rollouts of some prompts on random ranks, some of them twice; some begin another way half
    way down."""
    draw = random.Random(seed)
    ranks = [[] for _ in range(num_ranks)]
    for _ in range(draw.randint(1, 6)):
        prompt = [draw.randrange(50) for _ in range(draw.randint(5, 60))]
        for _ in range(draw.randint(1, 6)):
            cut = draw.choice([len(prompt), draw.randint(1, len(prompt))])
            tokens = prompt[:cut] + [draw.randrange(50) for _ in range(draw.randint(2, 20))]
            trained = np.arange(len(tokens) - 1) >= cut - 1
            rollout = Pairs(np.array(tokens[:-1]), np.array(tokens[1:]), trained)
            for _ in range(draw.choice([1, 1, 1, 2])):
                ranks[draw.randrange(num_ranks)].append(rollout)
    for rank in ranks:  # a rank without data has one position without loss
        rank or rank.append(Pairs(np.array([0]), np.array([0]), np.array([False])))
    return ranks


def forests_of(ranks, options, block=1):
    """Every rank's forest, and its microbatches of two rollouts each."""
    owners = [[number // 2 for number in range(len(rank))] for rank in ranks]
    told = [beginnings_of(rank, options, block) for rank in ranks]
    heard = ranges.told_together([beginnings for beginnings, _ in told])
    forests = []
    for place, rank in enumerate(ranks):
        common = common_spans(heard, place, options)
        tries = find_below(rank, options, told[place][1], common)
        forests.append(tries.forest(microbatch_of=owners[place]))
    return forests, owners


def judged(forests, owners):
    """The planner's programs of all ranks, played together where every message blocks."""
    both = [*zip(forests, owners, strict=True)]
    alone = [best_plan(one, 1, microbatches=of) for one, of in both]
    plans = [with_messages(*pair) for pair in zip(alone, forests, strict=True)]
    assert [*map(without_messages, plans)] == alone
    assert all(from_csv(to_csv(plan)) == plan for plan in plans if plan.segments)
    found = simulate_job(plans, [loss_ready_after(*one) for one in both])
    assert found.received_positions == tuple(one.received_tokens for one in forests)
    return found


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize(("segment_tokens", "block"), [(0, 8), (64, 1), (200, 5)])
def test_every_rank_has_its_rollouts_and_a_plan_that_runs(num_ranks, segment_tokens, block):
    options = TreeOptions(segment_tokens=segment_tokens, min_gain=0, share="batch")
    for seed in range(rounds(6, 100)):
        ranks = dealt(seed, num_ranks)
        forests, owners = forests_of(ranks, options, block)
        for rank, forest, microbatch_of in zip(ranks, forests, owners, strict=True):
            assert received(forest) == forest
            for rollout, path in zip(rank, forest.paths, strict=True):
                spans = [forest.segments[place.segment].spans[place.number] for place in path]
                bounds = [0, *(span.end for span in spans)]
                assert bounds[:-1] == [span.start for span in spans]
                assert bounds[-1] == len(rollout)
            plan = best_plan(forest, 1, microbatches=microbatch_of)
            simulate(plan, ready_after=loss_ready_after(forest, microbatch_of))
        judged(forests, owners)


def test_all_positions_but_the_last_run_once_in_the_job():
    options = TreeOptions(min_gain=0, share="batch")
    scored = 0
    for seed in range(60):
        ranks = dealt(seed, 3)
        forests, _ = forests_of(ranks, options)
        beginnings = [
            Pairs(*(c[:-1] for c in (one.inputs, one.labels, one.trained)))
            for rank in ranks for one in rank if len(one) > 1
        ]  # fmt: skip
        once = trie_size(beginnings) if beginnings else 0
        last = sum(len({one.codes().tobytes() for one in rank}) for rank in ranks)
        assert sum(forest.executed_tokens for forest in forests) == once + last
        received = [one for forest in forests for one in forest.segments if one.source >= 0]
        scored += sum(one.scored for one in received)
    assert scored > 100


def agreeing(a, b):
    """Positions that two rollouts have in common before their last ones."""
    num = min(len(a), len(b)) - 1
    same = (a.codes(0, num) == b.codes(0, num)).all(axis=1)
    return num if same.all() else int(same.argmin())


@pytest.mark.parametrize("multiple", [1, 3])
@pytest.mark.parametrize("block", [1, 4, 8])
def test_what_is_common_ends_at_a_block_or_with_the_beginning(block, multiple):
    options = TreeOptions(min_gain=0, share="batch", multiple=multiple)
    parts = -(-block // multiple) * multiple
    whole = part = 0
    for seed in range(30):
        ranks = dealt(seed, 3)
        told = [beginnings_of(rank, options, block) for rank in ranks]
        heard = ranges.told_together([beginnings for beginnings, _ in told])
        for place, (_, numbers) in enumerate(told):
            common = common_spans(heard, place, options)
            others = [one for other in ranks if other is not ranks[place] for one in other]
            for rollout, number in zip(ranks[place], numbers, strict=True):
                expected, mine = 0, options.rounded(len(rollout) - 1)
                for other in others:
                    same = agreeing(rollout, other)
                    equal = options.rounded(len(other) - 1) == mine <= same
                    expected = max(expected, mine if equal else same // parts * parts)
                last = common.below[number]
                assert (common.spans[last].end if last >= 0 else 0) == min(expected, mine)
                whole, part = whole + (expected == mine), part + (0 < expected < mine)
    assert whole > 30 and part > 20


def test_ranks_send_no_tokens_and_little():
    draw = np.random.default_rng(1)
    tokens = draw.integers(0, 1000, 4001)
    rollout = Pairs(tokens[:-1], tokens[1:], np.arange(4000) >= 3999)
    told, numbers = beginnings_of([rollout] * 5, TreeOptions())
    assert numbers == [0] * 5 and told.counts.tolist() == [500] and told.ends[-1] == 3999
    questions = ranges.Inquiry(told, 0, 8).questions
    assert questions.nbytes == 32 * 500
    assert np.ptp(np.bincount(questions[:, 0], minlength=8)) < 50, "every rank answers"
    assert len(pickle.dumps(ranges.told_together([told, told])[0])) < 1000
    # Another token far down: digests agree up to its block, and nowhere behind it.
    inputs = np.where(np.arange(4000) == 2000, -1, rollout.inputs)
    other, _ = beginnings_of([replace(rollout, inputs=inputs)], TreeOptions())
    same = (told.digests == other.digests).all(axis=1)
    assert same[: 2000 // BLOCK].all() and not same[2000 // BLOCK :].any()


@pytest.mark.parametrize("first", [(20, 8), (8, 20)])
def test_copies_of_a_rollout_may_be_trained_from_two_places(first):
    """A span carries loss from the first of them on, whichever copy comes last: ranks that think
    otherwise of it wait for each other's final states for ever."""
    options = TreeOptions(min_gain=0, share="batch")
    tokens = np.arange(31)
    rollouts = [Pairs(tokens[:-1], tokens[1:], np.arange(30) >= begin) for begin in first]
    ranks = [rollouts, [replace(rollouts[0], trained=np.arange(30) >= 20)]]
    told = [beginnings_of(rank, options, block=1) for rank in ranks]
    assert told[0][1] == [0, 0] and told[0][0].first_trained.tolist() == [8]
    heard = ranges.told_together([beginnings for beginnings, _ in told])
    spans = common_spans(heard, 0, options).spans
    assert [(one.end, one.scored) for one in spans] == [(8, False), (29, True)]
    forests, owners = forests_of(ranks, options)
    assert any(one.scored for one in forests[1].segments)
    judged(forests, owners)


def test_routes_are_part_of_a_beginning():
    options = TreeOptions(min_gain=0, share="batch")
    tokens, trained = np.arange(11), np.arange(10) >= 8
    routes = np.zeros((10, 2, 2), np.int16)
    other = routes.copy()
    other[5] = 1
    rollouts = [Pairs(tokens[:-1], tokens[1:], trained, one) for one in (routes, other)]
    told = [beginnings_of([one], options, 1)[0] for one in rollouts]
    assert [span.end for span in common_spans(ranges.told_together(told), 0, options).spans] == [5]
    none = replace(rollouts[0], trained=trained | True)  # a beginning without a position
    before = replace(options, loss_in_leaves=True)
    assert beginnings_of([none], before)[0].digests.shape == (0, 2)


def test_spans_with_loss_are_in_segments_of_their_own():
    """Final states of the others need not cross."""
    options = TreeOptions(min_gain=0, share="batch")
    kinds = set()
    for seed in range(30):
        told = [beginnings_of(rank, options, block=1)[0] for rank in dealt(seed, 3)]
        spans = common_spans(ranges.told_together(told), 0, options)
        for segment in spans.segments:
            [scored] = {spans.spans[number].scored for number in segment.spans}
            kinds.add(scored)
    assert kinds == {False, True}


# What the first positions say of sharing, against the tree ----------------------------------------


@pytest.mark.parametrize("look", [1, 4, 16, 512])
@given(rollout_sets(), tree_options())
@settings(max_examples=rounds(30, 500))
def test_no_tree_saves_more(look, sets, options):
    forest = build(*sets, options)
    with mock.patch.object(beginnings, "LONGEST_LOOK", look):
        assert forest.raw_tokens - forest.executed_tokens <= most_saved(sets[0], options)


@given(rollout_sets(), tree_options(), st.data())
@settings(max_examples=rounds(25, 500))
def test_routes_only_take_sharing_away(sets, options, data):
    rollouts, groups = sets
    parts = [data.draw(st.integers(0, len(rollout))) for rollout in rollouts]
    routed = with_routes(rollouts, 2, 4, parts)
    forest = build(routed, groups, options)
    assert forest.raw_tokens - forest.executed_tokens <= most_saved(routed, options)


# What ranks find out by ranges of digests, against one that sees all digests ---------------------


def dealt_by_ranges(told):
    """What every rank hears, if rows go from rank to rank as they do in a job."""
    inquiries = [ranges.Inquiry(rank, place, len(told)) for place, rank in enumerate(told)]
    questions = delivered([one.questions for one in inquiries])
    answers = delivered([ranges.answered(rows) for rows in questions])
    return [one.shared(rows) for one, rows in zip(inquiries, answers, strict=True)]


def delivered(rows):
    """Rows of all ranks, each where it belongs."""
    num = len(rows)
    for step in ranges.distances(num):
        goes = [ranges.leaving(one, rank, num, step) for rank, one in enumerate(rows)]
        rows = [
            np.r_[rows[rank][~goes[rank]], rows[rank - step][goes[rank - step]]]
            for rank in range(num)
        ]
    assert all((one[:, 0] == rank).all() for rank, one in enumerate(rows))
    return rows


def whole_view(told):
    """The tree and every rank's own positions: places that the same beginnings have are a node."""
    having, bounds = collections.defaultdict(set), {}
    for rank, one in enumerate(told):
        rows = zip(map(bytes, one.digests), one.starts(), one.ends, one.beginning(), strict=True)
        for digest, start, end, number in rows:
            having[digest].add((rank, number))
            bounds[digest] = int(start), int(end)
    nodes, own = collections.defaultdict(list), [one.own for one in told]
    for digest, members in having.items():
        start, end = bounds[digest]
        if len({rank for rank, _ in members}) > 1:
            nodes[frozenset(members)].append((start, end))
        else:
            own[min(members)[0]] += end - start
    keys = sorted(nodes, key=min)
    start, end = [min(nodes[key])[0] for key in keys], [max(nodes[key])[1] for key in keys]
    children = [[] for _ in range(len(keys) + 1)]
    for number, key in enumerate(keys):
        above = [n for n, other in enumerate(keys) if key < other and end[n] == start[number]]
        children[above[0] if above else -1].append(number)
    deepest = [np.full(len(one.counts), -1) for one in told]
    for node in sorted(range(len(keys)), key=end.__getitem__):
        for rank, number in keys[node]:
            deepest[rank][number] = node
    ranks = [tuple(sorted({rank for rank, _ in key})) for key in keys]
    trained = [min(int(told[r].first_trained[n]) for r, n in key) for key in keys]
    return BlockTree(start, end, ranks, trained, children, deepest), own


def drawn(seed):
    """Ranks, some of them without rollouts, and how they share."""
    draw = random.Random(seed)
    ranks = [[] if draw.random() < 0.15 else one for one in dealt(seed, draw.randint(1, 16))]
    options = TreeOptions(
        min_gain=draw.choice([0, 0, 4, 20]), segment_gain=draw.choice([0, 30]), share="batch",
        segment_tokens=draw.choice([0, 64, 200]), chunk_tokens=draw.choice([0, 12]),
        multiple=draw.choice([1, 1, 3]), loss_in_leaves=draw.random() < 0.3,
    )  # fmt: skip
    block = draw.choice([1, 2, 8])
    told = [beginnings_of(rank, options, block)[0] for rank in ranks]
    if draw.random() < 0.2:  # digests that agree in half of their bits
        told = [one._replace(digests=one.digests * np.array([0, 1], np.uint64)) for one in told]
    return told, options


def test_ranges_say_what_one_sees_that_has_all_digests():
    num = 0
    for seed in range(rounds(150, 3000)):
        told, options = drawn(seed)
        heard = dealt_by_ranges(told)
        tree, own = whole_view(told)
        everything = [one._replace(own=each) for one, each in zip(told, own, strict=True)]
        for rank in range(len(told)):
            ours = common_spans(heard, rank, options)
            with mock.patch.object(common, "block_tree", return_value=tree):
                assert ours == common_spans(everything, rank, options)
            num += len(ours.segments)
    assert num > 1000


# Who computes what ranks have in common: as even as spans allow -----------------------------------


def case(rng, num_ranks, num):
    """Lengths of spans, the ranks that have them, and what ranks have besides."""
    lengths = [rng.randint(1, 2000) for _ in range(num)]
    most = range(num_ranks)
    ranks = [tuple(sorted(rng.sample(most, rng.randint(2, num_ranks)))) for _ in lengths]
    return lengths, ranks, [rng.randint(0, 500) for _ in most]


def loads(found, lengths, alone):
    load = [*alone]
    for length, owner in zip(lengths, found, strict=True):
        load[owner] += length
    return load


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_no_change_would_help_the_busiest(num_ranks):
    """Nor giving one of its spans away, nor changing one for another."""
    rng = random.Random(num_ranks)
    stopped = 0
    for _ in range(100):
        lengths, ranks, alone = case(rng, num_ranks, rng.randint(1, 30))
        found = owners_of(lengths, ranks, alone)
        assert all(owner in some for owner, some in zip(found, ranks, strict=True))
        load = loads(found, lengths, alone)
        most, mean = max(load), sum(load) / num_ranks
        if most <= EVEN * mean:
            continue
        stopped += 1
        busiest = load.index(most)
        for one, two in itertools.product(range(len(lengths)), [-1, *range(len(lengths))]):
            if found[one] != busiest:
                continue
            others = ranks[one] if two < 0 else {found[two]} & {*ranks[one]}
            if two >= 0 and busiest not in ranks[two]:
                continue
            moved = lengths[one] - (lengths[two] if two >= 0 else 0)
            for other in {*others} - {busiest}:
                assert max(most - moved, load[other] + moved) >= most
    assert stopped > 10


def test_nothing_in_common():
    assert owners_of([], [], [3, 4]) == []
    assert owners_of([], [], []) == []
