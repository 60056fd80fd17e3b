"""slime's and miles' own GatedDeltaNet under the prefix schedule in fp64, by stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.rl import packing
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness import hybrid, steps
from tests.harness.one_group import schedule_with
from tests.harness.one_rank import one_rank
from tests.harness.own_delta import LINEAR, NETS, Packed, own_model

EXACT = 1e-9
"""Found are 1e-14 and less."""


class Case(NamedTuple):
    """A model, what it is compared with, and the packs of both."""

    model: Any
    twin: Any
    expected: steps.Reference


def packs() -> list[dict[str, Any]]:
    """All rollouts of `hybrid.items`, in packs that cut through groups."""
    items = hybrid.items()
    return [packing.pack(items[at : at + 4]) for at in range(0, len(items), 4)]


@pytest.fixture(scope="module")
def cases() -> Iterator[dict[str, Case]]:
    with one_rank():
        made = {}
        for net in NETS:
            twin = own_model(net=net, wrap_ddp=False)
            made[net] = Case(own_model(net=net), twin, steps.plain(twin, Packed(), packs()))
        yield made
        made.clear()


def worst(model: Any, expected: steps.Reference, ours: PrefixSchedule) -> float:
    """The largest difference of a loss or a gradient to plain autograd; NaN wins."""
    steps.zero_gradients(model)
    logs = steps.call(ours, Packed().step, model, packs())
    found = steps.gradients(model)
    errors = [float(abs(a["loss"] - b["loss"])) for a, b in zip(logs, expected.logs, strict=True)]
    errors += [
        float((found[name] - wanted).abs().max()) / expected.terms[name]
        for name, wanted in expected.gradients.items()
    ]
    return torch.tensor(errors, dtype=torch.float64).max().item()


OPTIONS: dict[str, dict[str, Any]] = {
    "trees packed": {},
    "chunks of 7": {"chunk_tokens": 7},
    "chunks of 2, shorter than the convolution": {"chunk_tokens": 2},
    "small packs": {"segment_tokens": 30},
    "depth first": {"segment_tokens": 8},
    "recompute": {"memory": "recompute", "chunk_tokens": 16},
    "offload": {"memory": "offload", "chunk_tokens": 16},
    "all layers on the host": {"cache_host_layers": 9, "memory": "recompute", "chunk_tokens": 7},
    "no parent": {"min_gain": 10**6},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("net", NETS)
def test_exact(cases: dict[str, Case], net: str, options: str) -> None:
    """And the sidecar takes what was predicted from what the modules tell."""
    ours = schedule_with(**OPTIONS[options])
    assert worst(cases[net].model, cases[net].expected, ours) <= EXACT
    report = ours.report
    assert report is not None and report.memory is not None and not report.decision.fallback
    staged = report.memory.cache_staged if "cache_host_layers" in OPTIONS[options] else 0.0
    if not staged:
        assert report.memory.cache_peak == pytest.approx(report.cache_bytes, rel=1e-6)
    executed, raw = report.forest.executed_tokens, report.forest.raw_tokens
    assert (executed < raw) == ("min_gain" not in OPTIONS[options])


def test_the_cases_have_what_their_names_say(cases: dict[str, Case]) -> None:
    ours = schedule_with()
    worst(cases["global"].model, cases["global"].expected, ours)
    forest = ours.report.forest  # type: ignore[union-attr]
    inner = [segment for segment in forest.segments if segment.inner]
    assert {1, 2, 3} <= {span.length for one in forest.segments for span in one.spans}
    assert forest.max_depth == 3 and any(segment.scored for segment in inner)
    assert len(packs()) < len(hybrid.items())


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("net", NETS)
def test_megatrons_own_recomputation(cases: dict[str, Case], net: str, recompute: str) -> None:
    model = own_model(net=net, recompute=recompute)
    for options in ({"chunk_tokens": 7, "cache_host_layers": 9}, {"memory": "recompute"}):
        assert worst(model, cases[net].expected, schedule_with(**options)) <= EXACT


def test_a_model_of_such_layers_alone(cases: dict[str, Case]) -> None:
    types = (LINEAR, LINEAR)
    expected = steps.plain(own_model(types, wrap_ddp=False), Packed(), packs())
    assert worst(own_model(types), expected, schedule_with(chunk_tokens=7)) <= EXACT


def test_outside_of_segments_nothing_changes(cases: dict[str, Case]) -> None:
    model, twin, expected = cases["attribute"]
    worst(model, expected, schedule_with())
    assert list(unwrap(model).state_dict()) == list(twin.state_dict())
    found, wanted = (Packed().step(iter(packs()[:1]), chunk)[0] for chunk in (model, twin))
    assert torch.equal(found, wanted)
