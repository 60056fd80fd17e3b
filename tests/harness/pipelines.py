"""Steps through a pipeline of CPU ranks, by Megatron's schedule and by ours.

Rollouts are those of the catalogue (schedules/), so its plans can be run too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.data.pairs import pairs_of_groups
from megatron_prefix.lab.data.rollouts import Group, dense_vocabulary
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.plans import catalogue
from megatron_prefix.lab.runtime import Layout
from tests.harness import steps
from tests.harness.data import REPOSITORY
from tests.harness.steps import Microbatch

FOLDER = REPOSITORY / "schedules"
SHAPES = {shape.name: shape for shape in catalogue.read_catalogue(FOLDER)[0]}


def config_of(shape: str, layout: Layout, *, planned: bool = False, **prefix: Any) -> PrefixConfig:
    """The prefix schedule's, with a shape's lengths; `planned`: with its plan file."""
    found = SHAPES[shape]
    options = found.options
    path = FOLDER / catalogue.file_name(found, layout.pp, layout.vpp)
    lengths = {name: getattr(options, name)
               for name in ("chunk_tokens", "segment_tokens", "min_gain")}  # fmt: skip
    plan_file = str(path) if planned else None
    return PrefixConfig(**{**lengths, "kernel": "math", "plan_file": plan_file, **prefix})


def rollouts_of(shape: str) -> tuple[list[Group], int]:
    """The shape's rollouts in a dense vocabulary, and its size; two of its groups are several."""
    several = shape == "several-groups"
    groups, size, _ = dense_vocabulary(SHAPES[shape].groups[: 2 if several else None])
    return groups, size


def build_chunks(layout: Layout, vocab: int) -> list[Any]:
    """This rank's model chunks with one layer each, in fp64."""
    spec = resolve("tiny-llama", num_layers=layout.pp * layout.vpp).with_vocab(vocab)
    return build_model(spec, layout=layout, dtype="float64")


def microbatches(groups: Sequence[Group]) -> list[Microbatch]:
    rollouts, numbers = pairs_of_groups(groups)
    return [
        steps.microbatch([pairs], number, uid, vocab=1 << 30)
        for uid, (pairs, number) in enumerate(zip(rollouts, numbers, strict=True))
    ]
