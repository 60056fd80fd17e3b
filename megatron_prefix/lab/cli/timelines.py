"""Files of `train` about its last update: the simulated plan and the measured timeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_prefix.errors import UserError
from megatron_prefix.lab.cli.outputs import write_text
from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.lab.view.drawing import timeline_svg
from megatron_prefix.lab.view.trace import chrome_trace

if TYPE_CHECKING:
    from megatron_prefix.lab.rl.trainer import Trainer


def draw_plan(trainer: Trainer, path: str) -> None:
    """Draws the plan of the last update.

    Raises:
        UserError: there is none.
    """
    last = trainer.report
    if last is None:
        raise UserError("--plan-svg: no step was done, so there is no plan to draw")
    write_text(path, timeline_svg(simulate(last.plan), last.plan), makes_folders=True)


def write_traces(trainer: Trainer, paths: Sequence[str], rank: int) -> None:
    """Writes the measured timeline of the last update on rank 0's pipeline; every rank calls this.

    Raises:
        UserError: the last update was not measured, since it ran no plan.
    """
    from megatron_prefix.lab.rl.report_numbers import stopwatch_of, timeline

    last = trainer.report
    stopwatch = stopwatch_of(last)
    if last is None or stopwatch is None:
        raise UserError("--trace: the last update ran no plan, so there is nothing to show")
    measured = timeline(stopwatch, last.plan)
    for path in paths if rank == 0 else ():
        if path.endswith(".svg"):
            title = f"Measured: update of step {trainer.num_steps}"
            write_text(path, timeline_svg(measured, last.plan, title), makes_folders=True)
        else:
            write_text(path, chrome_trace(measured, last.plan), makes_folders=True)
