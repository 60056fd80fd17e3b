"""Embeddings and positions as tokens, as inputs of segments, and their gradients, on one rank."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from megatron_prefix.errors import CannotShare
from megatron_prefix.features.mtp.given import beside_embeddings, with_tokens
from megatron_prefix.features.vision.call_rows import DEEPSTACK, MASK
from megatron_prefix.features.vision.chunk_rows import ChunkRows, chunk_rows
from megatron_prefix.features.vision.fingerprints import ROWS, combined, fingerprints
from megatron_prefix.run.calls import EMBEDDINGS, Callbacks, ModelCall, bound
from megatron_prefix.run.read.read_calls import read_tokens
from megatron_prefix.tree import Pairs, cp_layout

ONE = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
WIDTH = 3


def rank(mrope=True):
    model = nn.Module()
    model.config = SimpleNamespace()
    model.position_embedding_type = "mrope" if mrope else "rope"
    return SimpleNamespace(
        language_models=[model], groups=SimpleNamespace(cp=ONE, tp=ONE), device=torch.device("cpu"),
        model=SimpleNamespace(sequence_ranks=1),
    )  # fmt: skip


def call(number, seed=0, num=6, images=(2, 3), **changed):
    """A call of one sample; its rows are those of every call of the same seed."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(num, 1, WIDTH, generator=draw, requires_grad=True)
    deep = [torch.randn(len(images), WIDTH, generator=draw, requires_grad=True) for _ in range(2)]
    mask = torch.zeros(1, num, dtype=torch.bool)
    mask[0, list(images)] = True
    ids = torch.arange(num).expand(3, 1, num).clone()
    known = {EMBEDDINGS: rows, MASK: mask, DEEPSTACK: deep, "position_ids": ids}
    return ModelCall(number, known | changed)


def codes(*calls, num=6):
    found = ChunkRows(calls, rank(), 0).codes([num] * len(calls), None)
    assert found.dtype == np.int64 and (found >= 0).all()
    return found.reshape(len(calls), num).tolist()


def test_equal_rows_have_equal_codes():
    one, other, third = codes(call(0), call(1), call(2, seed=1))
    assert one == other and len({*one}) == 6
    assert not {*one} & {*third}
    text = call(1, **{MASK: None, DEEPSTACK: None})  # the same beside images and without any
    one, other = codes(call(0), text)
    assert (np.array(one) == other).tolist() == [True, True, False, False, True, True]


@pytest.mark.parametrize("what", ["row", "position", "deep", "mask", "none"])
def test_what_tells_rows_apart(what):
    """One row of the second call, the one of the first image, and no other."""
    changed = call(1)
    with torch.no_grad():
        if what == "row":
            changed[EMBEDDINGS][2, 0, 1] = torch.nextafter(
                changed[EMBEDDINGS][2, 0, 1], torch.tensor(9.0)
            )
        elif what == "position":
            changed["position_ids"][2, 0, 2] += 1
        elif what == "deep":
            changed[DEEPSTACK][1][0, 2] += 1e-6
        elif what == "mask":  # another row is the image, with the same deepstack row
            changed = call(1, images=(2, 4))
    one, other = codes(call(0), changed)
    different = [place for place in range(6) if one[place] != other[place]]
    assert different == {"none": [], "mask": [3, 4]}.get(what, [2])


def test_tokens_with_positions_of_their_own():
    assert chunk_rows([], rank(), 0) is None
    text = [ModelCall(0, {"input_ids": torch.zeros(1, 4)})]
    assert chunk_rows(text, rank(mrope=False), 0) is None
    with pytest.raises(CannotShare, match="the model looks at positions"):
        chunk_rows(text, rank(), 0)
    ids = torch.arange(4).expand(3, 1, 4)
    calls = [ModelCall(n, {"position_ids": one}) for n, one in enumerate([ids, ids, ids + 1])]
    tokens = np.array([7, 8, 7, 9] * 3)
    made = chunk_rows(calls, rank(), 0)
    found = made.codes([4, 4, 4], tokens).reshape(3, 4)
    assert (found[0] == found[1]).all() and (found[0] != found[2]).all()
    assert len({*found[0].tolist()}) == 4  # the same token at two places
    made.prepare(step([(0, 0, 4, 4)], [4, 4, 4]))
    arguments = made.arguments(0)
    assert arguments["input_ids"].tolist() == [[7, 8, 7, 9]]
    assert arguments["position_ids"].tolist() == [[[0, 1, 2, 3]]] * 3


