"""Data-parallel ranks of `plan`: what each gets, what it executes, what sharing across ranks would
leave of it, and with --across-ranks the plans of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.features.plan_files.table import to_csv
from megatron_prefix.lab.cli.outputs import write_text
from megatron_prefix.lab.cli.report import counted, facts, print_facts, print_records
from megatron_prefix.lab.data.pairs import pairs_of_groups
from megatron_prefix.lab.data.rollouts import Group
from megatron_prefix.lab.models.presets import ModelSpec
from megatron_prefix.lab.plans.dealing import deal
from megatron_prefix.lab.plans.dealt_tokens import DealtTokens, dealt_tokens
from megatron_prefix.lab.plans.job import JobTimeline
from megatron_prefix.lab.plans.job_plan import JobPlan, job_plan, message_seconds, rank_cost
from megatron_prefix.lab.runtime.layout import Layout
from megatron_prefix.lab.view.drawing import job_svg
from megatron_prefix.lab.view.trace import job_trace
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


BYTES_PER_SECOND = 50e9
"""Of messages in the simulated step: those of a GPU between nodes."""
PLANNED = {"slowest rank, by tokens, across ranks": "{speedup:.2f}x"}
ACROSS = [
    ("rank", "{rank}"),
    ("executed", "{executed_tokens:n}"),
    ("received", "{received_tokens:n}"),
    ("sent", "{sent_tokens:n}"),
    ("most received at once", "{peak_received_tokens:n}"),
    ("computes", "{busy:n}"),
    ("waits", "{waiting:n}"),
]


class Dealt(NamedTuple):
    """A step dealt to data-parallel ranks.

    Attributes:
        how: one of `plans.dealing.DEALS`.
        ranks: the groups of each.
        tokens: what they execute.
        job: the plans of all ranks, and when they run, where that is simulated (`simulates`); None
            unless prompts cross ranks.
    """

    how: str
    ranks: Sequence[Sequence[Group]]
    tokens: DealtTokens
    job: tuple[JobPlan, JobTimeline | None] | None = None


def dealt(
    groups: Sequence[Group],
    spec: ModelSpec,
    layout: Layout,
    config: PrefixConfig,
    options: TreeOptions,
    how: str,
    seed: int,
    advance: Callable[[int], None],
) -> Dealt:
    """Deals a step to several ranks.

    Args:
        groups: of the step.
        spec, layout, config, how, seed: see `plans.dealing.deal`.
        options: how a rank's rollouts become segments.
        advance: takes each rank whose tokens were counted.

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
    job = None
    if crosses(config, layout):
        pairs = [pairs_of_groups(some, spec.needs_tails)[0] for some in ranks]
        plans = job_plan(pairs, [[*range(len(one))] for one in pairs], options)
        position = rank_cost(spec, layout).forward.positions
        sent, back = message_seconds(spec, layout, BYTES_PER_SECOND)
        messages = sent / position, back / position
        job = plans, plans.timeline(messages=messages) if simulates(layout) else None
    return Dealt(how, ranks, dealt_tokens(ranks, options, spec, advance), job)


def crosses(config: PrefixConfig, layout: Layout) -> bool:
    """Whether the plans of all ranks are made."""
    return config.across != "off" and layout.dp > 1


def simulates(layout: Layout) -> bool:
    """Whether the step of all ranks is simulated with its messages: stages of pipelines, and ranks
    that share experts, wait for more than these."""
    return layout.pp == layout.ep == 1


def write(dealt: Dealt, folder: str, title: str) -> None:
    """Writes the plans of all ranks, a picture and a trace, of a step with a job."""
    plans, timeline = dealt.job or (None, None)
    if plans is None or timeline is None:
        raise RuntimeError("no step is simulated, and the plans of all ranks are to be written")
    for rank, plan in enumerate(plans.plans):
        write_text(f"{folder}/rank-{rank}.csv", to_csv(plan), makes_folders=True)
    write_text(f"{folder}/plan.svg", job_svg(timeline, plans.plans, title), makes_folders=True)
    write_text(f"{folder}/plan.json", job_trace(timeline, plans.plans), makes_folders=True)


def result(dealt: Dealt) -> dict[str, Any]:
    """`data_parallel` of `plan --json`."""
    tokens = dealt.tokens
    return {
        "deal": dealt.how,
        "planned_rank": tokens.slowest,
        **vars(tokens),
        "speedup": tokens.speedup,
        "speedup_across_ranks": tokens.speedup_across_ranks,
        "across_ranks": None if dealt.job is None else _across(tokens, *dealt.job),
    }


def _across(tokens: DealtTokens, plans: JobPlan, timeline: JobTimeline | None) -> dict[str, Any]:
    """What the job does, lists by rank; times in tokens of forward work, None if it was not
    simulated."""
    found = {
        "executed_tokens": plans.executed_tokens,
        "received_tokens": plans.received_tokens,
        "sent_tokens": plans.sent_tokens,
        "speedup": max(tokens.raw_tokens) / max(plans.executed_tokens),
    }
    if timeline is None:
        return found | dict.fromkeys(("peak_received_tokens", "busy", "waiting", "makespan"))
    return found | {
        "peak_received_tokens": timeline.peak_received,
        "busy": timeline.busy,
        "waiting": timeline.waiting,
        "makespan": timeline.makespan,
    }


def show(dealt: Dealt, *, stderr: bool) -> None:
    """Prints the same for people."""
    tokens = dealt.tokens
    title = f"{len(dealt.ranks)} data-parallel ranks, --deal {dealt.how}, tokens"
    print_records(title, COLUMNS, _by_rank(vars(tokens)), stderr=stderr)
    values = {**result(dealt), "alone": sum(tokens.executed_tokens)}
    print_facts("all ranks", facts(FACTS, values), stderr=stderr)
    if dealt.job is not None:
        title, columns = "across ranks, tokens", ACROSS[:4]
        if dealt.job[1] is not None:
            rate = f"{BYTES_PER_SECOND / 1e9:.0f} GB/s"
            title, columns = f"across ranks, simulated with messages at {rate}, tokens", ACROSS
        across = _across(tokens, *dealt.job)
        print_records(title, columns, _by_rank(across), stderr=stderr)
        print_facts("these plans", facts(PLANNED, across), stderr=stderr)


def _by_rank(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    lists = {name: value for name, value in values.items() if isinstance(value, tuple)}
    ranks = range(max(map(len, lists.values())))
    return [{"rank": rank, **{n: value[rank] for n, value in lists.items()}} for rank in ranks]
