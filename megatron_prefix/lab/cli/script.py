"""`python -m megatron_prefix.run SCRIPT [ARGUMENTS]`: a training script with the prefix schedule.

Our flags are taken off the command line, wherever they stand; the script sees the others, and runs
as if Python had been called with it. Neither torch nor Megatron is imported before it does.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import os
import runpy
import sys
from collections.abc import Sequence

from megatron_prefix import auto
from megatron_prefix.auto.settings import FIELDS, FILE, flag, read_config, variable
from megatron_prefix.config import CP_REDUCE, MEMORY_POLICIES, MODES
from megatron_prefix.errors import UserError
from megatron_prefix.lab.cli.main import Parser

PROG = "python -m megatron_prefix.run"
BEGIN = "--prefix-"
"""Of our flags."""
ALIKE = 0.8
"""Ratio of difflib from which a word is one of them, misspelt."""
_EPILOG = f"""\
Each flag has a variable: {flag("min_gain")} is {variable("min_gain")}, and
{flag("mode")} is {variable("mode")}. A flag wins over its variable, and that
over the TOML file that {FILE} names.

example:
  torchrun --nproc-per-node 8 -m megatron_prefix.run pretrain_gpt.py --num-layers 32 ... \\
      --prefix-schedule auto --prefix-segment-tokens 8192
"""
_HELP = {
    "mode": ("{" + ",".join(MODES) + "}", "off: Megatron's schedule; observe: the same, and the log"
             " says what sharing would save; auto: share where it is predicted to be faster"
             " (default); on: share every step"),
    "chunk_tokens": ("N|auto", "cut longer prompts into chunks of at most N tokens; 0: never"),
    "segment_tokens": ("N|auto", "most positions in one forward; 0: no limit"),
    "min_gain": ("N", "do not share a prefix that saves fewer than N tokens"),
    "align": ("N", "end shared prefixes at multiples of N, besides what the layout requires"),
    "loss_in_leaves": ("true|false", "share only what comes before the first trained token"),
    "trainer_masks": ("true|false", "use the loss masks of the trainer's microbatches (NeMo-RL)"),
    "kernel": ("NAME", "attention kernel, or auto"),
    "memory": ("{" + ",".join(MEMORY_POLICIES) + "}", "what a prompt keeps on the device between"
               " its forward and its backward"),
    "memory_budget_gb": ("X", "GiB that a step may use on top of what is allocated when it begins;"
                         " 0: the stock schedule's peak plus 5 %%"),
    "cache_host_layers": ("N", "number of layers whose K/V stay in host memory until they run"),
    "graph_tokens": ("N|auto", "run segments of up to N positions as CUDA graphs; 0: none"),
    "cp_reduce": ("{" + ",".join(CP_REDUCE) + "}", "when context-parallel ranks exchange a prompt's"
                  " K/V and gK/gV: for every wave, or once for each of its segments"),
    "across_ranks": ("{off,auto,on}", "share prompts across data-parallel ranks"),
    "run_ahead": ("{1,2}", "with pipeline stages, forwards that a stage runs ahead of the next"),
    "min_speedup": ("X", "in mode auto: share if the predicted speedup is at least X"),
    "cost_file": ("FILE", "keep what mode auto has measured in FILE, for the next run"),
    "watchdog_minutes": ("X", "log where every rank stands when a step takes X minutes and ten"
                         " times its usual time; 0: never"),
    "plan": ("FILE", "run this plan (written by `megatron-prefix plan --csv`)"),
    "verify": ("N", "run the first N shared updates, and the first N shared passes without"
               " gradients, with both schedules, and compare them"),
}  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROG,
        usage=f"{PROG} [--prefix-...] SCRIPT [ARGUMENTS]",
        description="Run a training script with the prefix schedule instead of Megatron's.",
        epilog=_EPILOG,
    )
    group = parser.add_argument_group("flags, anywhere on the line")
    for name, (metavar, text) in _HELP.items():
        group.add_argument(flag(name), dest=name, metavar=metavar, help=text)
    return parser


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our words of a command line, and those of the script, which begin with its path."""
    known = {flag(name) for name in FIELDS}
    ours: list[str] = []
    script: list[str] = []
    words = iter(argv)
    for word in words:
        name, equals, _ = word.partition("=")
        if name in known:
            ours += [word] if equals else [word, *itertools.islice(words, 1)]
        elif script or word not in ("-h", "--help"):
            script.append(word)
        else:
            ours.append(word)
    return ours, script


def _misspelt(words: Sequence[str]) -> str | None:
    """What is wrong with the first word that is nearly one of our flags; None: no word is.

    What follows "--prefix-" is compared, and strictly: a script may have flags that begin so.
    """
    known = {flag(name).removeprefix(BEGIN): flag(name) for name in FIELDS}
    for word in words:
        name = word.partition("=")[0]
        if name.startswith(BEGIN):
            for near in difflib.get_close_matches(name.removeprefix(BEGIN), known, 1, ALIKE):
                return f"{name}: did you mean {known[near]}?"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script.

    Its exceptions and exit codes pass through.

    Args:
        argv: arguments after the program's name (default: the process's own).

    Returns:
        The exit code; bad usage raises SystemExit(2).
    """
    ours, script = _split(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    flags = {name: text for name, text in vars(parser.parse_args(ours)).items() if text is not None}
    if problem := _misspelt(script):
        parser.error(problem)
    if not script or script[0].startswith("-"):
        parser.error(f"give a script{f' before {script[0]}' if script else ''}")
    if not os.path.isfile(script[0]):
        parser.error(f"{script[0]}: no such file")
    try:
        config = read_config(flags=flags)
    except UserError as error:
        parser.error(str(error))
    # For processes that the script starts, and trainers' plugins in this one.
    os.environ.update({variable(name): text for name, text in flags.items()})
    auto.on(config)
    sys.argv = script
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.abspath(script[0]))
    runpy.run_path(script[0], run_name="__main__")
    return 0
