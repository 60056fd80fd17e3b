"""Metrics of a run: `metrics.jsonl`, one object a step, and TensorBoard where it is installed.

Names: `train/...`, and the group `prefix_sharing/...` that other trainers can show unchanged. A
value that could not be measured is left out of the line.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from megatron_prefix.data.files import (
    check_folder_writable,
    check_writable,
    write_text,
    writing,
)
from megatron_prefix.errors import UserError
from megatron_prefix.rl.updates import Update
from megatron_prefix.run.report import StepReport

logger = logging.getLogger(__name__)

FILE = "metrics.jsonl"
GIB = float(1 << 30)
Metrics = dict[str, float | int | str | None]


def of_report(report: StepReport | None) -> Metrics:
    """`prefix_sharing/...` of one rank's last update; empty in mode "off".

    `active` is 1 when the prefix schedule ran; the ratio and the speedup are those of sharing, also
    where the stock schedule ran (mode "observe"); a step for which no tree was built has none.
    Memory is in GiB of this rank: what K/V and gK/gV took at most, and the peak as predicted and,
    on a GPU, as measured.
    """
    if report is None:
        return {}
    forest, decision = report.forest, report.decision
    values: Metrics = {
        "active": int(decision.share),
        "fallback_count": report.fallback_count,
    }
    if forest.segments:
        values["shared_ratio"] = 1 - forest.executed_tokens / forest.raw_tokens
        values["groups"] = len({segment.tree for segment in forest.segments})
        values["predicted_speedup"] = decision.predicted_speedup
    if decision.share:
        values["kv_cache_gb"] = report.cache_bytes / GIB
        values["bubble_fraction"] = report.bubble_fraction
        values["out_of_memory_retried"] = int(report.retried)
    for name, num_bytes in (
        ("predicted_peak_gb", report.predicted_peak),
        ("measured_peak_gb", report.measured_peak),
    ):
        if decision.share and num_bytes is not None:
            values[name] = num_bytes / GIB
    if forest.unshared_by_routes:
        values["unshared_by_routes"] = forest.unshared_by_routes
    if decision.fallback:
        values["fallback_reason"] = decision.reason
    return {f"prefix_sharing/{name}": value for name, value in values.items()}


def of_updates(updates: Sequence[Update]) -> Metrics:
    """Means over the updates of a step, and the largest differences if they were compared."""
    found: Metrics = {
        f"train/{name}": _mean([update.means[name] for update in updates])
        for name in updates[0].means
    }
    found["train/grad_norm"] = _mean([update.grad_norm for update in updates])
    found["train/grad_zeros"] = _mean([update.num_zeros for update in updates])
    found["train/updates_s"] = sum(update.seconds for update in updates)
    differences = [update.difference for update in updates if update.difference is not None]
    stock = [update.stock_seconds for update in updates if update.stock_seconds is not None]
    if differences:
        found["prefix_sharing/stock_updates_s"] = sum(stock)
        for name in ("loss_max_abs_diff", "grad_max_rel_diff", "param_max_abs_diff"):
            found[f"prefix_sharing/{name}"] = max(getattr(d, name) for d in differences)
    return found


def of_tokens(tokens: Mapping[str, float], seconds: float) -> Metrics:
    """Tokens of a step over the whole job, logical (`raw`) and executed, and their rates."""
    found: Metrics = {f"prefix_sharing/{name}": int(value) for name, value in tokens.items()}
    for name, value in tokens.items():
        found[f"train/{name}_per_s"] = value / seconds
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class MetricsWriter:
    """Writes a run's metrics; `close` it in the end.

    Nothing is written before the first step is, so that a run that is refused leaves nothing.

    Args:
        folder: of the run; made where it is missing.
        first_step: what earlier lines say of this and later steps is dropped (a resumed run).

    Raises:
        UserError: the file cannot be written, or holds something else than metrics.
    """

    def __init__(self, folder: Path, first_step: int = 1) -> None:
        self.path, self._board_folder, self._first = (
            folder / FILE,
            folder / "tensorboard",
            first_step,
        )
        check_writable(self.path, makes_folders=True)
        check_folder_writable(self._board_folder)
        self._kept = _lines_before(self.path, first_step) if self.path.is_file() else ""
        self._file: TextIO | None = None
        self._board: Any = None

    def write(self, step: int, metrics: Metrics) -> None:
        """One step; a number that is not finite becomes null.

        Raises:
            UserError: the file cannot be written.
        """
        line = {name: _finite(value) for name, value in metrics.items()}
        with writing(self.path):
            if self._file is None:
                self._file = self._opened()
            self._file.write(json.dumps({"step": step, **line}, allow_nan=False) + "\n")
            self._file.flush()
            for name, value in metrics.items() if self._board is not None else ():
                if isinstance(value, str):
                    self._board.add_text(name, value, step)
                elif value is not None:
                    self._board.add_scalar(name, value, step)

    def _opened(self) -> TextIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, self._kept)
        self._board = _tensorboard(self._board_folder, self._first)
        return open(self.path, "a", encoding="utf-8")

    def close(self) -> None:
        """Ends both files."""
        with writing(self.path):
            if self._file is not None:
                self._file.close()
            if self._board is not None:
                self._board.close()


def _finite(value: float | int | str | None) -> float | int | str | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tensorboard(folder: Path, first_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.info("tensorboard is not installed: metrics go to %s only", FILE)
        return None
    return SummaryWriter(str(folder), purge_step=first_step)


def _lines_before(path: Path, step: int) -> str:
    """The lines of earlier steps; a last line that was cut off is dropped."""
    kept = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line.decode("utf-8"))
                found = row["step"]
                if type(found) is not int:
                    raise TypeError(f"step is {str(found)[:40]}")
            except (ValueError, TypeError, LookupError, RecursionError) as error:
                if not line.endswith(b"\n"):
                    break
                why = str(error).partition("\n")[0][:100]
                raise UserError(
                    f"{path}:{number}: not a line of metrics ({why}); move the file away"
                ) from None
            if found < step:
                kept.append(line.decode("utf-8").rstrip("\r\n") + "\n")
    return "".join(kept)
