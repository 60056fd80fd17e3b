"""Rollouts that share prefixes, for tests of trees and plans: no torch, no model."""

import itertools
import math
import pickle
from collections import defaultdict
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from megatron_prefix.features.plan_files.table import parse_action
from megatron_prefix.plan.actions import Action, Plan
from megatron_prefix.plan.planner import backward_order, loss_ready_after
from megatron_prefix.tree import Forest, Pairs, Place, Segment, TreeOptions, build
from megatron_prefix.tree.joining import joined_segments
from megatron_prefix.tree.nodes import Node, preorder
from megatron_prefix.tree.packing import Packing


def received(forest):
    """A rank's segments as another rank gets them."""
    forest.paths  # noqa: B018  # cached from now on
    got = pickle.loads(pickle.dumps(forest))  # noqa: S301
    assert "paths" not in vars(got)
    return got


def as_pairs(inputs, labels, trained):
    return Pairs(np.array(inputs), np.array(labels), np.array(trained, dtype=bool))


def flat_rollouts(prefix, suffix, num, num_groups):
    """`num_groups` flat groups: `prefix` shared positions, then `suffix` of each rollout's own."""
    rng = np.random.default_rng(0)
    rollouts, groups = [], []
    for group in range(num_groups):
        prompt = rng.integers(0, 100, prefix + 1)
        for rollout in range(num):
            answer = rng.integers(0, 100, suffix)
            answer[0] = 100 + rollout  # differs at once
            tokens = np.concatenate([prompt, answer])
            trained = np.arange(len(tokens) - 1) >= prefix
            rollouts.append(Pairs(tokens[:-1], tokens[1:], trained))
            groups.append(group)
    return rollouts, groups


@st.composite
def rollout_sets(draw):
    """Up to ten rollouts in up to three groups over tiny alphabets.

    Equal rollouts, proper prefixes of one another, groups of one and rollouts of a single position
    all come up; labels are those of the next position, or any (a trainer may relabel).
    """
    alphabet = draw(st.integers(1, 3))
    base = draw(st.lists(st.integers(0, alphabet), min_size=30, max_size=30))
    rollouts, groups = [], []
    for _ in range(draw(st.integers(1, 10))):
        kept = draw(st.integers(0, 30))
        tail = draw(st.lists(st.integers(0, alphabet), max_size=12))
        tokens = (base[:kept] + tail + [0, 1])[: draw(st.integers(2, 42))]
        labels = tokens[1:]
        if draw(st.integers(0, 4)) == 0:
            labels = [draw(st.integers(0, 1)) for _ in labels]
        begin = draw(st.integers(0, len(labels)))
        trained = [begin <= i and draw(st.booleans()) for i in range(len(labels))]
        rollouts.append(as_pairs(tokens[:-1], labels, trained))
        groups.append(draw(st.integers(0, 2)))
    if draw(st.booleans()):  # a copy, perhaps with other loss
        copy = rollouts[0]
        begin = draw(st.integers(0, len(copy)))
        rollouts.append(Pairs(copy.inputs, copy.labels, np.arange(len(copy)) >= begin))
        groups.append(groups[0])
    return rollouts, groups


def with_routes(rollouts, layers, experts, parts):
    """The rollouts with routes to two experts that come from position and pair.

    From its position in `parts` on, a rollout's are others than those of rollouts with the same
    pairs.
    """
    found = []
    for rollout, part in zip(rollouts, parts, strict=True):
        positions, layer = np.arange(len(rollout))[:, None], np.arange(layers)
        away = (positions >= part) & (layer == positions % layers)  # in one layer only
        first = rollout.inputs[:, None] + 3 * rollout.labels[:, None] + positions * (layer + 1)
        first = (first + away) % experts
        second = (first + 1 + positions % (experts - 1)) % experts
        found.append(replace(rollout, routes=np.stack([first, second], 2).astype(np.uint8)))
    return found


