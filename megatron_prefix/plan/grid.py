"""A plan as text, with bad cells marked.  Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_prefix.plan.actions import Action

Cell = tuple[int, int]
"""(rank, place in its program); the place after the last one stands for a missing action."""


def marked_grid(programs: Sequence[Sequence[Action]], marked: Sequence[Cell] = ()) -> str:
    """The whole plan, one line a place and one column a rank.

    Marked cells read `>B3<`, and their lines end in an arrow, as in the error grid of
    `_format_pipeline_order` in torch/distributed/pipelining/schedules.py.
    """
    lengths = [len(program) for program in programs] + [place + 1 for _, place in marked]
    num_lines = max(lengths, default=0)
    columns = [_column(rank, program, num_lines, marked) for rank, program in enumerate(programs)]
    numbers = ["", *map(str, range(num_lines))]
    width = max(map(len, numbers))
    lines = []
    for place, (number, *cells) in enumerate(zip(numbers, *columns, strict=True), start=-1):
        arrow = "  <-- here" if any(place == where for _, where in marked) else ""
        lines.append(f"{number:>{width}}  {' '.join(cells)}{arrow}".rstrip())
    return "\n".join(lines)


def _column(
    rank: int, program: Sequence[Action], num_lines: int, marked: Sequence[Cell]
) -> list[str]:
    """A rank's column with its heading, all of one width."""
    cells = [f" rank {rank}"]
    for place in range(num_lines):
        text = str(program[place]) if place < len(program) else ""
        cells.append(f">{text or 'end'}<" if (rank, place) in marked else f" {text}")
    width = max(map(len, cells)) + 1
    return [cell.ljust(width) for cell in cells]
