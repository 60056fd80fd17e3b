"""`megatron-prefix show`: a plan file's grid and its simulated timeline."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megatron_prefix.errors import UserError
from megatron_prefix.features.plan_files.plan_file import read_plan
from megatron_prefix.lab.cli.arguments import add_switch, add_text
from megatron_prefix.lab.cli.outputs import check_outputs, write_text
from megatron_prefix.lab.cli.report import facts, print_facts, print_json, print_records, print_rich
from megatron_prefix.lab.plans.forest import forest_of, max_depth, num_trees
from megatron_prefix.lab.plans.messages import without_messages
from megatron_prefix.lab.plans.timeline import Timeline, simulate
from megatron_prefix.lab.view.drawing import timeline_svg
from megatron_prefix.plan.actions import Action, Plan
from megatron_prefix.plan.error import PlanError

if TYPE_CHECKING:
    from rich.text import Text

HELP = """\
Shows a plan file: its grid, and its simulated timeline. The grid has a row for each stage and a
cell for each action: F3 is the forward of segment 3, B3 its backward, F3.1 its forward in model
chunk 1; S3>1 sends to data-parallel rank 1, R3<1 receives from it. Messages take no time in the
timeline. An invalid plan is refused: its grid is printed with the bad cell marked."""
EPILOG = """\
examples:
  megatron-prefix show plan.csv
  megatron-prefix show plan.csv --full
  megatron-prefix show plan.csv --svg plan.svg
  megatron-prefix show plan.csv --json
"""
_STYLES = {  # as in lab/view/drawing.py: forward blue, backward orange, inner segments strong
    ("F", True): "bold blue",
    ("F", False): "cyan",
    ("B", False): "yellow",
    ("B", True): "bold red",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `show`."""
    parser.add_argument("plan", metavar="PLAN.csv", help="a file that `plan --csv` wrote")
    add_switch(parser, "--full", "print all actions, even if a stage takes several lines")
    add_text(parser, "--svg", "draw the simulated timeline")


def run(args: argparse.Namespace) -> int:
    """Reads, simulates and prints."""
    check_outputs(args.svg)
    plan = read_plan(args.plan)
    try:
        timeline = simulate(without_messages(plan))
    except PlanError as error:
        if not args.json:
            print(error.grid)
        raise UserError(f"{args.plan}: {str(error).partition(chr(10))[0]}") from None
    if args.svg:
        name = args.plan.rpartition("/")[2]
        write_text(args.svg, timeline_svg(timeline, without_messages(plan), name))
    result = _result(plan, timeline)
    if args.json:
        print_json(result)
        return 0
    print_rich(*_grid(plan, shutil.get_terminal_size().columns, args.full))
    _print_timeline(plan, result)
    return 0


def _result(plan: Plan, timeline: Timeline) -> dict[str, Any]:
    forest = forest_of(plan)
    return {
        "num_ranks": plan.num_ranks,
        "num_chunks": plan.num_chunks,
        "segments": len(plan.segments),
        "trees": num_trees(forest.segments),
        "rollouts": len(forest.num_positions),
        "raw_tokens": forest.raw_tokens,
        "executed_tokens": forest.executed_tokens,
        "max_depth": max_depth(forest),
        "num_actions": sum(map(len, plan.programs)),
        "makespan": timeline.makespan,
        "bubble_fraction": timeline.bubble_fraction,
        "bubble_fractions": timeline.bubble_fractions,
        "peak_live_tokens": timeline.peak_live_positions,
        "peak_live_tokens_per_rank": timeline.peak_positions,
    }


def _grid(plan: Plan, width: int, full: bool) -> Iterator[Text]:
    """One line per rank, cut to `width` characters; with `full` in as many blocks as needed."""
    from rich.text import Text

    names = [f"{'stage' if plan.num_chunks == 1 else 'rank'} {r}" for r in range(plan.num_ranks)]
    left = max(map(len, names)) + 2
    cell = 1 + max((len(str(a)) for program in plan.programs for a in program), default=1)
    longest = max(map(len, plan.programs))
    room = max(1, (width - left) // cell)
    if not full and longest > room:
        room = max(1, (width - left - len(f"... {longest} more")) // cell)
    for begin in range(0, longest, room) if full else (0,):
        for name, program in zip(names, plan.programs, strict=True):
            line = Text(name.ljust(left), no_wrap=True)
            for action in program[begin : begin + room]:
                line.append(str(action).ljust(cell), _style(plan, action))
            more = len(program) - begin - room
            if not full and more > 0:
                line.append(f"... {more} more", "dim")
            yield line
        if full and begin + room < longest:
            yield Text()


def _style(plan: Plan, action: Action) -> str:
    if action.peer >= 0:
        return "green"
    return _STYLES[action.kind, plan.segments[action.segment].inner]


FACTS = {
    "segments": "{segments:n}",
    "actions": "{num_actions:n}",
    "makespan": "{makespan:n} tokens of forward work",
    "bubble": "{bubble_fraction:.1%}",
}
BY_RANK = (
    ("rank", "{rank}"),
    ("actions", "{actions:n}"),
    ("bubble", "{bubble:.1%}"),
    ("peak of live tokens", "{peak:n}"),
)


def _print_timeline(plan: Plan, result: Mapping[str, Any]) -> None:
    print_facts("simulated", facts(FACTS, result))
    ranks = zip(
        plan.programs, result["bubble_fractions"], result["peak_live_tokens_per_rank"], strict=True
    )
    rows = (
        {"rank": rank, "actions": len(program), "bubble": bubble, "peak": peak}
        for rank, (program, bubble, peak) in enumerate(ranks)
    )
    print_records("by rank", BY_RANK, rows)
