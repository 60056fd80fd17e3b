"""Arguments that several verbs share, and the objects made of them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from megatron_prefix.config import CHOICES, KERNELS, MOST_COUNT, MOST_MEMORY_GB, PrefixConfig
from megatron_prefix.errors import shown
from megatron_prefix.features.measure.cost_file import read_costs
from megatron_prefix.features.plan_files.plan_file import PlanFile
from megatron_prefix.lab.plans.dealing import DEALS
from megatron_prefix.lab.rl.baseline import BASELINES, Baseline
from megatron_prefix.lab.rl.settings import LEAST, LOSS_MEANS
from megatron_prefix.lab.runtime.groups import MESSAGE_TIMEOUT_MINUTES
from megatron_prefix.lab.runtime.layout import SIZES, Layout
from megatron_prefix.plan.files import check_writable

_OPTIONS = {
    "mode": "prefix_schedule",
    "plan_file": "prefix_plan",
    "num_minibatches": "minibatches",
}
"""Fields whose options have other names."""
_MOST = {"memory_budget_gb": MOST_MEMORY_GB}


MOST = MOST_COUNT
"""The largest count or size that a verb takes; --seed may be larger."""


def whole(least: int = 1, most: int = MOST) -> Callable[[str], int]:
    """An argparse type: an integer from `least` to `most`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{shown(text)} is not an integer from {least} to {most}"
            )
        return value

    return parse


