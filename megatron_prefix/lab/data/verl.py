"""Rows of verl's rollout dump: text without special tokens, and ids of a rollout's outputs.

The dump of its newer trainer (verl/trainer/ppo/v1) has a `uid`, `{sample}_{rollout}_{output}`: an
agent that summarises its context writes several outputs in one rollout.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_prefix.lab.data import jsonl
from megatron_prefix.lab.data.jsonl import Fault, Row
from megatron_prefix.lab.data.rollouts import Group, Rollout
from megatron_prefix.lab.data.tokenizer import Tokenizer, token_ids

_UID = re.compile(r"(.+)_(\d{1,9})_(\d{1,9})", re.DOTALL)
_EPSILON = 1e-6  # added to the standard deviation, as verl does


def decoded(row: Row, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Token ids of the prompt and of the answer."""
    prompt = _prompt_ids(tokenizer, jsonl.text(row, "input"))
    return prompt, token_ids(tokenizer, jsonl.text(row, "output"), "output")


def _prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a prompt that an answer follows.

    Special tokens that the tokenizer adds before a text, such as BOS, belong to it, unless the text
    has them; those that it adds behind one, such as EOS, would stand before the answer.
    """
    plain = token_ids(tokenizer, text, "input")
    whole = token_ids(tokenizer, text, "input", special=True)
    offsets = range(len(whole) - len(plain) + 1)
    begin = next((n for n in offsets if whole[n : n + len(plain)] == plain), None)
    if begin is None:
        text = "the tokenizer puts special tokens inside the prompt"
        raise Fault("input", f"{text}; write token ids, and use `import tokens`")
    added = whole[:begin]
    return plain if plain[:begin] == added else added + plain


def sample_of(uid: str) -> str:
    """The name of the group that `uid` tells, or ""."""
    parts = _UID.fullmatch(uid)
    return parts[1] if parts else ""


def with_shared_advantages(group: Group) -> Group:
    """The group with verl's advantages, where one of its rollouts has several outputs.

    They are relative to the rewards of each rollout's last output alone. Other groups are returned
    as they are, and so are rows that have an advantage.
    """
    parts = [_UID.fullmatch(rollout.uid) for rollout in group.rollouts]
    if not all(parts):
        return group
    owners = [part[2] for part in parts if part]
    outputs = [int(part[3]) for part in parts if part]
    order = sorted(range(len(outputs)), key=outputs.__getitem__)
    last = {owners[index]: index for index in order}
    if len(last) == len(owners):
        return group
    rewards = {owner: group.rollouts[index].reward for owner, index in last.items()}
    values = dict(zip(rewards, _normalised([*rewards.values()]), strict=True))
    if not np.isfinite([*values.values()]).all():  # whoever trains on such rewards refuses them
        return group
    pairs = zip(group.rollouts, owners, strict=True)
    return Group(group.name, tuple(_with_advantage(r, values[owner]) for r, owner in pairs))


def _with_advantage(rollout: Rollout, value: float) -> Rollout:
    return rollout if rollout.advantage is not None else replace(rollout, advantage=value)


def _normalised(rewards: Sequence[float]) -> list[float]:
    values = np.array(rewards, dtype=np.float64)
    if (values == values[0]).all():
        return [0.0] * len(rewards)
    with np.errstate(over="ignore", invalid="ignore"):
        normal = (values - values.mean()) / (values.std(ddof=1) + _EPSILON)
    return [float(value) for value in normal]
