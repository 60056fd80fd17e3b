"""Synthetic rollouts of a given size and tree shape, and the bundled rollout file.

`python -m megatron_prefix.lab.data.generate [FILE]` makes `bundled/agents.jsonl.gz` (or FILE).
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_prefix.errors import UserError
from megatron_prefix.lab.data.rollouts import Group, Rollout, Spans, write_rollouts

# Shapes of the tree under a prompt:
# - flat: a star; rollouts part at their first response token. All of the response is trained.
# - branch: a regular tree, `depth` levels of equal length. All of the response is trained, so inner
#   segments carry loss.
# - turns: a tool-using agent of `depth` turns. What the agent writes is trained, the tools' answers
#   are not; rollouts part at random places within what the agent writes, at the latest in its last
#   turn.
TREES = ("flat", "branch", "turns")
# The first ids mark turns, like special tokens of chat templates; text uses the other ids.
BEGIN, END, SYSTEM, AGENT, TOOL, FIRST_TEXT = range(6)
_MIN_PROMPT = 6  # BEGIN SYSTEM text END BEGIN AGENT
_MOST_TOKENS = 10**8  # of a group, which is made in memory
_MIN_LEVEL = {"flat": 2, "branch": 2, "turns": 15}  # response tokens a level of the tree needs


@dataclass(frozen=True)
class _TreeShape:
    """The arguments of `generate`; lengths in tokens."""

    prompt: int
    response: int
    num_rollouts: int
    tree: str
    depth: int
    vocab_size: int
    uneven: bool
    num_copies: int

    def __post_init__(self) -> None:
        if self.tree not in TREES:
            raise UserError(f"--tree: unknown ({self.tree!r}); give one of {', '.join(TREES)}")
        limits = {
            "--prompt-tokens": (self.prompt, _MIN_PROMPT),
            "--depth": (self.depth, 1),
            "--response-tokens": (self.response, _MIN_LEVEL[self.tree] * self.depth),
            "--rollouts": (self.num_rollouts, self.num_copies + 1),
            "--copies": (self.num_copies, 0),
            "--vocab-size": (self.vocab_size, FIRST_TEXT + self.num_rollouts),
        }
        for option, (value, least) in limits.items():
            if value < least:
                raise UserError(f"{option}: too small ({value}); give {least} or more")
        tokens = self.num_rollouts * (self.prompt + self.response)
        if tokens > _MOST_TOKENS:
            raise UserError(
                f"a group of {self.num_rollouts} rollouts of {self.prompt} + {self.response} tokens"
                f" is too large ({tokens}); give at most {_MOST_TOKENS} tokens per group"
            )


def generate(
    num_groups: int,
    prompt_tokens: int,
    response_tokens: int,
    num_rollouts: int,
    *,
    tree: str = "flat",
    depth: int = 3,
    vocab_size: int = 2048,
    seed: int = 0,
    uneven: bool = False,
    num_copies: int = 0,
    name: str = "synthetic",
) -> Iterator[Group]:
    """Yield `num_groups` groups of `num_rollouts` rollouts, the same for the same arguments.

    `tree` is the shape under the prompt (TREES says which); a prompt has `prompt_tokens` and what
    follows it `response_tokens`. `uneven` cuts each response to a random length, none so short that
    two become the same; the last `num_copies` rollouts of a group copy its first. Groups are called
    `name-0000`, `name-0001`, ... Rewards are 0 or 1, and both occur if two rollouts differ.
    Errors: `UserError` naming the option.
    """
    if num_groups < 1:
        raise UserError(f"--groups: too small ({num_groups}); give 1 or more")
    shape = _TreeShape(
        prompt=prompt_tokens,
        response=response_tokens,
        num_rollouts=num_rollouts,
        tree=tree,
        depth=1 if tree == "flat" else depth,
        vocab_size=vocab_size,
        uneven=uneven,
        num_copies=num_copies,
    )
    rng = np.random.default_rng(seed)
    return (_group(f"{name}-{index:04d}", shape, rng) for index in range(num_groups))


def _group(name: str, shape: _TreeShape, rng: np.random.Generator) -> Group:
    num_different = shape.num_rollouts - shape.num_copies
    prompt = _prompt(shape, rng)
    marks, loss = _layout(shape, rng)
    text, parted_at = _responses(shape, num_different, rng)
    responses = np.where(marks >= 0, marks, text)
    rewards = rng.integers(0, 2, num_different)
    if num_different > 1:
        rewards[0] = 1 - rewards[-1]
    ends = [_end(shape, loss, start, rng) for start in parted_at]

    def rollout(index: int) -> Rollout:
        source = index if index < num_different else 0
        end = ends[source]
        return Rollout(
            group=name,
            uid=str(index),
            tokens=np.concatenate([prompt, responses[source, :end]]),
            prompt_len=shape.prompt,
            loss=tuple((shape.prompt + a, shape.prompt + min(b, end)) for a, b in loss if a < end),
            reward=float(rewards[source]),
        )

    return Group(name, tuple(map(rollout, range(shape.num_rollouts))))


def _prompt(shape: _TreeShape, rng: np.random.Generator) -> NDArray[np.int32]:
    """A system turn and the header of the agent's first turn: int32 [prompt]."""
    prompt = rng.integers(FIRST_TEXT, shape.vocab_size, shape.prompt, dtype=np.int32)
    prompt[:2] = BEGIN, SYSTEM
    prompt[-3:] = END, BEGIN, AGENT
    return prompt