def test_tokens_beside_embeddings():
    """Layers of multi-token prediction read them: equal rows of other tokens are others."""
    ids = torch.tensor([[7, 8, 63, 63, 9, 9]])
    calls = [call(0, input_ids=ids), call(1, input_ids=ids + (ids == 8))]
    tokens = beside_embeddings(calls, 1)
    assert tokens.tolist() == [7, 8, 63, 63, 9, 9, 7, 9, 63, 63, 9, 9]
    one, other = ChunkRows(calls, rank(), 0).codes([6, 6], tokens).reshape(2, 6)
    assert (one != other).tolist() == [False, True, *[False] * 4]
    samples = [Pairs(np.arange(6), np.arange(6), np.ones(6, bool)) for _ in calls]
    first, last = with_tokens(samples, tokens, labelled=False)
    assert first.inputs.tolist() == [*ids[0]] and last.labels.tolist()[:5] == [9, 63, 63, 9, 9]
    assert beside_embeddings([ModelCall(0, {"input_ids": ids})], 1) is None
    for changed in (None, ids[:, :4], ids.view(2, 3)):
        with pytest.raises(CannotShare, match="embeddings without input_ids of the same pos"):
            beside_embeddings([calls[0], call(1, input_ids=changed)], 1)


def step(spans, lengths):
    """One with a segment of spans (rollout, start, length, padded)."""
    made = [
        SimpleNamespace(rollouts=(r,) if r >= 0 else (), start=s, length=n, padded=p)
        for r, s, n, p in spans
    ]
    forest = SimpleNamespace(num_positions=lengths, segments=[SimpleNamespace(spans=made)])
    owners = [*range(len(lengths))]
    return SimpleNamespace(forest=forest, microbatch_of=owners, packed=[False] * len(owners))


def segment_of(calls, spans):
    made = ChunkRows(calls, rank(), 0)
    made.codes([6] * len(calls), None)
    made.prepare(step(spans, [6] * len(calls)))
    return made, made.arguments(0)


def test_a_segment_has_rows_of_its_spans():
    calls = [call(0), call(1, seed=1)]
    _, found = segment_of(calls, [(0, 1, 3, 4), (1, 0, 3, 3), (-1, 0, 0, 2)])
    first, second = calls[0][EMBEDDINGS][:, 0], calls[1][EMBEDDINGS][:, 0]
    wanted = torch.cat([first[1:4], first[3:4], second[:3], first[:1], first[:1]])
    assert torch.equal(found[EMBEDDINGS][:, 0], wanted) and found["input_ids"] is None
    assert found[MASK].tolist() == [[False, True, True, True, False, False, True, False, False]]
    one, other = (one[DEEPSTACK][1] for one in calls)
    assert torch.equal(found[DEEPSTACK][1], torch.stack([one[0], one[1], one[1], other[0]]))


def test_gradients_go_to_the_copies_that_rows_were_taken_from():
    calls = [call(0), call(1, seed=1), call(2)]
    made, found = segment_of(calls, [(0, 1, 3, 4), (1, 0, 3, 3), (-1, 0, 0, 2)])
    leaves = [found[EMBEDDINGS], *found[DEEPSTACK]]
    (leaves[0] * torch.arange(1.0, 10.0)[:, None, None]).sum().backward()
    (leaves[2] * torch.arange(1.0, 5.0)[:, None]).sum().backward()
    made.collect(0)
    made.backward()
    rows = [None if (g := one[EMBEDDINGS].grad) is None else g[:, 0, 0].tolist() for one in calls]
    assert rows == [[0, 1, 2, 3, 0, 0], [5, 6, 7, 0, 0, 0], None]  # padding and fillers have none
    deep = [None if (g := one[DEEPSTACK][1].grad) is None else g[:, 0].tolist() for one in calls]
    assert deep == [[1, 2], [4, 0], None]
    assert calls[0][DEEPSTACK][0].grad.abs().sum() == 0


def test_gradients_of_segments_come_together_in_the_last_attempt():
    calls, spans = [call(0)], [[(0, 0, 4, 4)], [(0, 4, 2, 2)]]
    made, found = segment_of(calls, [(0, 0, 6, 6)])
    found[EMBEDDINGS].sum().backward()
    made.collect(0)
    both = [step(one, [6]).forest.segments[0] for one in spans]
    again = SimpleNamespace(num_positions=[6], segments=both)
    for backwards in (0, 2):
        made.prepare(SimpleNamespace(forest=again, microbatch_of=[0]))
        for index in range(backwards):
            found = made.arguments(index)
            (found[EMBEDDINGS].sum() * (2 + index)).backward()
            made.collect(index)
        made.backward()
        assert backwards or calls[0][EMBEDDINGS].grad is None
    assert calls[0][EMBEDDINGS].grad[:, 0, 0].tolist() == [2, 2, 2, 2, 3, 3]


