"""Makes the canonical plans in `schedules/` from schedules/catalogue.toml.  Pure.

    python -m megatron_prefix.lab.plans.catalogue schedules            # writes every plan
    python -m megatron_prefix.lab.plans.catalogue schedules --check    # fails if one differs
    python -m megatron_prefix.lab.plans.catalogue schedules --rollouts NAME FILE

The last writes rollouts of one step of the catalogue, so that its plans can be run with
`align --prefix-plan` or `train --prefix-plan` and the options that the folder's README names.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_prefix.errors import UserError
from megatron_prefix.features.plan_files.table import to_csv
from megatron_prefix.lab.data.pairs import pairs_of_groups
from megatron_prefix.lab.data.rollouts import Group, Rollout, write_rollouts
from megatron_prefix.plan.files import read_text, write_text
from megatron_prefix.plan.planner import best_plan
from megatron_prefix.tree import TreeOptions, build

if sys.version_info >= (3, 11):
    import tomllib as toml
else:
    import tomli as toml

_NODE = {"tokens", "trained", "leaves", "branches"}


@dataclass(frozen=True)
class CanonicalStep:
    """A step of the catalogue; "shape" in its file.

    Attributes:
        name: the first part of its files' names.
        about: what its plans show.
        options: how rollouts become segments.
        groups: its rollouts.
    """

    name: str
    about: str
    options: TreeOptions
    groups: tuple[Group, ...]


def file_name(shape: CanonicalStep, num_ranks: int, num_chunks: int) -> str:
    """Where a plan of the shape lies in the folder."""
    return f"{shape.name}-pp{num_ranks}{f'-vpp{num_chunks}' if num_chunks > 1 else ''}.csv"


def read_catalogue(folder: Path) -> tuple[list[CanonicalStep], list[tuple[int, int]]]:
    """The steps of a folder's catalogue, and the pipelines (ranks, model chunks) they are for.

    Raises:
        UserError: not a catalogue.
    """
    path = folder / "catalogue.toml"
    try:
        content = toml.loads(read_text(path))
        layouts = [(int(ranks), int(chunks)) for ranks, chunks in content["layouts"]]
        return [_shape(entry) for entry in content["shape"]], layouts
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a catalogue ({type(error).__name__}: {error})") from None


def plans(folder: Path) -> Iterator[tuple[str, str]]:
    """Name and content of every file that the folder must have."""
    shapes, layouts = read_catalogue(folder)
    for shape in shapes:
        forest = build(*pairs_of_groups(shape.groups), shape.options)
        for num_ranks, num_chunks in layouts:
            plan = best_plan(forest, num_ranks, num_chunks=num_chunks)
            yield file_name(shape, num_ranks, num_chunks), to_csv(plan)


def differing(folder: Path) -> list[str]:
    """Files that are missing, different, or not in the catalogue."""
    wanted = dict(plans(folder))
    files = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.csv")}
    return sorted(name for name in {*wanted, *files} if wanted.get(name) != files.get(name))


# Shapes -------------------------------------------------------------------------------------------


def _shape(entry: Mapping[str, Any]) -> CanonicalStep:
    tokens = itertools.count()  # no token comes twice, so rollouts share only what the tree says
    groups = tuple(
        Group(f"g{number}", tuple(_rollouts(f"g{number}", tree, tokens)))
        for number, tree in enumerate(entry["groups"])
    )
    options = TreeOptions(
        chunk_tokens=entry.get("chunk_tokens", 0),
        segment_tokens=entry["segment_tokens"],
        min_gain=0,
    )
    return CanonicalStep(entry["name"], entry["about"], options, groups)


def _rollouts(name: str, tree: Mapping[str, Any], tokens: Iterator[int]) -> Iterator[Rollout]:
    """The tree's rollouts; n shared positions are n + 1 shared tokens."""
    first = [next(tokens)]
    prompt_len = 1 + tree["tokens"]
    for number, (ids, trained) in enumerate(_paths(tree, first, [False], tokens)):
        edges = np.flatnonzero(np.diff([False, *trained, False]))
        loss = tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
        sequence = np.array(ids, np.int32)
        yield Rollout(name, str(number), sequence, prompt_len, loss, float(number % 2))


def _paths(
    node: Mapping[str, Any], ids: Sequence[int], trained: Sequence[bool], tokens: Iterator[int]
) -> Iterator[tuple[list[int], list[bool]]]:
    """Token ids and trained flags of every rollout below a node."""
    unknown = node.keys() - _NODE
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))}: a node has {', '.join(sorted(_NODE))}")
    ids = [*ids, *itertools.islice(tokens, node["tokens"])]
    trained = [*trained, *[node.get("trained", False)] * node["tokens"]]
    for branch in node.get("branches", ()):
        yield from _paths(branch, ids, trained, tokens)
    for length in node.get("leaves", ()):
        yield [*ids, *itertools.islice(tokens, length)], [*trained, *[True] * length]


# The command --------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> str | None:
    """The command; returns an error message or None."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="where the catalogue is")
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    parser.add_argument(
        "--rollouts", nargs=2, metavar=("NAME", "FILE"), help="write the rollouts of one shape"
    )
    args = parser.parse_args(arguments)
    try:
        if args.check:
            names = differing(args.folder)
            return f"not what the catalogue makes: {', '.join(names)}" if names else None
        if args.rollouts:
            return _write_rollouts(args.folder, *args.rollouts)
        for name, text in plans(args.folder):
            write_text(args.folder / name, text)
    except UserError as error:
        return str(error)
    return None


def _write_rollouts(folder: Path, name: str, path: str) -> str | None:
    shapes = {shape.name: shape for shape in read_catalogue(folder)[0]}
    if name not in shapes:
        return f"{name}: no such shape; the catalogue has {', '.join(shapes)}"
    write_rollouts(path, shapes[name].groups)
    return None


if __name__ == "__main__":
    sys.exit(main())
