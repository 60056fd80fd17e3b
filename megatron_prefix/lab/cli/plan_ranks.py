"""Data-parallel ranks of `plan`: what each gets, what it executes, and what sharing across ranks
would leave of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.lab.cli.report import counted, facts, print_facts, print_records
from megatron_prefix.lab.data.rollouts import Group
from megatron_prefix.lab.models.presets import ModelSpec
from megatron_prefix.lab.plans.dealing import deal
from megatron_prefix.lab.plans.dealt_tokens import DealtTokens, dealt_tokens
from megatron_prefix.lab.runtime.layout import Layout
from megatron_prefix.tree import TreeOptions

COLUMNS = [
    ("rank", "{rank}"),
    ("rollouts", "{rollouts:n}"),
    ("tokens", "{raw_tokens:n}"),
    ("executed alone", "{executed_tokens:n}"),
    ("on no other rank", "{own_tokens:n}"),
]
FACTS = {
    "tokens executed, each rank alone": "{alone:n}",
    "across ranks, every prompt once": "{executed_tokens_across_ranks:n}",
    "slowest rank, by tokens, each alone": "{speedup:.2f}x",
    "slowest rank, across ranks": "at most {speedup_across_ranks:.2f}x",
}


class Dealt(NamedTuple):
    """A step dealt to data-parallel ranks.

    Attributes:
        how: one of `plans.dealing.DEALS`.
        ranks: the groups of each.
        tokens: what they execute.
    """

    how: str
    ranks: Sequence[Sequence[Group]]
    tokens: DealtTokens


def dealt(
    groups: Sequence[Group],
    spec: ModelSpec,
    layout: Layout,
    config: PrefixConfig,
    options: TreeOptions,
    how: str,
    seed: int,
) -> Dealt:
    """Deals a step to several ranks.

    Args:
        groups: of the step.
        spec, layout, config, how, seed: see `plans.dealing.deal`.
        options: how a rank's rollouts become segments.

    Raises:
        UserError: fewer rollouts than ranks.
    """
    num = sum(len(group.rollouts) for group in groups)
    if num < layout.dp:
        raise UserError(
            f"--dp {layout.dp} (and --ep {layout.ep}): the step has {counted(num, 'rollout')},"
            " fewer than data-parallel ranks; give smaller sizes or more groups"
        )
    ranks = deal(groups, spec, layout, config, how, stock=False, seed=seed)
    return Dealt(how, ranks, dealt_tokens(ranks, options))


def result(dealt: Dealt) -> dict[str, Any]:
    """`data_parallel` of `plan --json`."""
    tokens = dealt.tokens
    return {
        "deal": dealt.how,
        "planned_rank": tokens.slowest,
        **vars(tokens),
        "speedup": tokens.speedup,
        "speedup_across_ranks": tokens.speedup_across_ranks,
    }


def show(dealt: Dealt, *, stderr: bool) -> None:
    """Prints the same for people."""
    tokens = dealt.tokens
    lists = {name: value for name, value in vars(tokens).items() if isinstance(value, tuple)}
    records = [
        {"rank": rank, **{name: value[rank] for name, value in lists.items()}}
        for rank in range(len(dealt.ranks))
    ]
    title = f"{len(dealt.ranks)} data-parallel ranks, --deal {dealt.how}, tokens"
    print_records(title, COLUMNS, records, stderr=stderr)
    values = {**result(dealt), "alone": sum(tokens.executed_tokens)}
    print_facts("all ranks", facts(FACTS, values), stderr=stderr)