def test_positions_may_be_fractions():
    ids = torch.arange(6).expand(3, 1, 6) * 0.25
    one, other = codes(call(0, position_ids=ids), call(1, position_ids=ids + 0.125))
    assert not {*one} & {*other} and len({*one}) == 6
    _, found = segment_of([call(0, position_ids=ids)], [(0, 1, 3, 3)])
    assert found["position_ids"].tolist() == [[[0.25, 0.5, 0.75]]] * 3


@pytest.mark.parametrize("is_first", [True, False])
def test_one_row_of_positions_may_be_for_all_samples_of_a_call(is_first):
    """Not on a stage whose calls do not say how many samples they have, if it is that of a pack."""
    shared, packed = torch.arange(4).expand(3, 1, 4), torch.arange(8).expand(3, 1, 8)
    given = {EMBEDDINGS: torch.randn(4, 2, WIDTH)} if is_first else {}
    further = {EMBEDDINGS: torch.randn(8, 1, WIDTH)} if is_first else {}
    calls = [
        ModelCall(0, {"position_ids": shared} | given),
        ModelCall(1, {"position_ids": packed} | further),
    ]
    made = ChunkRows(calls, rank(), 0)
    if is_first:
        made.codes([4] * 4, None)
    one = step([(1, 1, 3, 3), (3, 2, 2, 2)], [4] * 4)
    one.microbatch_of, one.packed = [0, 0, 1, 1], [False, True]
    made.prepare(one)
    assert made.arguments(0)["position_ids"].tolist() == [[[1, 2, 3, 6, 7]]] * 3


def test_slices_of_a_packs_positions_are_put_together(monkeypatch):
    """A slice may be shorter than the pack's longest sample."""
    whole, first = torch.cat([torch.arange(12), torch.arange(4)]), rank()
    parts = [whole[cp_layout.held_positions([12, 4], part, 2)].expand(3, -1) for part in range(2)]
    monkeypatch.setattr(f"{ChunkRows.__module__}.gathered", lambda *_: torch.cat(parts, 1).T)
    first.groups.cp = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    made = ChunkRows([ModelCall(0, {"position_ids": parts[0][:, None]})], first, 0)
    one = step([(0, 0, 12, 12)], [12, 4])
    one.microbatch_of, one.packed = [0, 0], [True]
    made.prepare(one)
    found = made.arguments(0)["position_ids"][0, 0].tolist()
    assert found == [0, 1, 2, *[0] * 6, 9, 10, 11]  # of this rank's slice


@pytest.mark.parametrize("size", [1, 2])
def test_the_first_row_of_positions_where_ranks_have_their_own(size):
    ids = torch.arange(6) + 10 * torch.arange(3)[:, None, None]
    every = [call(0, position_ids=ids).arguments, call(1).arguments]
    signature = inspect.signature(lambda **_: None)
    calls = [bound(signature, (), {**one}, number) for number, one in enumerate(every)]
    known = read_tokens(calls, size, Callbacks())
    found = None if known.positions is None else known.positions.tolist()
    assert found == {1: None, 2: [*range(6), *range(6)]}[size]  # alone nobody looks at them


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_equal_rows_have_equal_numbers_and_others_do_not(dtype):
    rows = torch.randn(ROWS + 7, 3, 16, generator=torch.Generator().manual_seed(0)) * 100
    rows = rows.to(dtype)
    found = fingerprints(rows)
    assert found.shape == rows.shape[:-1] and found.dtype == torch.int64
    assert torch.equal(found, fingerprints(rows.clone()))
    assert len(found.unique()) == len(rows.flatten(0, 1).unique(dim=0))
    assert torch.equal(found[5:9], fingerprints(rows[5:9]))  # whatever they are looked at with


def test_one_bit_is_enough_and_places_and_signs_count():
    row = torch.zeros(1, 8, dtype=torch.int64)
    others = torch.cat([torch.eye(8, dtype=torch.int64) << bit for bit in range(63)])
    every = torch.cat([row, others, ~others, -others])
    assert len(fingerprints(every).unique()) == len(every.unique(dim=0))
    row = torch.tensor([[1.0, 2.0, 3.0], [2.0, 1.0, 3.0], [3.0, 2.0, 1.0]])
    fractions = torch.tensor([0.0, -0.0, 0.125, 0.25, -0.125, 1.25])[:, None]
    for rows in (row, fractions.double(), fractions, fractions.bfloat16()):
        assert len(fingerprints(rows).unique()) == len(rows)
    numbers = torch.cat([torch.arange(-50, 50), torch.tensor([2**62, -(2**62), 2**63 - 1])])
    one, other = torch.cartesian_prod(numbers, numbers).unbind(1)
    assert len(combined(one, other).unique()) == len(numbers) ** 2  # pairs in their order
