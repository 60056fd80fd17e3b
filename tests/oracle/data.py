"""Rollouts, microbatches of them in a trainer's form, and how an iterator hands them out."""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from tests.cases import LAYOUTS
from tests.oracle.case import Case

VOCAB = 64
RANKS = 10
"""More than there are."""
STATIC = {"packing": ("ends", "ends_padded"), "masks": ("attention_mask", "padding_mask")}
STATIC |= {name: (name,) for name in ("tokens", "labels", "loss_mask", "weight")}
"""Which fields of a batch are written over, by the value of the axis `static`."""


class Sample(NamedTuple):
    """tokens [n + 1]; trained [n], of the positions that predict."""

    tokens: np.ndarray
    trained: np.ndarray


def rollouts(case: Case, part: int) -> list[list[Sample]]:
    """Samples by microbatch; `part` is RANKS times the call's number plus the data-parallel rank.

    Ranks have equally many microbatches, as the stock schedule wants it with experts.
    """
    rng = random.Random(f"{case.seed} {case.tree} {part // RANKS}")
    draw = np.random.default_rng([case.seed, part])
    if case.tree == "lengths":
        return _microbatches(case, of_all_lengths(draw))
    if case.tree in ("random", "dealt"):
        return _random(case, part)
    size = 1 if case.form == "one" else rng.choice((2, 2, 3))
    number = _turns(case, rng.choice((2, 3, 4)) if size > 1 else rng.choice((3, 4, 5)))
    equal = case.lengths == "equal"
    rng = random.Random(f"{case.seed} {case.tree} {part} of this rank")
    prompts = [draw.integers(0, VOCAB, 12 if equal else rng.randint(6, 20)) for _ in range(2)]
    is_last = part % RANKS == LAYOUTS[case.layout].dp - 1
    is_idle = case.tree == "idle" and is_last  # has rollouts of its own and trains on none
    if case.tree == "on_all_ranks" or (case.tree == "idle" and not is_idle):
        both = np.random.default_rng([case.seed, part // RANKS, RANKS])
        prompts = [both.integers(0, VOCAB, 14) for _ in range(2)]
    turns = [draw.integers(0, VOCAB, 4) for _ in range(2)]
    answers = [draw.integers(0, VOCAB, 6) for _ in range(2)]
    found = []
    for index in range(size * number):
        group = index * 2 // (size * number)
        prompt = prompts[group]
        answer = draw.integers(0, VOCAB, 6 if equal else rng.randint(2, 9))
        if case.packed and case.batch.startswith("static") and index % size < 2:
            # Packs of one length that are cut in other places, so that cu_seqlens differ.
            longer = (1 + index // size % 2) * (1 if index % size else -1)
            answer = draw.integers(0, VOCAB, 6 + longer if size > 1 else 6)
        if case.tree == "turns":
            answer = np.concatenate([turns[index % 2], answer[4:] if equal else answer[:-1]])
        elif case.tree == "copies" and index % 2:
            answer = np.concatenate([answers[group], answer])[: len(answer)]
        elif case.tree == "unshared" or (case.tree == "unlike" and is_last):
            prompt = draw.integers(0, VOCAB, len(prompt))
        tokens = np.concatenate([prompt, answer])
        trained = np.arange(len(tokens) - 1) >= len(prompt) - 1 + is_idle * len(tokens)
        found.append(Sample(tokens, trained))
    if case.tree == "shuffled":
        rng.shuffle(found)
    return [found[i : i + size] for i in range(0, len(found), size)]


def _turns(case: Case, number: int) -> int:
    """So many microbatches, and as many more as virtual stages take turns with."""
    layout = LAYOUTS[case.layout]
    return number if layout.vpp == 1 else -(-number // layout.pp) * layout.pp


def of_all_lengths(draw: np.random.Generator) -> list[Sample]:
    """Three groups: a tree with loss in the middle, short spans, and one alone. Below the first
    prompt are two turns, so a depth-first walk uses the rows of the first again."""

    def tokens(length: int) -> np.ndarray:
        return draw.integers(0, VOCAB - 4, length)

    prompt, turn, other, short = map(tokens, (26, 7, 4, 3))
    ends = ((turn, 4), (turn, 9), (other, 5), (other, 3), (turn[:0], 16))
    parts = [
        *(([prompt, middle, tokens(end)], 25) for middle, end in ends),
        *(([short, tokens(end)], 2) for end in (1, 4)),
        ([tokens(9)], 4),
    ]
    wholes = [(np.concatenate(pieces), first) for pieces, first in parts]
    return [Sample(whole, np.arange(len(whole) - 1) >= first) for whole, first in wholes]


def _random(case: Case, part: int) -> list[list[Sample]]:
    """Trees of a seed: prompts, turns that some answers share, copies, answers that begin others,
    loss from anywhere on or nowhere. If they are dealt, ranks have shuffled parts of one batch."""
    layout, is_dealt = LAYOUTS[case.layout], case.tree == "dealt"
    both = random.Random(f"{case.seed} {part // RANKS}")
    number = both.choice((2, 4)) if layout.vpp > 1 else both.choice((2, 3, 4))
    number *= layout.pp if layout.vpp > 1 else 1
    rng = both if is_dealt else random.Random(f"{case.seed} {part}")
    sizes = [1 if case.form == "one" else rng.randint(1, 3) for _ in range(number)]
    if case.form == "rows":
        sizes = [2] * number  # the stock schedule wants equal numbers
    num = sum(sizes) * (layout.dp if is_dealt else 1)
    samples = _grown(rng, num, 0.0 if "mtp" in case.model else 0.1)  # its log divides by zero
    rng.shuffle(samples)
    own = samples[part % RANKS :: layout.dp] if is_dealt else samples
    ends = np.cumsum([0, *sizes])
    return [own[begin:end] for begin, end in itertools.pairwise(ends)]


def _grown(rng: random.Random, num: int, without_loss: float) -> list[Sample]:
    draw = np.random.default_rng(rng.randrange(1 << 30))
    samples: list[Sample] = []
    while len(samples) < num:
        prompt = draw.integers(0, VOCAB, rng.randint(1, 30))
        turn = draw.integers(0, VOCAB, rng.randint(1, 12))
        for _ in range(rng.randint(1, 6)):
            shared = turn[: rng.randint(0, len(turn))]
            whole = np.concatenate([prompt, shared, draw.integers(0, VOCAB, rng.randint(1, 12))])
            kind = rng.random()
            if samples and kind < 0.15:
                whole = samples[-1].tokens  # a copy
            elif kind < 0.25 and len(whole) > 3:
                whole = whole[: rng.randint(2, len(whole) - 1)]  # it begins others
            first = rng.choice((len(prompt) - 1, len(prompt) - 1, 0, len(prompt) + 3))
            trained = np.arange(len(whole) - 1) >= min(first, len(whole) - 2)
            samples.append(Sample(whole, trained & (rng.random() > without_loss)))
    return samples[:num]


def _microbatches(case: Case, samples: Sequence[Sample]) -> list[list[Sample]]:
    """One sample a microbatch, or as many as give the layout's stages equal turns."""
    layout = LAYOUTS[case.layout]
    size = 1 if case.form == "one" else 3
    turn = layout.pp if layout.vpp > 1 else 1
    number = max(turn, len(samples) // size // turn * turn)
    return [samples[first::number] for first in range(number)]


def multiple(case: Case) -> int:
    """What the layout wants the length of every sample to be a multiple of."""
    return LAYOUTS[case.layout].alignment


def batches(case: Case, part: int, cp_rank: int, cp: int) -> list[dict[str, Any]]:
    """The microbatches of one call, each a dict of tensors, in the trainer's form."""
    return [
        _batch(case, samples, number, part, cp_rank, cp)
        for number, samples in enumerate(rollouts(case, part))
    ]


def _batch(case, samples, number, part, cp_rank, cp):
    true = [len(sample.trained) for sample in samples]
    step = {"thd_padded": 8, "thd_ends": 8, "thd_parts": 1}.get(case.form, multiple(case))
    goal = true if case.packed else [max(true)] * len(true)
    lengths = [-(-length // step) * step for length in goal]
    draw = np.random.default_rng([case.seed, part, number])
    columns: dict[str, list[np.ndarray]] = {}
    for index, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        n = len(sample.trained)
        fields = {
            "tokens": sample.tokens[:-1], "labels": sample.tokens[1:],
            "loss_mask": sample.trained.astype(np.float64), "real": np.ones(n, dtype=bool),
            "inner": np.arange(n) < n - 1, "last": np.arange(n) == n - 1,
            "position_ids": np.arange(length), "sample": np.full(length, index),
            "weight": draw.uniform(0.5, 1.5, length),
            "other": (sample.tokens[:-1] + sample.trained) % VOCAB,
            "code": _codes(sample.tokens[:-1], (number + index) % 3 == 0),
        }  # fmt: skip
        for name, values in fields.items():
            columns.setdefault(name, []).append(np.pad(values, (0, length - len(values))))
        _mask(case, columns["loss_mask"][-1][:n], index, number, draw)
    batch: dict[str, Any] = {"number": number}
    for name, rows in columns.items():
        if case.form == "thd_parts":  # a pack is cut, wherever its samples end
            pack = np.concatenate(rows)
            parts = [np.split(np.pad(pack, (0, -len(pack) % (4 * multiple(case)))), cp)[cp_rank]]
        else:
            parts = [row[held(len(row), cp_rank, cp)] for row in rows]
        whole = np.concatenate(parts)[None] if case.packed else np.stack(parts)
        batch[name] = torch.from_numpy(whole)
    ends = true if case.form == "thd_padded" else lengths  # padding is a part of samples
    batch["ends"], batch["ends_padded"] = (
        torch.tensor(np.cumsum([0, *one]), dtype=torch.int32) for one in (ends, lengths)
    )
    if case.form == "thd_parts" and (over := -sum(lengths) % (4 * multiple(case))):
        batch["ends"] = torch.cat([batch["ends"], batch["ends"][-1:] + over])
    batch["longest"] = max(lengths)
    batch |= _masks(case, batch)
    batch["routes"] = _routes(batch.pop("code"))
    return batch


def _mask(case: Case, mask: np.ndarray, index: int, number: int, draw: np.random.Generator) -> None:
    if case.loss_mask == "weighed":  # any numbers, which differ by rollout
        mask[:] = draw.uniform(0.5, 2, len(mask)) * (draw.random(len(mask)) > 0.3)
    elif case.loss_mask.startswith("tails"):  # ends without loss, as answers of tools
        mask[-2 - index % 2 :] = 0
        mask *= (index + number) % 3 != 0  # of some samples nothing is trained


def held(length: int, rank: int, ranks: int) -> np.ndarray:
    """Of 2 * ranks chunks of a sample the rank's from the front, and its from the back."""
    if ranks == 1:
        return np.arange(length)
    chunks = np.array_split(np.arange(length), 2 * ranks)
    return np.concatenate([chunks[rank], chunks[2 * ranks - 1 - rank]])


def _codes(tokens: np.ndarray, leaves: bool) -> np.ndarray:
    """A number of all tokens up to each; some samples leave the others in the middle."""
    codes = np.cumsum(tokens * 31 + 7) % 9973
    codes[11:] += leaves
    return codes


def _routes(codes: Tensor) -> Tensor:
    """[rows, positions, 2 layers, 2] of experts: positions follow their own tokens."""
    first = torch.stack([codes * layer % 8 for layer in (1, 2)], -1)
    return torch.stack([first, (first + 1 + codes[..., None] // 7 % 7) % 8], -1)


def _masks(case: Case, batch: dict[str, Any]) -> dict[str, Tensor | None]:
    """attention_mask (True hides in four dimensions, keeps in two) and padding_mask (True: pad)."""
    real = batch["real"]
    rows, length = real.shape
    hidden = torch.ones(length, length).triu(1).bool().expand(rows, 1, -1, -1).clone()
    found: dict[str, Tensor | None] = {"attention_mask": None, "padding_mask": None}
    if case.mask == "padding_mask":
        return found | {"padding_mask": ~real}
    if case.mask == "pad_2d":
        return found | {"attention_mask": real.clone()}
    if case.mask == "causal_cut":
        hidden |= ~real[:, None, None, :]
    elif case.mask == "future":  # prompts see themselves whole
        prompt = (batch["loss_mask"] == 0) & real
        hidden &= ~(prompt[:, None, :, None] & prompt[:, None, None, :])
    elif case.mask == "future_one" and batch["number"] == 1:
        hidden[-1, 0, 2, 4] = False
    return found if case.mask == "none" else found | {"attention_mask": hidden}


# How a trainer's iterator hands them out ----------------------------------------------------------

FIELDS = (
    "number tokens labels loss_mask real inner last position_ids sample weight other ends"
    " ends_padded longest attention_mask padding_mask routes"
).split()


class Slots:
    """A batch that has slots and no dict."""

    __slots__ = FIELDS


class Fields:
    """A batch with attributes."""


class Table:
    """What a TensorDict offers: items, keys, and no dict below."""

    def __init__(self, batch: dict[str, Any]) -> None:
        self._names, self._values = list(batch), list(batch.values())

    def __getitem__(self, name: str) -> Any:
        return self._values[self._names.index(name)]

    def keys(self) -> list[str]:
        return list(self._names)


class Pull:
    """No iterator: it has a method of its own (slime's DataIterator)."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    def get_next(self) -> Any:
        return next(self._items)


def get(item: Any, name: str) -> Any:
    """A field of whatever the iterator has handed out."""
    if isinstance(item, list):
        return item[FIELDS.index(name)]
    return item[name] if hasattr(item, "__getitem__") else getattr(item, name)


def iterator(case: Case, found: list[dict[str, Any]], reads: list[int]) -> Any:
    """The data iterator of a call; appends to `reads` what is drawn from it."""
    ends = len(found) - 1 if case.raises == "data_ends" else len(found)
    items = _counted(_items(case, found[:ends]), reads)
    if case.batch == "of tp rank 0" and parallel_state.get_tensor_model_parallel_rank():
        return None
    return Pull(items) if case.batch == "get_next" else items


def _counted(items: Iterator[Any], reads: list[int]) -> Iterator[Any]:
    for number, item in enumerate(items):
        reads.append(number)
        yield item


def _items(case: Case, found: list[dict[str, Any]]) -> Iterator[Any]:
    if case.batch.startswith("static"):
        yield from _static(case, found)
        return
    one: Any = {"list_refilled": [], "slots_refilled": Slots(), "object_refilled": Fields()}.get(
        case.batch, {}
    )
    for batch in found:
        if case.batch == "index":
            yield batch["number"]
        elif case.batch == "tensordict":
            yield Table(batch)
        elif case.batch == "dict_refilled":
            one.clear()
            one.update(batch)
            yield one
        elif case.batch == "list_refilled":
            one[:] = [batch[name] for name in FIELDS]
            yield one
        elif case.batch in ("slots_refilled", "object_refilled"):
            for name in FIELDS:
                setattr(one, name, batch[name])
            yield one
        else:
            yield dict(batch)


def _static(case: Case, found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Tensors that are made once and written over for every microbatch."""
    shapes = [{n: v.shape for n, v in b.items() if isinstance(v, Tensor)} for b in found]
    names = [n for n in shapes[0] if case.static == "all" or n in STATIC[case.static]]
    arrays = {name: found[0][name].numpy().copy() for name in names}
    of_numpy = case.batch == "static_numpy"
    buffers = {name: torch.from_numpy(arrays[name]) if of_numpy else found[0][name].clone()
               for name in names}  # fmt: skip
    for batch in found:
        for name, buffer in buffers.items():
            if of_numpy:
                arrays[name][...] = batch[name].numpy()
            elif case.batch == "static_data":
                buffer.data.copy_(batch[name])
            else:
                buffer.copy_(batch[name])
        yield {**batch, **buffers}