@st.composite
def tree_options(draw):
    align, cut = draw(st.sampled_from([1, 1, 2, 3, 4, 8, 16])), draw(st.sampled_from([1, 1, 3, 4]))
    begin = math.lcm(align, cut)
    return TreeOptions(
        multiple=align, cut=cut,
        chunk_tokens=draw(st.sampled_from([0, 0, begin, begin + 1, 3 * begin, 64])),
        segment_tokens=draw(st.sampled_from([0, 1, 8, 20, 64])),
        min_gain=draw(st.sampled_from([0, 0, 1, 5, 20])), loss_in_leaves=draw(st.booleans()),
        share=draw(st.sampled_from(["group", "batch"])),
    )  # fmt: skip


def exact(**changes):
    """Nothing dissolved, nothing cut."""
    return TreeOptions(**{"min_gain": 0, "segment_tokens": 0, **changes})


def trees_of(rollouts, groups, share):
    found = defaultdict(list)
    for rollout, group in zip(rollouts, groups, strict=True):
        found[group if share == "group" else 0].append(rollout)
    return list(found.values())


def is_prefix_tree(forest):
    """Every path runs through F-order from position 0 to the end, once through a segment."""
    for index, segment in enumerate(forest.segments):
        members = [rollout for span in segment.spans for rollout in span.rollouts]
        assert len(set(members)) == len(members)  # so no span is an ancestor of another
        parents = [span.parent for span in segment.spans]
        assert all(above is None or above.segment < index for above in parents)
    for rollout, path in enumerate(forest.paths):
        spans = [forest.segments[index].spans[number] for index, number in path]
        ends = [0, *(span.end for span in spans)]
        assert [span.start for span in spans] == ends[:-1]
        assert ends[-1] == forest.num_positions[rollout]
        assert all(span.length > 0 for span in spans)
        assert [span.parent for span in spans] == [None, *path[:-1]]


def ancestors(segments, place):
    found = []
    above = segments[place.segment].spans[place.number].parent
    while above is not None:
        found.append(above)
        above = segments[above.segment].spans[above.number].parent
    return found[::-1]


