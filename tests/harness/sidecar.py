"""Uses a sidecar as attention does in a whole step, without a model."""

from typing import NamedTuple

import torch

from megatron_prefix.sidecar.arena import Reading
from megatron_prefix.tree import Place, Segment, Span
from megatron_prefix.tree.payload_map import Form, payload_map

HEADS, DIM, VALUE_DIM, LAYERS = 2, 4, 3, 4


def forms(num_layers, recurrent=()):
    """Of layers with attention, and of recurrent ones."""
    return [Form.SPANS if n in recurrent else Form.POSITIONS for n in range(num_layers)]


class Step(NamedTuple):
    """Segments, and the order in which one rank runs them."""

    segments: tuple[Segment, ...]
    order: tuple[str, ...]

    def planned(self, parts=1, shares=None):
        """Where K/V lie in this order; rows of finished segments are used again."""
        program = [(action[0], int(action[1:])) for action in self.order]
        return payload_map(self.segments, program, parts, shares)


def segment(*spans, inner):
    """A segment of spans without padding; each is of a rollout of its own."""
    made = (
        Span(0, length, length, (number,), None if parent is None else Place(*parent))
        for number, (parent, length) in enumerate(spans)
    )
    return Segment(tuple(made), inner, not inner)


def tree(scale=1):
    """Three chunks, a branch below the second one in two chunks, and waves below all of them.

    The branch lies where the third chunk has been.
    """
    parents = (None, 0, 1, 1, 3, 2, 4, 3)
    lengths = (5, 4, 3, 6, 2, 3, 3, 2)
    made = (
        segment((None if above is None else (above, 0), length * scale), inner=number < 5)
        for number, (above, length) in enumerate(zip(parents, lengths, strict=True))
    )
    order = "F0 F1 F2 F5 B5 B2 F3 F7 B7 F4 F6 B6 B4 B3 B1 B0"
    return Step(tuple(made), tuple(order.split()))


def packed(scale=1):
    """Several trees in one segment: waves of several depths, keys side by side and apart.

    The prompt of segment 5 lies where that of segment 2 has been.
    """
    shapes = (
        ((None, 5), (None, 4)), (((0, 0), 3), ((0, 0), 2), ((0, 1), 4)), ((None, 3),),
        (((1, 0), 2), ((1, 1), 3), ((1, 1), 1), ((1, 2), 2), ((2, 0), 4), (None, 2)),
        (((0, 1), 3), ((1, 0), 2)), ((None, 7),),
        (((5, 0), 1), ((5, 0), 2), (None, 1), ((0, 0), 4)),
    )  # fmt: skip
    made = (
        segment(*((above, length * scale) for above, length in spans), inner=number in (0, 1, 2, 5))
        for number, spans in enumerate(shapes)
    )
    order = "F0 F1 F2 F3 B3 B2 F4 F5 F6 B6 B5 B4 B1 B0"
    return Step(tuple(made), tuple(order.split()))


STEPS = {"a tree": tree, "packed trees": packed}


def random(length, width, seed, device="cpu"):
    """[length, HEADS, width], fp64."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(length, HEADS, width, generator=generator, dtype=torch.float64)
    return made.to(device)


def visit(cache, one, index, layer, backward, device="cpu"):
    """One segment in one layer; returns all that it gets from the cache."""
    if cache.forms[layer] == Form.SPANS:
        return visit_states(cache, one, index, layer, backward, device)
    seen = []
    if one.inner and not backward:
        widths = (DIM, VALUE_DIM)
        key, value = (random(one.padded_length, w, 100 * layer + index, device) for w in widths)
        cache.capture(layer, index, (key, value))
        key.fill_(torch.nan), value.fill_(torch.nan)  # as Megatron frees storage
    if one.inner:
        seen += cache.own(layer, index)
    for ahead in (layer, layer - 1 if backward else layer + 1):
        cache.prefetch(ahead, index, backward=backward)
    for number in range(len(cache.map.levels[index])):
        level = cache.level(index, number)
        key, value = cache.read(layer, index, level)
        seen += [key, value]
        if backward:
            cache.add(layer, index, level, (2 * key, (index + 1) * value))
    if backward and one.inner:
        seen += cache.take(layer, index) or ()
    seen = [tensor.clone() for tensor in seen]
    cache.release(layer)
    return seen


def visit_states(cache, one, index, layer, backward, device):
    """The same in a recurrent layer; in a backward as if its forward ran again."""
    seen = []
    for ahead in (layer, layer - 1 if backward else layer + 1):
        cache.prefetch(ahead, index, backward=backward)
    if one.inner and not backward:
        num, widths = len(one.spans), (DIM, VALUE_DIM)
        state, tail = (random(num, w, 100 * layer + index, device) for w in widths)
        cache.capture(layer, index, (state, tail))
        state.fill_(torch.nan), tail.fill_(torch.nan)
    parents = cache.map.parents[index]
    if any(parents):
        state, tail = cache.read(layer, index, Reading(torch.tensor(parents, device=device)))
        seen += [state, tail]
    if backward and one.inner:
        seen += [part.clone() for part in cache.take(layer, index) or ()]
    if backward and any(parents):
        rows = sorted({*parents})
        first = [parents.index(row) for row in rows]
        both = (2 * state[first], (index + 1) * tail[first])
        cache.add(layer, index, Reading(torch.tensor(rows, device=device)), both)
    cache.release(layer)
    return seen


def step(cache, made, until="", device="cpu"):
    """Everything that a step's segments get from the cache, in order, up to an action."""
    found = []
    for action in made.order:
        if action == until:
            break
        index, backward = int(action[1:]), action[0] == "B"
        for layer in range(LAYERS)[:: -1 if backward else 1]:
            found += visit(cache, made.segments[index], index, layer, backward, device)
        if backward and made.segments[index].inner:
            cache.free(index, consumed=True)
    return found
