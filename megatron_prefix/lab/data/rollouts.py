"""The rollout file: rollouts and groups, read and written (format in lab/data/README.md)."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_prefix.errors import UserError, shown
from megatron_prefix.lab.data import jsonl
from megatron_prefix.lab.data.checks import GroupOrder, check_fields, check_ids, check_rollout
from megatron_prefix.lab.data.jsonl import Fault, PathLike, Row

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Rollout:
    """One token sequence with its loss fields.

    Attributes:
        group: name of the group, the rollouts of one prompt.
        uid: name of the rollout within its group.
        tokens: int32 [n], the whole sequence, prompt included.
        prompt_len: tokens before the first token a model wrote, 1 to n.
        loss: half-open spans of trained tokens, sorted, within [prompt_len, n).
        reward: the outcome of the rollout.
        advantage: the advantage of its trained tokens, or None to take it from the group's rewards.
        old_logprobs: float64, one per trained token in the order of the spans, or None.
        routes: experts that every layer sends the tokens to but the last, int16 [n-1, layers,
            topk], or None: routers choose. No file has them.
    """

    group: str
    uid: str
    tokens: NDArray[np.int32]
    prompt_len: int
    loss: Spans
    reward: float
    advantage: float | None = None
    old_logprobs: NDArray[np.float64] | None = None
    routes: NDArray[np.int16] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_trained(self) -> int:
        """Number of trained tokens."""
        return sum(end - start for start, end in self.loss)

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """bool [n]: which tokens are trained."""
        mask = np.zeros(len(self.tokens), dtype=bool)
        for start, end in self.loss:
            mask[start:end] = True
        return mask


@dataclass(frozen=True)
class Group:
    """The rollouts of one prompt."""

    name: str
    rollouts: tuple[Rollout, ...]


# Reading ------------------------------------------------------------------------------------------


def read_rollouts(path: PathLike, *, vocab_size: int | None = None) -> Iterator[Rollout]:
    """Stream the rollouts of one file (JSON lines, plain or gzip).

    Errors: `UserError`, one line `FILE:ROW: FIELD: what is wrong (value); how to fix`, raised when
    the row is reached. Token ids must be below `vocab_size` when that is given.
    """
    return _read(path, vocab_size, GroupOrder())


def read_groups(
    paths: PathLike | Sequence[PathLike], *, vocab_size: int | None = None
) -> Iterator[Group]:
    """Stream the groups of one file or several. A group never spans two files: one whose name an
    earlier file has is called FILE:NAME. Errors as above."""
    several = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not several:
        raise UserError("rollouts: no file (0 given); name at least one rollout file")
    taken: set[str] = set()
    for path in several:
        rows, earlier = _read(path, vocab_size, GroupOrder()), frozenset(taken)
        for name, rollouts in itertools.groupby(rows, key=lambda rollout: rollout.group):
            other = _unlike(earlier, name, os.fspath(path))
            taken.add(other)
            yield Group(other, tuple(replace(rollout, group=other) for rollout in rollouts))


def _unlike(earlier: frozenset[str], name: str, path: str) -> str:
    """A group's name, or another where earlier files have it."""
    named = (f"{os.path.basename(path)}:{name}", f"{path}:{name}")
    more = (f"{path}:{name}:{number}" for number in itertools.count(2))
    return next(each for each in itertools.chain([name], named, more) if each not in earlier)


def _read(path: PathLike, vocab_size: int | None, order: GroupOrder) -> Iterator[Rollout]:
    previous = np.zeros(0, dtype=np.int32)
    for number, row in jsonl.read_rows(path):
        with jsonl.at_row(path, number):
            rollout = _decoded(row, previous, vocab_size)
            order.add(rollout.group, rollout.uid)
        previous = rollout.tokens
        yield rollout


def _decoded(row: Row, previous: NDArray[np.int32], vocab_size: int | None) -> Rollout:
    """The rollout of one row; ids shared with the row before are not checked again."""
    lcp = jsonl.integer(row, "lcp") if "lcp" in row else 0
    if not 0 <= lcp <= len(previous):
        text = f"outside 0..{len(previous)}, the tokens of the row before ({lcp}); write lcp 0"
        raise Fault("lcp", f"{text} and the whole sequence")
    group, uid = jsonl.name(row, "group"), jsonl.name(row, "uid")
    ids = jsonl.integers(row, "tokens")
    check_ids(ids, lcp, vocab_size)
    rollout = Rollout(
        group=group,
        uid=uid,
        tokens=np.concatenate([previous[:lcp], ids.astype(np.int32)]),
        prompt_len=jsonl.integer(row, "prompt_len"),
        loss=_spans(row),
        reward=jsonl.number(row, "reward"),
        advantage=jsonl.number(row, "advantage") if _given(row, "advantage") else None,
        old_logprobs=jsonl.numbers(row, "old_logprobs") if _given(row, "old_logprobs") else None,
    )
    if "n" in row and jsonl.integer(row, "n") != len(rollout):
        text = f"not the row's {len(rollout)} tokens ({row['n']}); correct n, lcp or tokens"
        raise Fault("n", text)
    check_fields(rollout)
    return rollout


