"""Parts of documents that are made of the code: `python -m tests.repository.generated` writes them.

Each lies between two comments of its page, which name it.
"""

import argparse
import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.trainers import on_ray, slime_run, verl_run
from megatron_prefix import trainers
from megatron_prefix.auto.settings import FIELDS, flag, variable
from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import WRONG, Refusal
from megatron_prefix.lab.cli.main import make_parser
from megatron_prefix.refusals.table import GROUPS, TABLE
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.trainers.trainer import Trainer
from tests.harness.data import REPOSITORY

DOCS = REPOSITORY / "docs"
COMMAND = "python -m tests.repository.generated"
NAMES = [trainer.name for trainer in trainers.TRAINERS]
PART = re.compile(rf"<!-- ([a-z_]+): {COMMAND} -->\n(.*?)<!-- end of \1 -->\n", re.S)


def attributes(kind: type) -> dict[str, str]:
    """What the docstring of a class says of each of its fields, on one line."""
    text = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2]
    parts = re.split(r"^    (\w+): ", text, flags=re.M)[1:]
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return {name: " ".join(said.split()) for name, said in pairs}


def options() -> dict[str, str]:
    """Fields of PrefixConfig that verbs have an option for, and the option."""
    found: dict[str, str] = {}
    for verb in ("plan", "bench", "align", "train"):  # the last one counts
        verbs = next(a for a in make_parser(verb)._actions if isinstance(a.choices, dict))
        for action in verbs.choices[verb]._actions:
            if (named := f"--{action.dest.replace('_', '-')}") in action.option_strings:
                found[action.dest] = named
    renamed = {"mode": "prefix_schedule", "plan_file": "prefix_plan"}
    names = {field.name: renamed.get(field.name, field.name) for field in FIELDS.values()}
    return {name: found[dest] for name, dest in names.items() if dest in found}


def shown(default: Any) -> str:
    """A default as a user writes it."""
    if default is None:
        return "not set"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def configuration() -> str:
    """A heading for every setting: its default, names and meaning."""
    said, verbs, lines = attributes(PrefixConfig), options(), []
    for name, field in FIELDS.items():
        names = [f"`{variable(name)}`", f"`{flag(name)}`"]
        if field.name in verbs:
            names.append(f"verbs: `{verbs[field.name]}`")
        text = re.sub(r'"([\w+]+)"', r"`\1`", said[field.name])
        lines += [f"### `{field.name}`", "", f"{text[0].upper()}{text[1:]}", ""]
        lines += [f"Default {shown(field.default)}. {', '.join(names)}.", ""]
    return "\n".join(lines)


def callbacks() -> str:
    """A line for every argument of `get_forward_backward_func` beside the configuration."""
    said = attributes(Callbacks)
    names = [field.name for field in dataclasses.fields(Callbacks)]
    return "".join(f"- `{name}`: {said[name]}\n" for name in names)


def refusal_row(refusal: Refusal) -> str:
    never = "never" if refusal.kind == WRONG else "not yet"
    auto = "error" if refusal.ends else "stock schedule"
    if refusal.where in NAMES:  # a trainer's own option: not all are noticed
        auto = "see its page"
    return f"| {refusal.name} | {refusal.fix} | {never} | {auto} |\n"


def refusals() -> str:
    """A table of refusals for every place where they are met."""
    lines = []
    for where, rows in itertools.groupby(TABLE, lambda one: one.where):
        title = GROUPS[where]
        title = title if where in NAMES else title[0].upper() + title[1:]
        lines += [f"## {title}\n\n| refused | what to do, and why | supported | mode `auto` |\n"]
        lines += ["|---|---|---|---|\n", *map(refusal_row, rows), "\n"]
    return "".join(lines)


def page_of(trainer: Trainer) -> Path:
    return DOCS / "trainers" / f"{trainer.name.lower().replace('-', '_')}.md"


def at_a_glance(trainer: Trainer) -> str:
    rows = [
        ("turned on by", trainer.on),
        ("trained positions", trainer.loss),
        ("keeps a group on one data-parallel rank", trainer.together),
        *((f"refused: {one.name}", one.fix) for one in trainer.refused),
        ("versions that were run", ", ".join(trainer.tried) or "none: read only"),
    ]
    return "| | |\n|---|---|\n" + "".join(f"| {name} | {said} |\n" for name, said in rows)


PARTS: dict[Path, dict[str, Callable[[], str]]] = {
    DOCS / "configuration.md": {"settings": configuration, "arguments": callbacks},
    DOCS / "refusals.md": {"refusals": refusals},
    DOCS / "whole-runs.md": {
        "verl": functools.partial(on_ray.table, verl_run.STAND_INS),
        "slime": functools.partial(on_ray.table, slime_run.STAND_INS),
    },
    **{page_of(one): {"trainer": functools.partial(at_a_glance, one)} for one in trainers.TRAINERS},
}


def written(text: str, parts: dict[str, Callable[[], str]]) -> str:
    """A page with its parts made anew."""

    def made(found: re.Match[str]) -> str:
        name = found[1]
        return f"<!-- {name}: {COMMAND} -->\n{parts[name]()}<!-- end of {name} -->\n"

    return PART.sub(made, text)


def stale() -> Iterator[tuple[Path, str]]:
    """Pages whose parts are not what the code says, and what they should be."""
    for path, parts in PARTS.items():
        text = path.read_text(encoding="utf-8")
        if {found[1] for found in PART.finditer(text)} != {*parts}:
            raise ValueError(f"{path} has other parts than {', '.join(parts)}")
        if (new := written(text, parts)) != text:
            yield path, new


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for path, text in stale():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
