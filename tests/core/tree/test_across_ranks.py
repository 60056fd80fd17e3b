"""What data-parallel ranks have in common: every beginning once in the job, and plans that run."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace

import numpy as np
import pytest

from megatron_prefix.features.across.common import BLOCK, beginnings_of, common_spans
from megatron_prefix.features.across.common_spans import CommonSpan
from megatron_prefix.features.across.owners import EVEN
from megatron_prefix.features.across.tries import find_below
from megatron_prefix.features.plan_files.table import from_csv, to_csv
from megatron_prefix.lab.plans.job import JobTimeline, simulate_job
from megatron_prefix.lab.plans.messages import with_messages, without_messages
from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.plan.planner import best_plan, loss_ready_after
from megatron_prefix.tree import Forest, Pairs, TreeOptions
from tests.harness.fuzzing import rounds
from tests.harness.trees import received, trie_size


def dealt(seed: int, num_ranks: int) -> list[list[Pairs]]:
    """Rollouts of some prompts on random ranks, some of them twice; some begin another way half
    way down."""
    draw = random.Random(seed)
    ranks: list[list[Pairs]] = [[] for _ in range(num_ranks)]
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


def forests_of(
    ranks: list[list[Pairs]], options: TreeOptions, block: int = 1
) -> tuple[list[Forest], list[list[int]]]:
    """Every rank's forest, and its microbatches of two rollouts each."""
    owners = [[number // 2 for number in range(len(rank))] for rank in ranks]
    told = [beginnings_of(rank, options, block) for rank in ranks]
    forests = []
    for place, rank in enumerate(ranks):
        heard = [mine for mine, _ in told]
        common = common_spans(heard, place, options)
        tries = find_below(rank, options, told[place][1], common)
        forests.append(tries.forest(microbatch_of=owners[place]))
    return forests, owners


def judged(forests: list[Forest], owners: list[list[int]]) -> JobTimeline:
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
def test_every_rank_has_its_rollouts_and_a_plan_that_runs(
    num_ranks: int, segment_tokens: int, block: int
) -> None:
    options = TreeOptions(segment_tokens=segment_tokens, min_gain=0, share="batch")
    for seed in range(rounds(10, 100, fewest=6)):
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


def test_both_ends_of_every_exchange_agree() -> None:
    options = TreeOptions(segment_tokens=64, min_gain=0, share="batch")
    crossed = 0
    for seed in range(60):
        forests, _ = forests_of(dealt(seed, 3), options)
        sent, got = {}, {}
        for place, forest in enumerate(forests):
            for one in forest.exchanges:
                segment = forest.segments[one.segment]
                for peer, numbers in one.peers:
                    spans = [segment.spans[n][:3] for n in numbers]
                    received = segment.source >= 0
                    ends = (peer, place) if received else (place, peer)
                    (got if received else sent).setdefault(ends, []).append(spans)
        assert sent == got
        crossed += sum(map(len, sent.values()))
    assert crossed > 100


def test_all_positions_but_the_last_run_once_in_the_job() -> None:
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


def agreeing(a: Pairs, b: Pairs) -> int:
    """Positions that two rollouts have in common before their last ones."""
    num = min(len(a), len(b)) - 1
    same = (a.codes(0, num) == b.codes(0, num)).all(axis=1)
    return num if same.all() else int(same.argmin())


@pytest.mark.parametrize("multiple", [1, 3])
@pytest.mark.parametrize("block", [1, 4, 8])
def test_what_is_common_ends_at_a_block_or_with_the_beginning(block: int, multiple: int) -> None:
    options = TreeOptions(min_gain=0, share="batch", multiple=multiple)
    parts = -(-block // multiple) * multiple
    whole = part = 0
    for seed in range(30):
        ranks = dealt(seed, 3)
        told = [beginnings_of(rank, options, block) for rank in ranks]
        for place, (_, numbers) in enumerate(told):
            common = common_spans([mine for mine, _ in told], place, options)
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


def test_ranks_send_no_tokens_and_little() -> None:
    draw = np.random.default_rng(1)
    tokens = draw.integers(0, 1000, 4001)
    rollout = Pairs(tokens[:-1], tokens[1:], np.arange(4000) >= 3999)
    told, numbers = beginnings_of([rollout] * 5, TreeOptions())
    assert numbers == [0] * 5 and told.lengths.tolist() == [3999]
    assert len(pickle.dumps(told)) < 2.2 * 3999
    # Another token far down: digests agree up to its block, and nowhere behind it.
    inputs = np.where(np.arange(4000) == 2000, -1, rollout.inputs)
    other, _ = beginnings_of([replace(rollout, inputs=inputs)], TreeOptions())
    same = (told.digests == other.digests).all(axis=1)
    assert same[: 2000 // BLOCK].all() and not same[2000 // BLOCK :].any()


@pytest.mark.parametrize("first", [(20, 8), (8, 20)])
def test_copies_of_a_rollout_may_be_trained_from_two_places(first: tuple[int, int]) -> None:
    """A span carries loss from the first of them on, whichever copy comes last: ranks that think
    otherwise of it wait for each other's final states for ever."""
    options = TreeOptions(min_gain=0, share="batch")
    tokens = np.arange(31)
    rollouts = [Pairs(tokens[:-1], tokens[1:], np.arange(30) >= begin) for begin in first]
    ranks = [rollouts, [replace(rollouts[0], trained=np.arange(30) >= 20)]]
    told = [beginnings_of(rank, options, block=1) for rank in ranks]
    assert told[0][1] == [0, 0] and told[0][0].first_trained.tolist() == [8]
    spans = common_spans([mine for mine, _ in told], 0, options).spans
    assert [(one.end, one.scored) for one in spans] == [(8, False), (29, True)]
    forests, owners = forests_of(ranks, options)
    assert any(one.scored for one in forests[1].segments)
    judged(forests, owners)


def test_routes_are_part_of_a_beginning() -> None:
    options = TreeOptions(min_gain=0, share="batch")
    tokens, trained = np.arange(11), np.arange(10) >= 8
    routes = np.zeros((10, 2, 2), np.int16)
    other = routes.copy()
    other[5] = 1
    rollouts = [Pairs(tokens[:-1], tokens[1:], trained, one) for one in (routes, other)]
    told = [beginnings_of([one], options, 1)[0] for one in rollouts]
    assert [span.end for span in common_spans(told, 0, options).spans] == [5]
    none = replace(rollouts[0], trained=trained | True)  # a beginning without a position
    before = replace(options, loss_in_leaves=True)
    assert beginnings_of([none], before)[0].digests.shape == (0, 2)


def test_common_spans_are_no_longer_than_a_chunk() -> None:
    options = TreeOptions(min_gain=0, share="batch", chunk_tokens=12)
    for seed in range(40):
        forests, owners = forests_of(dealt(seed, 3), options)
        spans = [s for one in forests for segment in one.segments for s in segment.spans]
        assert max(span.length for span in spans) <= 12
        judged(forests, owners)


def test_a_rank_without_rollouts_has_no_segments() -> None:
    options = TreeOptions(min_gain=0, share="batch")
    forests, owners = forests_of([*dealt(1, 2), []], options)
    assert forests[2].segments == ()
    judged(forests, owners)


def test_owners_even_out_what_ranks_compute() -> None:
    draw = random.Random(3)
    options = TreeOptions(share="batch")
    ranks: list[list[Pairs]] = [[], []]
    for _ in range(8):
        prompt = [draw.randrange(1000) for _ in range(300)]
        for rank in ranks:
            tokens = np.array(prompt + [draw.randrange(1000) for _ in range(20)])
            trained = np.arange(len(tokens) - 1) >= 299
            rank.append(Pairs(tokens[:-1], tokens[1:], trained))
    forests, _ = forests_of(ranks, options)
    executed = [forest.executed_tokens for forest in forests]
    assert sum(executed) == 8 * 299 + 16 * 20
    assert max(executed) == min(executed)
    assert [forest.received_tokens for forest in forests] == [4 * 299] * 2
    # Prompts carry no loss: no final states cross.
    assert not any(one.scored for forest in forests for one in forest.segments if one.inner)


def test_segments_that_save_too_little_are_not_common() -> None:
    """Answers begin alike; that is worth no segment of its own, and what follows is with it."""
    draw = np.random.default_rng(2)
    prompt, begin = draw.integers(0, 1000, 400), draw.integers(0, 1000, 40)
    ranks: list[list[Pairs]] = [[], []]
    for rank in ranks:
        for _ in range(2):
            tokens = np.concatenate([prompt, begin, draw.integers(0, 1000, 60)])
            rank.append(Pairs(tokens[:-1], tokens[1:], np.arange(499) >= 399))
    for segment_gain, ends in ((0, [399, 439]), (50, [399])):
        options = TreeOptions(share="batch", min_gain=20, segment_gain=segment_gain)
        told = [beginnings_of(rank, options, block=1)[0] for rank in ranks]
        found = common_spans(told, 0, options).spans
        assert [one.end for one in found] == ends
        assert [one.scored for one in found] == [False, True][: len(ends)]


def test_spans_with_loss_are_in_segments_of_their_own() -> None:
    """Final states of the others need not cross."""
    options = TreeOptions(min_gain=0, share="batch")
    kinds = set()
    for seed in range(30):
        told = [beginnings_of(rank, options, block=1)[0] for rank in dealt(seed, 3)]
        common = common_spans(told, 0, options)
        for segment in common.segments:
            [scored] = {common.spans[number].scored for number in segment.spans}
            kinds.add(scored)
    assert kinds == {False, True}


def loads_of(
    ranks: list[list[Pairs]], options: TreeOptions
) -> tuple[list[int], list[int], list[tuple[int, int, CommonSpan]]]:
    """What ranks compute for themselves alone and with what they own, and every span's owner."""
    told = [beginnings_of(rank, options, block=1) for rank in ranks]
    load = []
    for place, rank in enumerate(ranks):
        common = common_spans([mine for mine, _ in told], place, options)
        load.append(find_below(rank, options, told[place][1], common).forest().executed_tokens)
    owned = [(one.owner, n, common.spans[n]) for one in common.segments for n in one.spans]
    own = [*load]
    for owner, _, span in owned:
        own[owner] -= span.end - span.start
    return own, load, owned


@pytest.mark.parametrize(("num_ranks", "chunk_tokens"), [(4, 0), (8, 64), (16, 0)])
def test_no_rank_has_much_more_but_for_what_is_its_own(num_ranks: int, chunk_tokens: int) -> None:
    options = TreeOptions(share="batch", chunk_tokens=chunk_tokens, min_gain=0)
    moved, rounds = 0, 48 // num_ranks
    for seed in range(rounds):
        draw = np.random.default_rng(seed)
        ranks: list[list[Pairs]] = [[] for _ in range(num_ranks)]
        for _ in range(4 * num_ranks):
            prompt = draw.integers(0, 1000, draw.integers(50, 500))
            for rank in draw.integers(0, num_ranks, draw.integers(2, 9)):
                tokens = np.concatenate([prompt, draw.integers(0, 1000, draw.integers(5, 80))])
                trained = np.arange(len(tokens) - 1) >= len(prompt) - 1
                ranks[rank].append(Pairs(tokens[:-1], tokens[1:], trained))
        own, load, owned = loads_of(ranks, options)
        longest = max(span.end - span.start for *_, span in owned)
        assert max(load) <= max(*own, 1.05 * sum(load) / num_ranks + longest)
        # The busiest rank would help nobody by giving a span away (features/across/owners.py).
        most = max(load)
        for owner, _, span in owned if most > EVEN * sum(load) / num_ranks else ():
            if load[owner] == most:
                length = span.end - span.start
                assert most <= min(load[other] for other in span.ranks) + length
        moved += len(owned)
    assert moved > 3 * rounds * num_ranks


def test_ranks_run_backwards_of_shared_prompts_side_by_side() -> None:
    """No rank waits until another has run those of the prompts that it owns."""
    draw = np.random.default_rng(5)
    ranks: list[list[Pairs]] = [[] for _ in range(4)]
    system = draw.integers(0, 1000, 50)
    for _ in range(12):
        prompt = np.concatenate([system, draw.integers(0, 1000, 300)])
        for rank in ranks:
            tokens = np.concatenate([prompt, draw.integers(0, 1000, 20)])
            rank.append(Pairs(tokens[:-1], tokens[1:], np.arange(369) >= 349))
    options = TreeOptions(share="batch", segment_tokens=400)
    found = judged(*forests_of(ranks, options))
    assert max(found.busy) < 1.1 * min(found.busy)
    # But for the system prompt, whose owner is waited for before all others and after them.
    assert max(found.waiting) < 0.1 * max(found.busy)