def real(least: float = 0.0, most: float = MOST) -> Callable[[str], float]:
    """An argparse type: a number from `least` to `most`, so neither infinite nor NaN."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{shown(text)} is not a number from {least:g} to {most:g}"
            )
        return value

    return parse


seed = whole(0, 2**63 - 1)
"""The argparse type of a seed: the range of both torch and numpy."""


def _length(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return whole(0)(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is neither 'auto' nor an integer from 0 to {MOST}"
        ) from None


# One option ---------------------------------------------------------------------------------------


def add_number(
    group: Any,
    flag: str,
    text: str,
    default: float | None = None,
    kind: Callable[[str], float] = whole(),  # noqa: B008
    metavar: str = "N",
) -> None:
    """An option for a number; `{}` in its help is the default."""
    help_text = text.format(_short(default))
    group.add_argument(flag, type=kind, default=default, metavar=metavar, help=help_text)


def add_text(group: Any, flag: str, text: str, **more: Any) -> None:
    """An option for a path or another text, with more arguments of argparse."""
    group.add_argument(flag, **{"metavar": "FILE", "help": text, **more})


def add_switch(group: Any, flag: str, text: str) -> None:
    """An option without a value."""
    group.add_argument(flag, action="store_true", help=text)


def add_choice(group: Any, flag: str, text: str, choices: Sequence[str], default: str) -> None:
    """An option for one of several words; `{}` in its help is the default."""
    group.add_argument(flag, choices=choices, default=default, help=text.format(default))


# Groups of arguments ------------------------------------------------------------------------------


def add_output(parser: argparse.ArgumentParser) -> None:
    """`--json`, `--progress` and `--verbose`, which every verb has; see report.py and main.py."""
    group = parser.add_argument_group("output")
    add_switch(group, "--json", "one JSON object on stdout, nothing else")
    text = "show progress on stderr even if it is not a terminal"
    add_switch(group, "--progress", text)
    add_switch(group, "--verbose", "show other packages' warnings on stderr too")


def add_out(parser: argparse.ArgumentParser) -> None:
    """`OUT` and `--overwrite`; see outputs.write_and_print."""
    parser.add_argument("out", metavar="OUT", help="rollout file to write; .gz compresses it")
    add_switch(parser, "--overwrite", "replace OUT if it is there")


def add_rollouts(
    parser: argparse.ArgumentParser,
    *,
    positional: bool = False,
    several: str = "several make one step",
) -> None:
    """`ROLLOUTS...` or `--rollouts FILE...`, `--groups`, `--max-tokens`; see inputs.load_groups.

    Args:
        parser: of the verb.
        positional: whether the files are given without an option.
        several: what becomes of several files, for the help.
    """
    group = parser.add_argument_group("rollouts")
    text = f"rollout file (JSON lines, .gz or plain); {several}"
    if positional:
        group.add_argument("rollouts", metavar="ROLLOUTS", nargs="+", help=text)
    else:
        add_text(group, "--rollouts", text, nargs="+", required=True)
    add_number(group, "--groups", "take at most the first N groups (default: all)")
    text = (
        "shorten rollouts to N tokens: cut the beginning of the shared prompt down to N/2, then the"
        " end of each rollout"
    )
    add_number(group, "--max-tokens", text, kind=whole(2))


_LAYOUT = {
    "tp": "tensor parallel size (default {})",
    "pp": "pipeline parallel size (default {})",
    "vpp": "model chunks per pipeline stage (default {})",
    "cp": "context parallel size (default {})",
    "ep": "expert parallel size (default {})",
    "dp": "data parallel size (default: the ranks that are left, or what --ep needs)",
    "sequence_parallel": "Megatron's sequence parallelism, over the tensor-parallel ranks",
}


def add_layout(parser: argparse.ArgumentParser) -> None:
    """`--tp --pp --vpp --cp --ep --dp --sequence-parallel`; see `layout_of`."""
    add_fields(parser.add_argument_group("parallel layout"), Layout, _LAYOUT, dp=None)


def add_messages(parser: argparse.ArgumentParser, *, watchdog: bool = True) -> None:
    """`--message-timeout-minutes`, and of `config_of` `--watchdog-minutes`."""
    text = (
        "minutes after which a rank stops waiting for another; give more than the longest step"
        " takes (default {})"
    )
    group, kind = parser.add_argument_group("ranks"), real(0.01, 10_000)
    add_number(group, "--message-timeout-minutes", text, MESSAGE_TIMEOUT_MINUTES, kind, "X")
    if watchdog:
        add_config(group, "watchdog_minutes")


def layout_of(args: argparse.Namespace, world_size: int | None = None) -> Layout:
    """The layout that `add_layout` read, for `world_size` ranks (None: as many as needed).

    Raises:
        UserError: sizes that contradict.
    """
    sizes = {field.name: getattr(args, field.name) for field in fields(Layout)}
    return Layout.fill(world_size=world_size, **sizes)


# Fields of PrefixConfig ---------------------------------------------------------------------------

_TEXTS = {
    "chunk_tokens": "cut prompts and other spans longer than N into chunks; 0: never; auto: the"
    " length with the shortest simulated step (default {})",
    "segment_tokens": "most positions in one forward (a single span may exceed it); 0: no limit;"
    " auto: for each step the fastest length that fits the memory limit. A given N is halved, up to"
    " three times (with --pp four), where only that fits (default {})",
    "min_gain": "do not share a prefix that saves fewer than N tokens. A prompt runs apart"
    " from the suffixes that read it only if that saves 32 N tokens, or a 16th of the step; a"
    " shorter one runs within their forwards. 0: share every prefix, always apart (default {})",
    "align": "end shared prefixes at multiples of N, in addition to what the layout requires; 64"
    " makes GatedDeltaNet's results independent of where sequences are cut (default {})",
    "loss_in_leaves": "share only what comes before a rollout's first trained token; results are"
    " the same without it",
    "run_ahead": "with --pp, how many forwards a stage runs ahead of the next one: 1 needs less"
    " memory, 2 waits less (default {})",
    "plan_file": "run this plan (a file written by `plan --csv`) instead of the planner's; it must"
    " fit the rollouts, the lengths and the layout",
    "watchdog_minutes": "log on every rank what a step is doing once it has taken X minutes and ten"
    " times its usual and its predicted time; 0: never (default {})",
    "cost_file": "file in which mode auto keeps its measurements of this model, layout and device"
    " for the next run",
    "memory": "what an inner segment keeps until its backward. retain: its saved tensors;"
    " recompute_act: the same without the outputs of MLP activation functions, which run again, in"
    " waves too; offload: saved tensors move to the host; recompute: only K/V and its input, and"
    " its forward runs again; auto (default): for each segment the cheapest of these that fits the"
    " memory limit (offload only with --memory-budget-gb)",
    "memory_budget_gb": "memory limit of a step: GiB on the device on top of what is allocated when"
    " it begins; 0: the stock schedule's peak plus 5 %%. In mode auto a step that cannot fit runs"
    " with the stock schedule (default 0)",
    "cache_host_layers": "number of layers whose K/V or recurrent states, and their gradients, stay"
    " in host memory until the layer runs: for prompts whose K/V do not fit (default {})",
    "graph_tokens": "run the layers of segments of up to N positions as CUDA graphs, except"
    " experts, Mamba2's scan and some attention: for narrow ranks and short segments, whose host"
    " sets the time. What such a segment keeps stays allocated. auto: the longest length at which"
    " the device waits for the host, if the first steps get faster and fit the memory limit; 0: no"
    " graphs (default {})",
    "cp_reduce": "with --cp, when K/V are gathered and gK/gV sent back. wave: for every wave;"
    " segment: once for each segment, which sends less, but every rank keeps all K/V; auto"
    " (default): segment if it fits",
    "across_ranks": "run a prefix that several data-parallel ranks share on one of them. auto:"
    " where it is possible, predicted to be faster, and fits the memory limit; on: always, and what"
    " prevents it is an error (default: off, in mode auto: auto)",
    "kernel": f"attention kernel: {', '.join(KERNELS)} (docs/configuration.md says what they are),"
    " A+B (A where queries read a prompt's keys, B where they read their own), or auto (default)",
}
_OLD_FLAGS = {"segment_tokens": ["--wave-tokens"]}
_CHOICES = {**CHOICES, "loss_mean": LOSS_MEANS, "deal": DEALS}
_LEAST = {**LEAST, **dict.fromkeys(("align", "pack_tokens", "steps", *SIZES), 1)}


def add_fields(group: Any, owner: type, texts: Mapping[str, str], **defaults: Any) -> None:
    """Options of a parser, or of a group of one, for fields of a dataclass.

    Type, range, choices and default are those of the field.

    Args:
        group: gets the options.
        owner: the dataclass.
        texts: help of each field; `{}` in it is the default.
        defaults: instead of the fields' own, by name.
    """
    for name, text in texts.items():
        field = owner.__dataclass_fields__[name]  # type: ignore[attr-defined]
        default = defaults.get(name, None if field.default is MISSING else field.default)
        kinds: dict[str, dict[str, Any]] = {
            "bool": {"action": "store_true"},
            "int": {"type": whole(_LEAST.get(name, 0)), "metavar": "N"},
            "int | str": {"type": _length, "metavar": "N|auto|0"},
            "float": {"type": real(0, _MOST.get(name, MOST)), "metavar": "X"},
            "str": {"metavar": "NAME"},
            "str | None": {"metavar": "FILE"},
        }
        kind = kinds[str(field.type)]
        if name in _CHOICES:
            kind = {"type": type(_CHOICES[name][0]), "choices": _CHOICES[name]}
        group.add_argument(
            "--" + _OPTIONS.get(name, name).replace("_", "-"),
            *_OLD_FLAGS.get(name, ()),
            default=default,
            help=text.format(_short(default)),
            **kind,
        )


def _short(value: Any) -> str:
    """A default for people: 0.1, 1e-6."""
    return f"{value:g}".replace("e-0", "e-") if isinstance(value, float) else str(value)


def add_config(group: Any, *names: str, texts: Mapping[str, str] = _TEXTS) -> None:
    """Options for fields of PrefixConfig, with the verb's own texts for some; see `config_of`."""
    add_fields(group, PrefixConfig, {name: texts.get(name, _TEXTS[name]) for name in names})


