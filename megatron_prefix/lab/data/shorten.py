"""Shorten the rollouts of a group, for models and machines too small for whole ones."""

from __future__ import annotations

from dataclasses import replace

from megatron_prefix.errors import UserError
from megatron_prefix.lab.data.rollouts import Group, Rollout, common_prefix


def shorten(group: Group, max_tokens: int) -> tuple[Group | None, int]:
    """Cut every rollout of `group` to at most `max_tokens` tokens (`--max-tokens`).

    A group that fits is returned unchanged. Otherwise the shared prompt loses its head first, down
    to half of `max_tokens` and by the same cut for the whole group, so shared tokens stay shared;
    then each rollout loses its tail. Spans and `old_logprobs` are cut with the tokens.

    Returns the group, or None when nothing is left, and the number of rollouts dropped because they
    have no trained token left. Errors: `UserError` when `max_tokens` is below 2.
    """
    if max_tokens < 2:
        raise UserError(f"--max-tokens: too small ({max_tokens}); give 2 or more")
    if all(len(rollout) <= max_tokens for rollout in group.rollouts):
        return group, 0
    cut = max(0, _shared_prompt(group) - max_tokens // 2)
    shortened = (_cut(rollout, cut, max_tokens) for rollout in group.rollouts)
    kept = tuple(rollout for rollout in shortened if rollout.loss)
    return (Group(group.name, kept) if kept else None), len(group.rollouts) - len(kept)


def _shared_prompt(group: Group) -> int:
    """Number of leading tokens that belong to the prompt of, and are equal in, all rollouts."""
    first = group.rollouts[0]
    shared = min(rollout.prompt_len for rollout in group.rollouts)
    return min([shared, *(common_prefix(first.tokens, other.tokens) for other in group.rollouts)])


def _cut(rollout: Rollout, head: int, max_tokens: int) -> Rollout:
    tokens = rollout.tokens[head : head + max_tokens]
    moved = ((start - head, min(end - head, len(tokens))) for start, end in rollout.loss)
    shorter = replace(
        rollout,
        tokens=tokens,
        prompt_len=min(rollout.prompt_len - head, len(tokens)),
        loss=tuple((start, end) for start, end in moved if start < end),
    )
    if rollout.old_logprobs is None:
        return shorter
    return replace(shorter, old_logprobs=rollout.old_logprobs[: shorter.num_trained])
