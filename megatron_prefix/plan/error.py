"""The error that marks where a plan cannot run.  Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_prefix.errors import UserError
from megatron_prefix.plan.actions import Action, Plan

Cell = tuple[int, int]
"""(rank, place in its program); the place after the last one stands for a missing action."""


class PlanError(UserError):
    """A plan that cannot run: a line that says why, and the `grid` with the `marked` cells."""

    def __init__(self, message: str, plan: Plan, marked: Sequence[Cell]) -> None:
        self.marked = tuple(marked)
        self.grid = marked_grid(plan.programs, self.marked)
        super().__init__(f"{message}\n{self.grid}")


def marked_grid(programs: Sequence[Sequence[Action]], marked: Sequence[Cell] = ()) -> str:
    """The whole plan, one line a place and one column a rank.

    Marked cells read `>B3<`, and their lines end in an arrow, as in the error grid of
    `_format_pipeline_order` in torch/distributed/pipelining/schedules.py.
    """
    lengths = [len(program) for program in programs] + [place + 1 for _, place in marked]
    numbers = ["", *map(str, range(max(lengths, default=0)))]
    columns = [numbers]
    for rank, program in enumerate(programs):
        cells = [f" rank {rank}"]
        for place in range(len(numbers) - 1):
            text = str(program[place]) if place < len(program) else ""
            cells.append(f">{text or 'end'}<" if (rank, place) in marked else f" {text}")
        columns.append(cells)
    widths = [max(map(len, cells)) + 1 for cells in columns]
    bad = {place for _, place in marked}
    lines = []
    for place, (number, *cells) in enumerate(zip(*columns, strict=True), start=-1):
        row = " ".join(map(str.ljust, cells, widths[1:]))
        arrow = "  <-- here" if place in bad else ""
        lines.append(f"{number:>{widths[0] - 1}}  {row}{arrow}".rstrip())
    return "\n".join(lines)
