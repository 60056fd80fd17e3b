"""The task: find a record among many and say its value.  Pure.

A prompt is up to a few thousand tokens of records and one question:

    key key word word word ; text ...   key key word word word ; text ...   ? key key

Records have text, of other tokens, where there is room for it. The answer is the three words behind
that key, and a last token. A rule gives the reward: the share of these four tokens that are right,
in their places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_prefix.lab.data.rollouts import Group, Rollout

END, ASK, NEXT, FIRST_WORD, WORDS, KEY_TOKENS, TEXT_TOKENS = 0, 1, 2, 3, 16, 32, 13
FIRST_KEY = FIRST_WORD + WORDS
FIRST_TEXT = FIRST_KEY + KEY_TOKENS
VOCABULARY = FIRST_TEXT + TEXT_TOKENS
VALUE = 3
"""Words of a value."""
RECORD, QUESTION = 3 + VALUE, 3
"""Tokens of each."""
Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class Records:
    """Records with keys that differ.

    Attributes:
        keys: int32 [records, 2].
        values: int32 [records, VALUE], words.
        texts: int32 [records, tokens].
    """

    keys: Tokens
    values: Tokens
    texts: Tokens

    @property
    def tokens(self) -> Tokens:
        """All records, one after another."""
        ends = np.full((len(self.keys), 1), NEXT, np.int32)
        return np.hstack([self.keys, self.values, ends, self.texts]).reshape(-1)

    def prompt(self, asked: int) -> Tokens:
        """The records and the question for one of them."""
        return np.concatenate([self.tokens, [ASK, *self.keys[asked]]]).astype(np.int32)

    def answer(self, asked: int) -> Tokens:
        """What is right."""
        return np.append(self.values[asked], END).astype(np.int32)


@dataclass(frozen=True)
class Task:
    """Prompts of one length.

    Attributes:
        prompt_tokens: of a prompt at most, its question included.
        most_records: in a prompt; what is left of it is text.
        seed: equal seeds give equal prompts.
    """

    prompt_tokens: int
    most_records: int
    seed: int = 0

    @property
    def num_records(self) -> int:
        """In a prompt."""
        return min(self.most_records, (self.prompt_tokens - QUESTION) // RECORD)

    def records(self, *number: int) -> tuple[Records, Tokens]:
        """Records and the order in which they are asked for, by number."""
        draw = np.random.default_rng((self.seed, *number))
        pairs = draw.choice(KEY_TOKENS**2, self.num_records, replace=False)
        keys = FIRST_KEY + np.stack(np.divmod(pairs, KEY_TOKENS), axis=1)
        values = FIRST_WORD + draw.integers(WORDS, size=(self.num_records, VALUE))
        order = draw.permutation(self.num_records).astype(np.int32)
        room = (self.prompt_tokens - QUESTION) // self.num_records - RECORD
        texts = FIRST_TEXT + draw.integers(TEXT_TOKENS, size=(self.num_records, room))
        return Records(*(part.astype(np.int32) for part in (keys, values, texts))), order

    def demonstrations(self, number: int, questions: int) -> Group:
        """Right answers to several questions about the same records, each with advantage 1, so that
        the policy gradient is that of their likelihood."""
        records, order = self.records(0, number)
        name = f"demonstration-{number}"
        rollouts = [
            rollout(name, str(asked), records.prompt(asked), records.answer(asked))
            for asked in order[:questions].tolist()
        ]
        return Group(name, tuple(rollouts))


def rollout(
    group: str, uid: str, prompt: Tokens, answer: Tokens, reward: float | None = None
) -> Rollout:
    """A prompt and its answer, all of which is trained; without a reward a demonstration."""
    length = len(prompt) + len(answer)
    return Rollout(
        group, uid, np.concatenate([prompt, answer]), len(prompt), ((len(prompt), length),),
        1.0 if reward is None else reward, 1.0 if reward is None else None,
    )  # fmt: skip


def reward(answer: Sequence[int], right: Tokens) -> float:
    """The share of the right tokens that an answer has in their places, 0 to 1."""
    return sum(map(int.__eq__, answer, right.tolist())) / len(right)
