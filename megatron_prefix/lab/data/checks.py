"""Checks of rollouts and of rows of a rollout file; a `Fault` names the bad field."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_prefix.errors import shown
from megatron_prefix.lab.data.jsonl import Fault

if TYPE_CHECKING:
    from megatron_prefix.lab.data.rollouts import Rollout

_MAX_ID = int(np.iinfo(np.int32).max)


def check_rollout(rollout: Rollout, *, vocab_size: int | None = None) -> None:
    """Raise `Fault` for the first field that is not as `Rollout` documents it."""
    check_ids(rollout.tokens, 0, vocab_size)
    check_fields(rollout)


def check_fields(rollout: Rollout) -> None:
    """Raise `Fault` for the first bad field; token ids are not checked."""
    num_tokens = len(rollout)
    if num_tokens < 2:
        raise Fault("tokens", f"the sequence is too short ({num_tokens}); give 2 tokens or more")
    if not 1 <= rollout.prompt_len <= num_tokens:
        text = f"outside 1..{num_tokens}, the row's tokens ({rollout.prompt_len}); count the prompt"
        raise Fault("prompt_len", text)
    _check_loss(rollout)
    for field, value in (("reward", rollout.reward), ("advantage", rollout.advantage)):
        if value is not None and not math.isfinite(value):
            raise Fault(field, f"not finite ({value}); give a finite number")
    if rollout.old_logprobs is not None:
        _check_logprobs(rollout.old_logprobs, rollout.num_trained)


def check_ids(
    ids: NDArray[Any], offset: int, vocab_size: int | None, field: str = "tokens"
) -> None:
    """Raise `Fault` for an id of [n] outside 0..vocab_size-1; the first is token `offset`."""
    bound = _MAX_ID + 1 if vocab_size is None else vocab_size
    bad = np.flatnonzero((ids < 0) | (ids >= bound))
    if not len(bad):
        return
    index, value = int(bad[0]), int(ids[bad[0]])
    where = f"token {offset + index}"
    if value < 0:
        raise Fault(field, f"{where} is negative ({value}); give ids from 0")
    fix = "give the tokenizer the model was trained with, or a larger vocabulary"
    raise Fault(field, f"{where} is not in the vocabulary of {bound} ({value}); {fix}")


def _check_loss(rollout: Rollout) -> None:
    before = rollout.prompt_len
    for span in rollout.loss:
        start, end = span
        if start >= end:
            raise Fault("loss", f"empty span ({list(span)}); give [start, end) with start < end")
        if start < rollout.prompt_len:
            text = (
                f"span {list(span)} begins in the {rollout.prompt_len} prompt tokens; start later"
            )
            raise Fault("loss", text)
        if end > len(rollout):
            text = f"span {list(span)} ends after the row's {len(rollout)} tokens; end within it"
            raise Fault("loss", text)
        if start < before:
            text = f"span {list(span)} begins before the one before it ends; sort and merge them"
            raise Fault("loss", text)
        before = end


def _check_logprobs(logprobs: NDArray[np.float64], num_trained: int) -> None:
    if logprobs.shape != (num_trained,):
        text = f"{logprobs.size} entries for {num_trained} trained tokens; give one for each"
        raise Fault("old_logprobs", text)
    if not np.isfinite(logprobs).all():
        index = int(np.flatnonzero(~np.isfinite(logprobs))[0])
        text = f"entry {index} is not finite ({logprobs[index]}); give finite numbers"
        raise Fault("old_logprobs", text)


class GroupOrder:
    """Checks that a group's rows are adjacent, its name is unique, and so are uids within it."""

    def __init__(self) -> None:
        self._current: str | None = None
        self._names: set[str] = set()
        self._uids: set[str] = set()

    def add(self, group: str, uid: str) -> None:
        """Take the next row; `Fault` when it is out of order."""
        if group != self._current:
            if group in self._names:
                text = f"rows of group {shown(group)} are not next to each other"
                raise Fault(
                    "group", f"{text}; sort the file by group, and give each group its own name"
                )
            self._current, self._uids = group, set()
            self._names.add(group)
        if uid in self._uids:
            text = f"occurs twice in group {shown(group)} ({shown(uid)}); give each rollout its own"
            raise Fault("uid", text)
        self._uids.add(uid)
