"""What `replay` writes: its JSON after every step, its picture now and then, and both at the end.

Whatever ends a replay, its JSON has the steps so far, with `"ended": false` and no `passed`; so has
the picture, unless a signal ends the rank that draws it, as happens when several ranks are stopped.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from megatron_prefix.lab.cli.modelling import machine
from megatron_prefix.lab.cli.outputs import save_figure, write_text
from megatron_prefix.lab.cli.report import to_json

DRAWING_SHARE = 0.05
"""Of a replay's time, at most, goes into pictures of its first steps."""


class ReplayFiles:
    """The files that the command line asks for.

    Args:
        replayed: what is replayed (`Replayed` in lab/cli/replay.py); its `args` have `result_json`
            and `plot`, each a path or None.
    """

    def __init__(self, replayed: Any) -> None:
        self._args, self._replayed = replayed.args, replayed
        self._drawn_at, self._drawing_s = time.monotonic(), 0.0
        self._undrawn: Any = None

    def result_of(self, result: Any) -> dict[str, Any]:
        """The JSON object of `verify.replay.Replay`, with what was replayed on which machine."""
        args, settings = self._args, self._replayed.settings
        return {
            **machine(args),
            "layout": self._replayed.job.layout,
            "rollouts": args.rollouts,
            "lr": settings.lr,
            "groups_per_step": settings.groups_per_step,
            "baseline": settings.baseline,
            "prefix_schedule": settings.prefix.mode,
            "same_routes": settings.routes == "given",
            "compared": "fp32 main parameters" if args.dtype == "bfloat16" else "parameters",
            "num_steps": self._replayed.steps,
            **self._replayed.left_out,
            **vars(result),
        }

    def write(self, result: Any) -> None:
        """Writes what there is at the end.

        Raises:
            UserError: a file cannot be written.
        """
        if self._args.result_json:
            self._write_json(result)
        if self._args.plot and result.steps:
            self._draw(result)

    @contextlib.contextmanager
    def kept(self) -> Iterator[ReplayFiles]:
        """Around the steps: whatever raises inside, the picture has all steps that `keep` got."""
        try:
            yield self
        except BaseException:
            if self._undrawn is not None:
                self._draw(self._undrawn)
            raise

    def keep(self, result: Any) -> None:
        """Writes what there is meanwhile; to files only: a pipe would get all of it again.

        Raises:
            UserError: a file cannot be written.
        """
        if _is_file(self._args.result_json):
            self._write_json(result)
        if not (_is_file(self._args.plot) and result.steps):
            return
        self._undrawn = result
        if DRAWING_SHARE * (time.monotonic() - self._drawn_at) >= self._drawing_s:
            self._draw(result)

    def _write_json(self, result: Any) -> None:
        write_text(self._args.result_json, to_json(self.result_of(result)) + "\n")

    def _draw(self, result: Any) -> None:
        from megatron_prefix.lab.view import drift

        begin, self._undrawn = time.monotonic(), None
        save_figure(drift.figure(asdict(result)), self._args.plot)
        self._drawn_at = time.monotonic()
        self._drawing_s = self._drawn_at - begin


def _is_file(path: str | None) -> bool:
    if not path or path == "-":
        return False
    return os.path.isfile(path) or not os.path.exists(path)
