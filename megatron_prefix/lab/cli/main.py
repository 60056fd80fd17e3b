"""`megatron-prefix VERB ...`: finds the verb, runs it, turns errors into exit codes.

A verb is a module with `HELP` and `EPILOG` (texts of its --help, the latter with examples),
`add_arguments(parser)` and `run(args) -> int`.  It is imported only when it is used, so `plan`
never waits for torch.

Exit codes: 0 success; 1 a failed check; 2 bad usage or bad input, with one line on stderr (under
torchrun the first rank's, and then a report of torchrun's own); 130 after Ctrl-C; 141 when the
reader of a pipe went away; 143 after TERM (128 and the signal's number).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import io
import logging
import os
import sys
import textwrap
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from megatron_prefix import __version__
from megatron_prefix.auto.first_line import first_line
from megatron_prefix.errors import UserError, bounded
from megatron_prefix.lab.cli.arguments import add_output
from megatron_prefix.lab.runtime import groups
from megatron_prefix.lab.runtime.launch import RankError

PROG = "megatron-prefix"
# verb: (module, one line for the list of verbs)
VERBS = {
    "plan": ("plan", "what sharing saves on a rollout file: trees, ratios, speedup, pipeline"),
    "show": ("show", "a plan file: its grid and its simulated timeline"),
    "align": ("align", "check that stock and prefix schedule agree, step against step"),
    "matrix": ("matrix", "align over many layouts: one table, one line per layout"),
    "train": ("train", "GRPO actor updates over a rollout file"),
    "replay": ("replay", "many GRPO steps by either schedule: how far the runs drift apart"),
    "bench": ("bench", "time both schedules side by side in one run"),
    "doctor": ("doctor", "versions, devices, kernels, and what is unsupported and why"),
    "generate": ("generate", "make a rollout file of a given size and tree shape"),
    "import": ("importing", "make a rollout file from what a trainer dumped"),
}
_EPILOG = f"""\
examples:
  {PROG} generate rollouts.jsonl.gz --groups 4 --prompt-tokens 2048 --rollouts 8
  {PROG} plan rollouts.jsonl.gz --pp 4 --chunk-tokens auto --svg plan.svg
  {PROG} align --rollouts rollouts.jsonl.gz --groups 1 --max-tokens 256 --dtype float64
  {PROG} VERB --help
"""
_WORDS = """

words:
  group: the rollouts of one prompt; span: positions that the same rollouts share; segment: what
  one forward or backward runs; inner segment: a shared prompt; wave: answers that run together;
  leaf: the last part of a rollout, which no other has. More: docs/how-it-works.md"""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps names such as tiny-llama on one line, so that they can be searched for and copied."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line, and with examples printed unchanged."""

    def __init__(self, **options: Any) -> None:
        defaults: dict[str, Any] = dict(
            formatter_class=_Formatter,
            allow_abbrev=False,  # abbreviations would break when an option is added
        )
        super().__init__(**{**defaults, **options})

    def error(self, message: str) -> NoReturn:
        """Exits with code 2."""
        first_line(f"{self.prog}: {bounded(' '.join(message.split()))} (see {self.prog} --help)")
        self.exit(2)


def make_parser(verb: str | None) -> argparse.ArgumentParser:
    """The parser of all verbs; only the verb in use is imported and has its arguments."""
    parser = Parser(
        prog=PROG,
        description="Run a prompt that rollouts share once, exactly, in Megatron-Core.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, title="verbs")
    for name, (module_name, help_line) in VERBS.items():
        if name != verb:
            verbs.add_parser(name, help=help_line)
            continue
        module = _module(name, module_name)
        one = verbs.add_parser(
            name, help=help_line, description=module.HELP + _WORDS, epilog=module.EPILOG
        )
        module.add_arguments(one)
        add_output(one)
        one.set_defaults(run=module.run)
    return parser


def _module(verb: str, name: str) -> Any:
    path = f"megatron_prefix.lab.cli.{name}"
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        raise UserError(f"{verb} is not in this release ({__version__}); use a later one") from None


def _print_any_text() -> None:
    """Let names that the terminal's encoding lacks be printed as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def _without_other_warnings() -> Iterator[None]:
    """Keeps other packages' warnings off stderr, in ranks that are started meanwhile too.

    Those of a machine without apex or transformer-engine are ten lines, in every command.
    """
    before = os.environ.get("PYTHONWARNINGS")
    fallback = logging.lastResort or logging.NullHandler()  # prints what no handler takes
    ours = logging.Filter("megatron_prefix")
    fallback.addFilter(ours)
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        fallback.removeFilter(ours)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; where process groups are left that no rank answers any more (under
    torchrun), the process ends here, with the exit code.

    Args:
        argv: arguments after the program's name (default: the process's own).

    Returns:
        The exit code; bad usage found by argparse raises SystemExit(2) instead.
    """
    try:
        code = _run(argv)
    except Exception:
        if not groups.ends_with_groups():
            raise
        traceback.print_exc()
        code = 1
    if groups.ends_with_groups():
        groups.end(code)
    return code


def _run(argv: Sequence[str] | None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    verb = next((word for word in argv if not word.startswith("-")), None)
    _print_any_text()
    try:
        args = make_parser(verb).parse_args(argv)
        with contextlib.nullcontext() if args.verbose else _without_other_warnings():
            code = args.run(args)
        sys.stdout.flush()
        return int(code)
    except UserError as error:
        # One line, whatever was raised: only `show` prints the grid of an invalid plan.
        line = str(error).partition("\n")[0]
        first_line(f"{PROG} {verb}: {line}")
        return 2
    except RankError as error:  # its text has the rank's traceback; this process's says nothing
        print(f"{PROG} {verb}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{PROG} {verb}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _discard_stdout()
        return 141
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename:
            raise
        _discard_stdout()
        print(f"{PROG} {verb}: stdout: cannot be written ({error.strerror})", file=sys.stderr)
        return 2


def _discard_stdout() -> None:
    """Python would flush it once more at exit, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
