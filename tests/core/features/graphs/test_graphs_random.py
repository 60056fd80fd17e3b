"""Random models with recurrent layers, trees and events between steps, with graphs and without.

Launches are noted and launched again on the CPU.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megatron_prefix.config import PrefixConfig
from megatron_prefix.features.graphs import layers
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.verify import align
from megatron_prefix.run.schedule import PrefixSchedule
from tests.core.features.graphs.test_graphs import made, same
from tests.harness import one_group
from tests.harness.fuzzing import rounds
from tests.harness.hybrid import GDN, MAMBA, gated_delta, mamba
from tests.harness.one_rank import one_rank, small_model
from tests.harness.recorded import RecordedGraph, cores_in_fp64, recorded_graphs  # noqa: F401
from tests.harness.steps import Contract, call

STEPS = 3
EVENTS = (
    "", "", "weights move", "weights change", "gradients move", "some are frozen", "a hook",
    "no hook", "a pass without gradients", "a forward fails", "a backward fails",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


class Failed(Exception):
    """Of a layer."""


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(*_: Any) -> Any:
        raise Failed


@dataclass(frozen=True)
class Case:
    """What a seed draws.

    Attributes:
        name, fields: of the model.
        options: of the schedule.
        batches: arguments of `generate`, of every step.
        events: what happens in front of each.
    """

    name: str
    fields: dict[str, Any]
    options: dict[str, Any]
    batches: tuple[tuple[tuple[int, ...], dict[str, Any]], ...]
    events: tuple[str, ...]

    @classmethod
    def drawn(cls, rng: random.Random) -> Case:
        """By a generator."""
        name = rng.choice((GDN, MAMBA))
        fields = delta_fields(rng) if name == GDN else scan_fields(rng)
        options = dict(
            kernel="math", min_gain=rng.choice((0, 4, 8)),
            segment_tokens=rng.choice((8, 16, 24, 48)), chunk_tokens=rng.choice((0, 2, 4, 8, 16)),
            memory=rng.choice(("retain", "retain", "recompute", "recompute_act", "offload")),
            graph_tokens=rng.choice((16, 32, 48, 64)),
        )  # fmt: skip
        batches = tuple(batch(rng) for _ in range(STEPS))
        return cls(name, fields, options, batches, tuple(rng.choices(EVENTS, k=STEPS)))


def delta_fields(rng: random.Random) -> dict[str, Any]:
    """Of a model with GatedDeltaNet and attention with a gate."""
    layers, heads = rng.choice((2, 3)), rng.choice((1, 2, 4))
    return gated_delta(layers, rng.randint(2, layers + 1)) | {
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads * rng.choice((1, 2)),
        "linear_key_head_dim": rng.choice((4, 8)),
        "linear_value_head_dim": rng.choice((4, 8)),
        "linear_conv_kernel_dim": rng.choice((2, 3, 4)),
    }


def scan_fields(rng: random.Random) -> dict[str, Any]:
    """Of a model with Mamba2."""
    letters = [*rng.choices("M*-", k=rng.randint(1, 3)), "M"]
    rng.shuffle(letters)
    return mamba("".join(letters)) | {"rope": rng.choice((True, False))}


def batch(rng: random.Random) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Of a step: groups, positions of prompts and of responses, rollouts a group; its tree."""
    tree, depth = rng.choice(("flat", "branch", "turns")), 2
    longest = max(15 * depth * (tree == "turns"), rng.choice((4, 9, 16)))
    uneven = tree != "turns" and rng.random() < 0.5
    sizes = rng.choice((1, 2)), rng.choice((6, 11, 24)), longest, rng.choice((2, 3))
    return sizes, dict(tree=tree, depth=depth, uneven=uneven, seed=rng.randrange(1000))


def ran(case: Case, rng: random.Random) -> tuple[list[align.Trace], int]:
    """Traces of its steps, and how often layers were captured."""
    model, schedule = (
        small_model(case.name, spec=case.fields),
        PrefixSchedule(PrefixConfig(**case.options)),
    )
    found, hooks = [], []
    for (sizes, shape), event in zip(case.batches, case.events, strict=True):
        items = align.microbatches([*generate(*sizes, vocab_size=64, **shape)], shape["seed"])
        happen(event, unwrap(model).decoder, hooks, rng)
        if event == "a pass without gradients":
            call(schedule, Contract().step, model, one_group.items(), forward_only=True)
        if event.endswith("fails"):
            failing = fail(event, rng.choice([*unwrap(model).decoder.layers]), rng.randint(1, 6))
            with contextlib.suppress(Failed):  # a layer may run less often
                align.run_step(schedule, [model], items, optimize=False)
            failing.remove()
        found.append(align.run_step(schedule, [model], items, optimize=False))
    return found, made(model).captures


def happen(event: str, decoder: Any, hooks: list[Any], rng: random.Random) -> None:
    """What changes between steps."""
    weights, module = [*decoder.parameters()], rng.choice([*decoder.layers.modules()])
    some = [one for one in weights if rng.random() < 0.3]
    for one in some if event in EVENTS[2:6] else ():
        if event == "weights move":
            one.data = 1.1 * one.data
        elif event == "weights change":
            one.data.mul_(1.1)
        elif event == "gradients move":
            one.main_grad = one.main_grad.clone()
        else:
            one.requires_grad_(False)
    if event == "a hook":
        hooks.append(module.register_forward_hook(lambda *_: None))
    while event == "no hook" and hooks:
        hooks.pop().remove()


def fail(event: str, layer: Any, after: int) -> Any:
    """Lets a layer fail when it has run so often."""
    runs = []

    def done(_: Any, __: Any, found: Any) -> Any:
        runs.append(1)
        if len(runs) <= after:
            return found
        if event == "a forward fails":
            raise Failed
        alone = isinstance(found, torch.Tensor)
        return _Fails.apply(found) if alone else (_Fails.apply(found[0]), *found[1:])

    return layer.register_forward_hook(done)


@pytest.mark.parametrize("seed", range(rounds(3, 200)))
@pytest.mark.usefixtures("recorded_graphs", "cores_in_fp64")
def test_steps_are_those_without(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.drawn(random.Random(seed))
    ours, _ = ran(case, random.Random(seed))
    monkeypatch.setattr(layers, "SEEN_BEFORE", 10**9)
    others, none = ran(case, random.Random(seed))
    assert none == 0
    for one, other in zip(ours, others, strict=True):
        same(one, other)