def trie_size(rollouts, align=1):
    """Positions of the trie of one tree, counted one by one; routes are a part of the pairs.

    A block of `align` positions is shared by those that agree up to its end; an incomplete last
    block only by copies of the whole rollout.
    """
    seen = set()
    for rollout in rollouts:
        pairs = tuple(zip(rollout.inputs.tolist(), rollout.labels.tolist(), strict=True))
        pairs = pairs[: rollout.num_needed]
        if rollout.routes is not None:
            routes = map(np.ndarray.tobytes, rollout.routes.astype(int))
            pairs = tuple(zip(pairs, routes, strict=False))
        for position in range(len(pairs)):
            end = (position // align + 1) * align
            seen.add((position, pairs[:end] if end <= len(pairs) else (pairs, "whole")))
    return len(seen)


def flat_forest(prefix=4, suffix=2, num=2, num_groups=1, **options):
    rollouts, groups = flat_rollouts(prefix, suffix, num, num_groups)
    given = {"min_gain": 0, "segment_tokens": suffix, **options}
    return build(rollouts, groups, TreeOptions(**given))


def random_forest(rng, depth=3, *, joined=False):
    """Segments of random trees, made without tokens: fast, for thousands of plans.

    Of few trees or of many, packed under a small or a large budget, or put together at random. Some
    inner spans carry loss, some are chains of chunks, and some rollouts end in them.

    `joined`: with everything that rollouts need in their segment, where there is room.
    """
    roots, first = random_trees(rng, depth)
    options = TreeOptions(segment_tokens=rng.choice((0, 1, 20, 60, 200, 1000)))
    alone = range(len(first))  # a microbatch each
    if joined and (found := joined_segments(roots, first, options, alone, 1000)):
        return Forest(tuple(found), _lengths(roots, len(first)), tuple(first))
    odd = rng.random() < 0.3
    packed = (
        put_together(rng, roots, first) if odd else Packing(roots, first, options, alone).segments
    )
    return Forest(tuple(packed), _lengths(roots, len(first)), tuple(first))


def random_trees(rng, depth=3):
    """Roots of one to twelve trees, and the first trained position of every rollout."""
    roots, num = [], 0
    for _ in range(rng.choice((1, 2, 3, 4, 12))):
        members = range(num, num + rng.randint(1, 8))
        num += len(members)
        roots += _random_nodes(rng, rng.randint(0, depth), 0, [*members])
    lengths = _lengths(roots, num)
    return roots, [rng.randrange(n) if rng.random() < 0.3 else n - 1 for n in lengths]


def _lengths(roots, num):
    lengths = [0] * num
    for node in preorder(roots):
        for member in node.members:
            lengths[member] = max(lengths[member], node.end)
    return tuple(lengths)


def _random_nodes(rng, level, start, members):
    """Nodes for these rollouts, with at most `level` others below them on a path."""
    if len(members) == 1 or level == 0:
        return [Node(start, start + _length(rng), [m]) for m in members]
    node = Node(start, start + _length(rng), [*members])
    for part in _parts(rng, node.members):
        node.children += _random_nodes(rng, level - 1, node.end, part)
    return [node]


def _length(rng):
    return rng.randint(1, rng.choice((4, 60)))


def _parts(rng, members):
    if rng.random() < 0.3:
        return [members]  # the next chunk of a chain
    cuts = sorted(rng.sample(range(1, len(members)), rng.randint(1, len(members) - 1)))
    parts = [members[a:b] for a, b in itertools.pairwise([0, *cuts, len(members)])]
    return parts[1:] if rng.random() < 0.1 else parts  # those of the first part end here


def put_together(rng, roots, first_trained):
    """Segments of trees in an order and in a company that no packing would choose."""
    paths = {id(root): () for root in roots}
    ready, segments = list(roots), []
    while ready:
        inner = bool(rng.choice(ready).children)
        alike = [node for node in ready if bool(node.children) == inner]
        nodes = rng.sample(alike, rng.randint(1, min(6, len(alike))))
        nodes.sort(key=lambda node: paths[id(node)])
        ready = [node for node in ready if not any(node is taken for taken in nodes)]
        spans = []
        for number, node in enumerate(nodes):
            path = paths[id(node)]
            spans.append(node.span(1, path[-1] if path else None))
            below = (*path, Place(len(segments), number))
            paths.update((id(child), below) for child in node.children)
            ready += node.children
        scored = any(first_trained[m] < span.end for span in spans for m in span.rollouts)
        segments.append(Segment(tuple(spans), inner, scored))
    return tuple(segments)


def ruled_plan(forest, num_ranks=1, *, run_ahead=2, microbatches=None):
    """The plan by a simple rule: the simulator is tested on it, the planner compared with it.

    Before its j-th backward stage s of p has run need(j) + run_ahead * (p - 1 - s) forwards.
    """
    order, ready_after = backward_order(forest.segments), loss_ready_after(forest, microbatches)
    programs = []
    for rank in range(num_ranks):
        program = []
        forwards = iter(range(len(ready_after)))
        need = run = 0
        for index in order:
            need = max(need, ready_after[index] + 1)
            more = max(0, need + run_ahead * (num_ranks - 1 - rank) - run)
            for forward in itertools.islice(forwards, more):
                program.append(Action("F", forward))
                run += 1
            program.append(Action("B", index))
        programs.append(tuple(program))
    return Plan(forest.segments, tuple(programs))


def interleaved(forest, num_ranks, num_chunks):
    """All forwards, then all backwards: a valid plan for virtual stages."""
    backwards = [a.segment for a in ruled_plan(forest).programs[0] if a.kind == "B"]
    program = [
        Action("F", i, chunk) for chunk in range(num_chunks) for i in range(len(forest.segments))
    ]
    program += [Action("B", i, chunk) for chunk in reversed(range(num_chunks)) for i in backwards]
    return Plan(forest.segments, (tuple(program),) * num_ranks, num_chunks)


def with_programs(plan, programs):
    """The plan's segments under other programs, written as their cells."""
    return Plan(
        plan.segments,
        tuple(tuple(map(parse_action, program)) for program in programs),
        plan.num_chunks,
    )


def cells(plan):
    return [[str(action) for action in program] for program in plan.programs]