def _given(row: Row, field: str) -> bool:
    return row.get(field) is not None


def _spans(row: Row) -> Spans:
    pairs = jsonl.required(row, "loss")
    good = isinstance(pairs, list) and all(
        isinstance(pair, list) and [*map(type, pair)] == [int, int] for pair in pairs
    )
    if not good:
        text = f"not a list of spans ({shown(pairs)}); give [[start, end), ...] in token positions"
        raise Fault("loss", text)
    return tuple((start, end) for start, end in pairs)


# Writing ------------------------------------------------------------------------------------------


def write_rollouts(
    path: PathLike, groups: Iterable[Group], *, delta: bool = True
) -> dict[str, int]:
    """Write `groups` to `path` and return how many `groups, rollouts, tokens` were written.

    With `delta` a row stores the number of tokens that it shares with the row before as `lcp`.
    Equal groups give equal bytes (gzip by the suffix .gz). After an exception an existing file is
    unchanged. Errors: `UserError` for a rollout that could not be read back, for no rollout, for
    the folder.
    """
    counts = {"groups": 0, "rollouts": 0, "tokens": 0}
    jsonl.write_lines(path, _encoded(path, groups, delta, counts))
    return counts


def _encoded(
    path: PathLike, groups: Iterable[Group], delta: bool, counts: dict[str, int]
) -> Iterator[str]:
    order = GroupOrder()
    previous = np.zeros(0, dtype=np.int32)
    for group in groups:
        counts["groups"] += 1
        for rollout in group.rollouts:
            counts["rollouts"] += 1
            counts["tokens"] += len(rollout)
            with jsonl.at_row(path, counts["rollouts"]):
                if rollout.group != group.name:
                    text = f"not that of its Group, {shown(group.name)} ({shown(rollout.group)})"
                    raise Fault("group", f"{text}; name both alike")
                check_rollout(rollout)
                order.add(rollout.group, rollout.uid)
            lcp = common_prefix(previous, rollout.tokens) if delta else 0
            yield json.dumps(_row(rollout, lcp), separators=(",", ":"), allow_nan=False)
            previous = rollout.tokens


def _row(rollout: Rollout, lcp: int) -> Row:
    row: Row = {
        "group": rollout.group,
        "uid": rollout.uid,
        "n": len(rollout),
        "prompt_len": int(rollout.prompt_len),
        "loss": [[int(start), int(end)] for start, end in rollout.loss],
        "reward": float(rollout.reward),
    }
    if rollout.advantage is not None:
        row["advantage"] = float(rollout.advantage)
    if rollout.old_logprobs is not None:
        row["old_logprobs"] = np.asarray(rollout.old_logprobs, dtype=np.float64).tolist()
    if lcp:
        row["lcp"] = lcp
    return row | {"tokens": rollout.tokens[lcp:].tolist()}


# Tokens -------------------------------------------------------------------------------------------


def common_prefix(left: NDArray[np.int32], right: NDArray[np.int32]) -> int:
    """Number of leading tokens that two sequences share."""
    shortest = min(len(left), len(right))
    differs = left[:shortest] != right[:shortest]
    return int(differs.argmax()) if differs.any() else shortest


def dense_vocabulary(groups: Iterable[Group]) -> tuple[list[Group], int, NDArray[np.int32]]:
    """Map the ids that occur to 0..V-1, so that a tiny model can train on real rollouts.

    Returns the mapped groups (shared prefixes stay shared), V, and the original ids int32 [V] in
    ascending order: new id i was `ids[i]`.
    """
    groups = list(groups)
    tokens = [rollout.tokens for group in groups for rollout in group.rollouts]
    ids = np.unique(np.concatenate([np.zeros(0, dtype=np.int32), *tokens]))

    def mapped(rollout: Rollout) -> Rollout:
        return replace(rollout, tokens=np.searchsorted(ids, rollout.tokens).astype(np.int32))

    dense = [Group(group.name, tuple(map(mapped, group.rollouts))) for group in groups]
    return dense, len(ids), ids
