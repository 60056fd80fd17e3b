"""Rollouts -> prefix tree -> segments.  Pure: numpy only, neither torch nor megatron.

A *position* of a rollout is one (input token, label token) pair; a rollout of n tokens has n-1.
The tree is a trie over those pairs. The last prompt token, whose label differs by rollout, is
therefore in the branches. Construction: sort the rollouts, compare neighbours, build the tree in
one pass with a stack. Apart from the sort it is linear in tokens.

Prefix trees of rollouts: "AReaL-DTA", section 3. A flat group ("Schedule-Level Shared-Prefix Reuse
for LLM RL Training", section 2.1) is a tree of depth one. Where routers follow given routes, the
experts of a position belong to its pair.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_prefix.errors import UserError
from megatron_prefix.tree.forest import (
    LEAST_SHARE,
    Forest,
    Pairs,
    Segment,
    TreeOptions,
    any_trained,
    check_routes,
    codes_of,
)
from megatron_prefix.tree.joining import joined_segments, most_alive
from megatron_prefix.tree.nodes import Node, dissolved, equal_bounds, forks, joins_waves, preorder
from megatron_prefix.tree.packing import ExchangedSegment, MicrobatchRows, Packing

_KEY = operator.itemgetter(0)


@dataclass(frozen=True)
class Tries:
    """The prefix trees of a step, before chunks and waves are made.

    Building them reads every token; trying another chunk length afterwards is cheap.

    Attributes:
        exchanged: what crosses data-parallel ranks; None: nothing may.
    """

    trees: tuple[list[Node], ...]
    trained: tuple[np.ndarray, ...]
    first_trained: tuple[int, ...]
    options: TreeOptions
    unshared_by_routes: int = 0
    exchanged: tuple[ExchangedSegment, ...] | None = None

    @property
    def executed_tokens(self) -> int:
        """Positions that the prefix schedule computes; chunks do not change it."""
        return sum(node.end - node.start for roots in self.trees for node in preorder(roots))

    def forest(
        self,
        chunk_tokens: int | None = None,
        microbatch_of: Sequence[int] | None = None,
        rows: MicrobatchRows | None = None,
    ) -> Forest:
        """The segments.

        Args:
            chunk_tokens: longest chunk (default: the options').
            microbatch_of: the trainer's microbatch of each rollout (default: one rollout each).
            rows: positions by which ranks that share experts cut the same rounds.
        """
        options, first = self.options, self.first_trained
        num_positions = tuple(map(len, self.trained))
        owner = range(len(first)) if microbatch_of is None else microbatch_of
        if chunk_tokens is not None:
            options = replace(options, chunk_tokens=chunk_tokens)
        every = [root for tree in self.trees for root in tree]
        joins = bool(every) and rows is None and self.exchanged is None and options.joins
        options = replace(options, joins=joins)
        packed = self._packed(every, options, owner)
        if options.chunk_tokens or rows is not None:
            roots = _chunked(packed.roots, first, options)
            packed = Packing(roots, first, options, owner, self.exchanged or (), rows)
        joined: list[Segment] | None = None
        if joins:
            joined = self._joined(every, packed, owner)
        segments = packed.segments if joined is None else joined
        return Forest(
            tuple(segment._replace(trained=self._trained(segment)) for segment in segments),
            num_positions, first, options.multiple, unshared_by_routes=self.unshared_by_routes,
            exchanges=tuple(packed.exchanges), pad_multiple=options.pad_multiple,
            rounds=tuple(part.round for part in packed.nodes) if rows else (),
        )  # fmt: skip

    def _packed(self, roots: list[Node], options: TreeOptions, owner: Sequence[int]) -> Packing:
        """The cheaper packing: with and without spans inside the waves that read them. Trees in
        waves are not cut, so they may fill segments worse."""
        raw, first = sum(map(len, self.trained)), self.first_trained

        def pack(options: TreeOptions) -> Packing:
            nodes = _copied_nodes(roots)
            return _worthwhile_packing(nodes, first, options, owner, raw, self.exchanged or ())

        packed = pack(options)
        if not any(node.joins for node in forks(packed.roots)):
            return packed
        without_joins = pack(replace(options, joins=False))
        return min(packed, without_joins, key=lambda packing: _cost(packing.lengths, options))

    def _joined(
        self, roots: Sequence[Node], packed: Packing, owner: Sequence[int]
    ) -> list[Segment] | None:
        """Joined segments; None if there are none, or `packed` costs less."""
        options, first = self.options, self.first_trained
        # They may be a little longer where as many positions are alive at once in any case.
        slack = (
            options.segment_tokens // 8 if options.segment_tokens else sum(map(len, self.trained))
        )
        longest = min(most_alive(packed.lengths, packed.parents), options.segment_tokens + slack)
        longest = max(longest, options.segment_tokens)
        joined = joined_segments(roots, first, options, owner, longest)
        lengths = [segment.padded_length for segment in joined or ()]
        costs_more = _cost(lengths, options) > _cost(packed.lengths, options)
        return None if joined is None or costs_more else joined

    def _trained(self, segment: Segment) -> int:
        spans = [span for span in segment.spans if span.rollouts] if segment.scored else []
        flags = [any_trained(span, self.trained, self.first_trained) for span in spans]
        return int(np.count_nonzero(np.concatenate(flags))) if flags else 0


def _cost(lengths: Sequence[int], options: TreeOptions) -> tuple[int, int]:
    return sum(lengths) + options.segment_gain * len(lengths), len(lengths)


def build(
    rollouts: Sequence[Pairs],
    groups: Sequence[int] | None = None,
    options: TreeOptions | None = None,
    microbatch_of: Sequence[int] | None = None,
    rows: MicrobatchRows | None = None,
) -> Forest:
    """Makes the forest of a step; see `find_shared` and `Tries.forest` for arguments and errors."""
    return find_shared(rollouts, groups, options).forest(microbatch_of=microbatch_of, rows=rows)


def find_shared(
    rollouts: Sequence[Pairs],
    groups: Sequence[int] | None = None,
    options: TreeOptions | None = None,
) -> Tries:
    """Finds what the rollouts of a step share.

    Args:
        rollouts: the step's rollouts; indices into this sequence name them everywhere.
        groups: group number of each rollout (default: all in one group).

    Raises:
        UserError: a rollout without a position, `groups` of another length, or routes that do not
            fit (`forest.check_routes`).
    """
    options = options or TreeOptions()
    groups = [0] * len(rollouts) if groups is None else list(groups)
    if len(groups) != len(rollouts):
        raise UserError(f"{len(groups)} group numbers for {len(rollouts)} rollouts: give one each")
    for index, rollout in enumerate(rollouts):
        if not 0 < len(rollout.inputs) == len(rollout.labels) == len(rollout.trained):
            raise UserError(
                f"rollout {index}: {len(rollout)} inputs, {len(rollout.labels)} labels,"
                f" {len(rollout.trained)} loss flags: give equally many, at least one"
            )
    routed = any(rollout.routes is not None for rollout in rollouts)
    if routed:
        check_routes(rollouts)
    first = tuple([rollout.first_trained for rollout in rollouts])
    trees: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        trees.setdefault(group if options.share == "group" else 0, []).append(index)
    worth = tuple(worthwhile(rollouts, members, first, options) for members in trees.values())
    tries = Tries(worth, tuple(r.trained for r in rollouts), first, options)
    if not routed:
        return tries
    free = find_shared([replace(r, routes=None) for r in rollouts], groups, options)
    return replace(tries, unshared_by_routes=tries.executed_tokens - free.executed_tokens)


def worthwhile(
    rollouts: Sequence[Pairs],
    members: Sequence[int],
    first: Sequence[int],
    options: TreeOptions,
    start: int = 0,
) -> list[Node]:
    """The trees of some rollouts from position `start` on, of nodes that are worth their own span.

    Args:
        members: rollouts, which agree on the positions before `start`.
        first: first trained position of every rollout.
    """
    selected = [rollouts[m] for m in members]
    codes = zip(
        members,
        codes_of(selected, start, [rollout.num_needed for rollout in selected]),
        strict=True,
    )
    behind = {m: first[m] - start for m in members} if options.loss_in_leaves else {}
    roots = trie(dict(codes), options, behind, start)
    return dissolved(roots, lambda node: node.saved >= options.min_gain)


def trie(
    codes: Mapping[int, np.ndarray], options: TreeOptions, first: Mapping[int, int], start: int
) -> list[Node]:
    """The compressed trie of codes, with boundaries rounded down to multiples of `boundary`.

    Args:
        codes: `Pairs.codes` by rollout.
        first: per rollout the position from which only equal rollouts share; empty: no limit.
        start: the position at which the codes begin, a multiple of the boundary.
    """
    # Big-endian bytes sort like the codes, and sorting is faster than hashing.
    keys = sorted(((code.astype(">u8").tobytes(), m) for m, code in codes.items()), key=_KEY)
    ordered = [[m for _, m in copies] for _, copies in itertools.groupby(keys, _KEY)]
    # Equal rollouts have one node; with loss_in_leaves the earliest trained position counts.
    earliest = {copies[0]: min(first[m] for m in copies) for copies in ordered if first}
    top = Node(0, 0, [])
    stack = [top]
    for copies, shared in zip(ordered, _shared(codes, ordered, earliest, options), strict=True):
        rollout, lower = copies[0], None
        while stack[-1].end > shared:
            lower = stack.pop()
        if stack[-1].end < shared:
            if lower is None:
                raise RuntimeError("shared positions without a node below them")
            middle = Node(stack[-1].end, shared, [], [lower])
            stack[-1].children[-1] = middle
            lower.start = shared
            stack.append(middle)
        leaf = Node(shared, len(codes[rollout]), copies)
        stack[-1].children.append(leaf)
        stack.append(leaf)
    for node in preorder([top]) if start else ():
        node.start, node.end = node.start + start, node.end + start
    for node in reversed([*forks([top])]):  # whose children have no member twice
        node.members = sorted([*node.members, *(m for c in node.children for m in c.members)])
        node.children.sort(key=lambda child: child.members[0])
    return top.children


def _shared(
    codes: Mapping[int, np.ndarray],
    ordered: Sequence[Sequence[int]],
    first: Mapping[int, int],
    options: TreeOptions,
) -> Iterator[int]:
    """Per distinct rollout, in sorted order, the positions that it shares with its predecessor,
    rounded down to a boundary."""
    yield from [0] * bool(ordered)
    boundary = options.boundary
    for a, b in itertools.pairwise([copies[0] for copies in ordered]):
        before, after = codes[a], codes[b]
        num = min(len(before), len(after))
        differ = before[:num] != after[:num]
        place = int(differ.argmax()) if num else 0  # of [positions, columns] as they lie
        shared = place // differ.shape[1] if num and differ.item(place) else num
        yield (min(shared, first[a], first[b]) if first else shared) // boundary * boundary


def _worthwhile_packing(
    roots: list[Node],
    first: Sequence[int],
    options: TreeOptions,
    owner: Sequence[int],
    raw_tokens: int,
    exchanged: Sequence[ExchangedSegment],
) -> Packing:
    """A packing without inner segments that save too little: their nodes join the waves that read
    them, or are dissolved.

    The remaining nodes may fill their segments better, so only the weaker half of those segments
    goes before the rest is packed again. In a small step the bar is a share of the step.
    """
    least = min(options.segment_gain, raw_tokens // LEAST_SHARE)
    while True:
        packed = Packing(roots, first, options, owner, exchanged)
        every = ((sum(map(packed.saved, nodes)), nodes) for nodes in packed.inner)
        saved = sorted((pair for pair in every if pair[0] < least), key=_KEY)
        if not saved:
            return packed
        weak = {id(node) for _, nodes in saved[: -(-len(saved) // 2)] for node in nodes}
        for node in reversed([*forks(roots)]):
            if id(node) in weak and joins_waves(node, options):
                node.joins = True
                weak.discard(id(node))

        def stays(node: Node, weak: set[int] = weak) -> bool:
            """A node below a dissolved one is longer, and may no longer fit a wave."""
            return id(node) not in weak and (not node.joins or joins_waves(node, options))

        roots = dissolved(roots, stays)


def _copied_nodes(roots: list[Node]) -> list[Node]:
    top = Node(0, 0, [], roots)
    for node in forks([top]):
        node.children = [
            Node(child.start, child.end, child.members, child.children, child.common)
            for child in node.children
        ]
    return top.children


def _chunked(roots: Sequence[Node], first: Sequence[int], options: TreeOptions) -> Sequence[Node]:
    """Cuts every node longer than `chunk_tokens` into a chain of nearly equal chunks. Where lengths
    are evened, all but the last chunk have such a length already: no padding stands between them,
    and rows of the chain are one interval."""
    longest, step = options.rounded(options.chunk_tokens), options.boundary
    if not longest:
        return roots
    padded_step = math.lcm(step, options.even_step)
    if padded_step <= longest <= options.even:
        longest, step = longest // padded_step * padded_step, padded_step
    for node in preorder(roots):
        if node.common >= 0:
            continue
        # With loss_in_leaves only the part before the first trained position may be cut.
        end = node.end
        if options.loss_in_leaves:
            end = min(end, *(first[m] for m in node.members))
        end = end if end == node.end else node.start + (end - node.start) // step * step
        bounds = equal_bounds(node.start, end, longest, step)
        if end < node.end:
            bounds.append(node.end)
        tail, last = Node(bounds[-2], bounds[-1], node.members, node.children), node
        if len(bounds) == 2:
            continue
        node.end = bounds[1]
        for start, stop in itertools.pairwise(bounds[1:-1]):
            chunk = Node(start, stop, node.members)
            last.children, last = [chunk], chunk
        last.children = [tail]
    return roots
