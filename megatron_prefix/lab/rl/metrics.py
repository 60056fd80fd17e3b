"""Metrics of a run: `metrics.jsonl`, one object per step, TensorBoard if it is installed, and
Weights & Biases if one of its projects is named.

Names: `train/...`, and the group `prefix_sharing/...` that other trainers can show unchanged. A
value that could not be measured is left out of the line.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from megatron_prefix.errors import UserError
from megatron_prefix.features.across.exchanges import Crossed
from megatron_prefix.lab.plans.forest import num_trees
from megatron_prefix.lab.rl.report_numbers import bubble_fraction, measured_peak, predicted_peak
from megatron_prefix.lab.rl.run_folder import METRICS
from megatron_prefix.lab.rl.updates import Update
from megatron_prefix.lab.runtime.folders import check_folder_writable
from megatron_prefix.plan.files import check_writable, write_text, writing
from megatron_prefix.run.report import StepReport

logger = logging.getLogger(__name__)

GIB = float(1 << 30)
Metrics = dict[str, float | int | str | None]


def of_report(report: StepReport | None) -> Metrics:
    """`prefix_sharing/...` of one rank's last update; empty in mode "off".

    `active` is 1 when the prefix schedule ran; the ratio and the speedup are those of sharing, also
    if the stock schedule ran (mode "observe"); a step for which no tree was built has none.
    Memory is in GiB of this rank: what K/V, states and their gradients took at most, and the peak
    as predicted and, on a GPU, as measured.
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
        values["groups"] = num_trees(forest.segments)
        values["predicted_speedup"] = decision.predicted_speedup
    if decision.share:
        values["kv_cache_gb"] = report.cache_bytes / GIB
        values["bubble_fraction"] = bubble_fraction(report)
        values["out_of_memory_retried"] = int(report.retried)
        values |= _of_crossed(report.crossed)
    for name, num_bytes in (
        ("predicted_peak_gb", predicted_peak(report)),
        ("measured_peak_gb", measured_peak(report)),
    ):
        if decision.share and num_bytes is not None:
            values[name] = num_bytes / GIB
    if forest.unshared_by_routes:
        values["unshared_by_routes"] = forest.unshared_by_routes
    if decision.fallback:
        values["fallback_reason"] = decision.reason
    return {f"prefix_sharing/{name}": value for name, value in values.items()}


def _of_crossed(crossed: Crossed | None) -> Metrics:
    """What the rank exchanged with other data-parallel ranks."""
    if crossed is None:
        return {}
    return {
        "received_tokens": crossed.received_tokens,
        "sent_tokens": crossed.sent_tokens,
        "received_gb": crossed.received_bytes / GIB,
        "sent_gb": crossed.sent_bytes / GIB,
        "exchange_wait_s": crossed.waited(),
    }


def of_updates(updates: Sequence[Update]) -> Metrics:
    """Means over the updates of a step, and the largest differences if they were compared."""
    metrics: Metrics = {
        f"train/{name}": _mean([update.means[name] for update in updates])
        for name in updates[0].means
    }
    metrics["train/grad_norm"] = _mean([update.grad_norm for update in updates])
    metrics["train/grad_zeros"] = _mean([update.num_zeros for update in updates])
    metrics["train/updates_s"] = sum(update.seconds for update in updates)
    for phase in {phase: None for update in updates for phase in update.phases}:
        name = "wait_s" if phase == "wait" else f"phase_{phase.lower()}_s"
        spent = sum(update.phases.get(phase, 0.0) for update in updates)
        metrics[f"prefix_sharing/{name}"] = spent
    differences = [update.difference for update in updates if update.difference is not None]
    stock = [update.stock_seconds for update in updates if update.stock_seconds is not None]
    if differences:
        metrics["prefix_sharing/stock_updates_s"] = sum(stock)
        for name in ("loss_max_abs_diff", "grad_max_rel_diff", "param_max_abs_diff"):
            metrics[f"prefix_sharing/{name}"] = max(getattr(d, name) for d in differences)
    return metrics


def of_tokens(tokens: Mapping[str, float], seconds: float) -> Metrics:
    """Tokens of a step over the whole job, logical (`raw`) and executed, and their rates."""
    metrics: Metrics = {f"prefix_sharing/{name}": int(value) for name, value in tokens.items()}
    for name, value in tokens.items():
        metrics[f"train/{name}_per_s"] = value / seconds
    return metrics


def of_flops(logical: float, executed: float, rank_seconds: float, peak: float | None) -> Metrics:
    """Rates of the whole job's updates, a rank.

    Args:
        logical: FLOPs of all rollouts, as if each ran alone.
        executed: FLOPs that were computed.
        rank_seconds: seconds of the updates, times ranks.
        peak: FLOPs a second that the device can do at most, if that is known.
    """
    metrics: Metrics = {"prefix_sharing/tflops": executed / rank_seconds / 1e12}
    if peak:
        metrics["prefix_sharing/mfu"] = executed / rank_seconds / peak
        metrics["perf/mfu/actor"] = logical / rank_seconds / peak
    return metrics


def of_device(device: torch.device) -> Metrics:
    """The most device memory that this rank has had, since the run began; nothing on the CPU."""
    if device.type != "cuda":
        return {}
    return {
        "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated(device) / GIB,
        "perf/max_memory_reserved_gb": torch.cuda.max_memory_reserved(device) / GIB,
    }


