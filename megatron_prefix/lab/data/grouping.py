"""Gathers rollouts that come in any order into groups: of one step, and one name or prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_prefix.lab.data.rollouts import Group, Rollout


class _Key(NamedTuple):
    """What the rollouts of a group share; a later step has another policy."""

    step: str
    group: str
    prompt: bytes


class Gathered:
    """Rollouts by group, in the order in which the groups' first ones came."""

    def __init__(self) -> None:
        self._members: dict[_Key, dict[str, Rollout]] = {}

    def add(self, rollout: Rollout, step: str) -> None:
        """Take the next rollout; its `group` or `uid` may be empty, and so may the step."""
        prompt = b"" if rollout.group else rollout.tokens[: rollout.prompt_len].tobytes()
        members = self._members.setdefault(_Key(step, rollout.group, prompt), {})
        members[_free(rollout.uid or str(len(members)), members)] = rollout

    def groups(self) -> Iterator[Group]:
        """The groups, all rollouts named."""
        names = _names([*self._members])
        for key, members in self._members.items():
            name = names[key]
            named = (replace(r, group=name, uid=uid) for uid, r in members.items())
            yield Group(name, tuple(named))


def _names(keys: Sequence[_Key]) -> dict[_Key, str]:
    """A group's own name, with its step if it is in several, else `prompt-0000` and so on."""
    num_steps = Counter(key.group for key in keys)
    taken: dict[str, _Key] = {}
    for key in keys:
        if key.group:
            has_step = num_steps[key.group] > 1 and key.step
            name = f"{key.group}@{key.step}" if has_step else key.group
            taken[_free(name, taken)] = key
    for number, key in enumerate(key for key in keys if not key.group):
        taken[_free(f"prompt-{number:04d}", taken)] = key
    return {key: name for name, key in taken.items()}


def _free(name: str, taken: Mapping[str, Any]) -> str:
    """`name`, or `name#1`, `name#2`, ... if it is taken: an id may be that of the task."""
    candidates = (f"{name}#{count}" if count else name for count in range(len(taken) + 1))
    return next(candidate for candidate in candidates if candidate not in taken)