def add_lengths(parser: argparse.ArgumentParser, texts: Mapping[str, str] = _TEXTS) -> None:
    """Options of tree and plan: `--chunk-tokens --segment-tokens --min-gain ...`."""
    group = parser.add_argument_group("lengths, in tokens")
    names = ("chunk_tokens", "segment_tokens", "min_gain", "align", "loss_in_leaves", "run_ahead")
    add_config(group, *names, texts=texts)
    # The old name of the option, for existing scripts.
    group.add_argument(
        "--extra", dest="run_ahead", type=int, choices=(1, 2), help=argparse.SUPPRESS
    )


def add_baseline(parser: argparse.ArgumentParser) -> None:
    """`--baseline --pack-tokens --shuffle --deal`; see `baseline_of`."""
    group = parser.add_argument_group("baseline")
    text = (
        "microbatches of both schedules. packed (default): several rollouts in one sequence (THD),"
        " as trainers run them; rollout: one rollout each"
    )
    add_choice(group, "--baseline", text, BASELINES, BASELINES[0])
    text = (
        "most positions of a packed microbatch, over all context-parallel ranks; a longer rollout"
        " has a microbatch to itself (default {})"
    )
    add_fields(group, Baseline, {"pack_tokens": text})
    text = "take a step's rollouts in a random order, which spreads groups over microbatches"
    group.add_argument("--shuffle", action="store_true", help=text)
    add_deal(group)


def add_deal(group: Any) -> None:
    """`--deal`."""
    text = (
        "how a step's rollouts are dealt to data-parallel ranks. groups (default): whole groups,"
        " balanced by the tokens that ranks execute; length: equal numbers of rollouts with about"
        " equal lengths, whatever their groups, as verl does by default; random: equal numbers, at"
        " random"
    )
    add_fields(group, Baseline, {"deal": text})


def baseline_of(args: argparse.Namespace) -> Baseline:
    """The baseline that `add_baseline` read."""
    return Baseline(args.baseline, args.pack_tokens, args.shuffle, deal=args.deal)


def config_of(args: argparse.Namespace, **more: Any) -> PrefixConfig:
    """The PrefixConfig of a verb's options; fields in `more` win over them.

    Options have the names of their fields; a field whose option the verb lacks keeps its default.

    Raises:
        UserError: values that contradict, or a plan that cannot run.
    """
    names = {field.name: _OPTIONS.get(field.name, field.name) for field in fields(PrefixConfig)}
    given = vars(args)
    values = {name: given[option] for name, option in names.items() if option in given}
    config = PrefixConfig(**{**values, **more})
    if config.plan_file:
        PlanFile(config.plan_file, config.memory)  # refuse a bad plan before ranks are started
    if config.cost_file is not None:  # likewise
        check_writable(config.cost_file, makes_folders=True)
        read_costs(config.cost_file)
    return config