def _layout(shape: _TreeShape, rng: np.random.Generator) -> tuple[NDArray[np.int32], Spans]:
    """Marks of a response (int32 [response], -1 for text), and its trained spans.

    All rollouts of a group have the same layout, so their turns stay aligned after they part.
    """
    marks = np.full(shape.response, -1, dtype=np.int32)
    marks[-1] = END
    if shape.tree != "turns":
        return marks, ((0, shape.response),)
    room, loss = shape.response // shape.depth, []
    for start in range(0, room * (shape.depth - 1), room):
        stop = start + int(rng.integers(room // 3, 2 * room // 3))  # the tool answers in the rest
        marks[stop - 1 : stop + 2] = END, BEGIN, TOOL
        marks[start + room - 3 : start + room] = END, BEGIN, AGENT
        loss.append((start, stop))
    return marks, (*loss, (room * (shape.depth - 1), shape.response))


def _responses(
    shape: _TreeShape, num: int, rng: np.random.Generator
) -> tuple[NDArray[np.int32], list[int]]:
    """Text of `num` different responses, shared as the tree says, and where each becomes unshared.

    Returns int32 [num, response] and `num` response positions.
    """
    text = np.empty((num, shape.response), dtype=np.int32)
    parted_at = np.zeros(num, dtype=np.int64)
    num_ids = shape.vocab_size - FIRST_TEXT
    clusters = [np.arange(num)]
    for level, (start, stop) in enumerate(itertools.pairwise(_branch_points(shape, rng))):
        parted = [_parted(cluster, shape.depth - level, shape.tree, rng) for cluster in clusters]
        for cluster, siblings in zip(clusters, parted, strict=True):
            if len(siblings) > 1:
                parted_at[cluster] = start
            shape_of_runs = (len(siblings), stop - start)
            runs = rng.integers(FIRST_TEXT, shape.vocab_size, shape_of_runs, dtype=np.int32)
            # Siblings differ in their first token, so the tree has exactly the shape asked for.
            firsts = int(runs[0, 0]) - FIRST_TEXT + np.arange(len(siblings))
            runs[:, 0] = FIRST_TEXT + firsts % num_ids
            for members, run in zip(siblings, runs, strict=True):
                text[members, start:stop] = run
        clusters = [members for siblings in parted for members in siblings]
    return text, parted_at.tolist()


def _branch_points(shape: _TreeShape, rng: np.random.Generator) -> list[int]:
    """Response positions where the levels of the tree begin, and the end: depth + 1 of them."""
    room = shape.response // shape.depth
    points = np.arange(shape.depth) * room
    if shape.tree == "turns":  # within what the agent writes, its END excluded
        points[1:] += rng.integers(0, room // 3 - 1, shape.depth - 1)
    return [*points.tolist(), shape.response]


def _parted(
    members: NDArray[np.int64], levels: int, tree: str, rng: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Split a cluster of rollouts; after `levels` such steps, with this one, all are alone."""
    if levels == 1 or len(members) == 1:
        return list(members[:, None])
    if tree == "branch":
        return np.array_split(members, math.ceil(round(len(members) ** (1 / levels), 9)))
    num_cuts = int(rng.integers(0, min(3, len(members))))
    return np.split(members, np.sort(rng.permutation(len(members) - 1)[:num_cuts] + 1))


def _end(shape: _TreeShape, loss: Spans, parted_at: int, rng: np.random.Generator) -> int:
    """Length of one response: past where it becomes unshared, ending in a trained token."""
    if not shape.uneven:
        return shape.response
    least = max(shape.response // 2, parted_at + 2)
    end = int(rng.integers(least, shape.response + 1))
    return max(min(stop, end) for start, stop in loss if start < end)


# The bundled file ---------------------------------------------------------------------------------


def bundled_rollouts() -> Path:
    """The rollout file that comes with the package: eight small groups of many shapes."""
    return Path(str(resources.files("megatron_prefix.lab.data") / "bundled" / "agents.jsonl.gz"))


_BUNDLED: tuple[tuple[str, int, int, int, dict[str, Any]], ...] = (  # P, R, n, more
    ("agents/search", 384, 96, 8, {"depth": 3}),
    ("agents/shell", 320, 120, 6, {"depth": 4}),
    ("agents/browser", 256, 128, 8, {"depth": 4, "uneven": True}),
    ("agents/airline", 400, 64, 4, {"depth": 2}),
    ("agents/retail", 192, 100, 5, {"depth": 3, "uneven": True}),
    ("flat/question", 300, 48, 8, {"tree": "flat"}),
    ("branch/proof", 128, 96, 8, {"tree": "branch", "depth": 3}),
    ("copies/greedy", 160, 80, 6, {"depth": 2, "num_copies": 3}),
)


def bundled_groups() -> Iterator[Group]:
    """The groups of the bundled file: tool-using agents, a flat group, a tree, copies."""
    for seed, (name, prompt, response, num, more) in enumerate(_BUNDLED):
        options = {"tree": "turns", "seed": seed, "name": name, **more}
        yield from generate(1, prompt, response, num, **options)


if __name__ == "__main__":
    write_rollouts(sys.argv[1] if len(sys.argv) > 1 else bundled_rollouts(), bundled_groups())