def under_verls_names(metrics: Metrics, seconds: Mapping[str, float], num_ranks: int) -> Metrics:
    """Times and rates of a step under the names that verl gives them, for existing dashboards.

    Source: verl 0.9.1, `compute_timing_metrics` and `compute_throughout_metrics` of
    `verl.trainer.ppo.metric_utils`.

    Args:
        metrics: the step's other metrics.
        seconds: of the passes for `old_logprobs` and `ref_logprobs`, if they ran.
        num_ranks: of the job.
    """
    step, tokens = metrics["train/step_s"], metrics["prefix_sharing/raw_tokens"]
    if not isinstance(step, float) or not isinstance(tokens, int):
        raise RuntimeError(f"a step of {step} s and {tokens} tokens")
    passes = {"old_logprobs": "old_log_prob", "ref_logprobs": "ref"}
    return {
        **{f"timing_s/{passes[name]}": value for name, value in seconds.items()},
        "timing_s/update_actor": metrics["train/updates_s"],
        "timing_s/step": step,
        "perf/total_num_tokens": tokens,
        "perf/time_per_step": step,
        "perf/throughput": tokens / (step * num_ranks),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class MetricsWriter:
    """Writes a run's metrics; `begin` before the first step, `close` in the end.

    A run that is refused, in its first step or before, leaves nothing: no line is written before
    the first step is, and what Weights & Biases has written until then is removed.

    Args:
        folder: of the run; made if it is missing.
        first_step: what earlier lines say of this and later steps is dropped (a resumed run).
        wandb_project: project of Weights & Biases; its own variables (WANDB_MODE, ...) apply, and
            its files go to `folder`.

    Raises:
        UserError: the file cannot be written, or holds anything but metrics; or Weights &
            Biases is not installed.
    """

    def __init__(self, folder: Path, first_step: int = 1, wandb_project: str | None = None) -> None:
        self.path, self._board_folder, self._first = (
            folder / METRICS,
            folder / "tensorboard",
            first_step,
        )
        check_writable(self.path, makes_folders=True)
        check_folder_writable(self._board_folder)
        self._kept = _lines_before(self.path, first_step) if self.path.is_file() else ""
        self._file: TextIO | None = None
        self._board: Any = None
        self._project, self._wandb = wandb_project, None
        self._wandb_folder = folder / "wandb"
        self._wandb_folder_is_new = not os.path.lexists(self._wandb_folder)
        if wandb_project is not None:
            check_wandb()

    def begin(self) -> None:
        """Begins the run of Weights & Biases; the last check before the first step.

        Raises:
            UserError: it cannot; there is no login, say.
        """
        if self._project is None:
            return
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)  # else its files go elsewhere
        try:
            self._wandb = _wandb_run(self._project, self.path.parent)
        except UserError:
            self._forget_wandb()
            raise

    def _forget_wandb(self) -> None:
        if self._wandb_folder_is_new:
            shutil.rmtree(self._wandb_folder, ignore_errors=True)

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
        if self._wandb is not None:
            self._wandb.log(dict(metrics), step=step)

    def _opened(self) -> TextIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, self._kept)
        self._board = _tensorboard(self._board_folder, self._first)
        return open(self.path, "a", encoding="utf-8")

    def close(self) -> None:
        """Ends all of them; for Weights & Biases a run without a step has failed."""
        try:
            if self._wandb is not None:
                self._wandb.finish(exit_code=int(self._file is None))
                if self._file is None:
                    self._forget_wandb()
        finally:
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
        logger.info("tensorboard is not installed: metrics go to %s only", METRICS)
        return None
    return SummaryWriter(str(folder), purge_step=first_step)


def check_wandb() -> None:
    """Refuses a project of Weights & Biases if that is not installed.

    Raises:
        UserError: saying how to install it.
    """
    if importlib.util.find_spec("wandb") is None:
        raise UserError("--wandb needs Weights & Biases: pip install wandb")


def _wandb_run(project: str, folder: Path) -> Any:
    try:
        import wandb
    except ImportError as error:
        why = " ".join(str(error).split())
        raise UserError(
            f"--wandb {project}: Weights & Biases is installed and cannot be imported ({why});"
            " pip install --force-reinstall wandb"
        ) from None
    try:
        return wandb.init(project=project, name=folder.name, dir=str(folder))
    except (wandb.errors.Error, OSError, ValueError) as error:  # ValueError: of its settings
        whole = str(error) or type(error).__name__
        if not isinstance(error, ValueError):  # whose first line says nothing
            whole = whole.partition("\n")[0]
        why = " ".join(whole.split())[:200]
        raise UserError(
            f"--wandb {project}: {why}; log in with `wandb login`, or set WANDB_MODE=offline"
        ) from None


def _lines_before(path: Path, step: int) -> str:
    """The lines of earlier steps; a last line that was cut off is dropped."""
    kept = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line.decode("utf-8"))
                place = row["step"]
                if type(place) is not int:
                    raise TypeError(f"step is {str(place)[:40]}")
            except (ValueError, TypeError, LookupError, RecursionError) as error:
                if not line.endswith(b"\n"):
                    break
                why = str(error).partition("\n")[0][:100]
                raise UserError(
                    f"{path}:{number}: not a line of metrics ({why}); move the file away"
                ) from None
            if place < step:
                kept.append(line.decode("utf-8").rstrip("\r\n") + "\n")
    return "".join(kept)
