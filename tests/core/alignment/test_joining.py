"""A prompt and its suffixes in one segment, in fp64 against plain autograd and Megatron."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.data.pairs import pairs_of_groups
from megatron_prefix.lab.data.rollouts import Group, write_rollouts
from megatron_prefix.lab.rl.baseline import pack_sizes
from megatron_prefix.megatron.install import installed
from megatron_prefix.sidecar.arena import Arena
from megatron_prefix.tree import build
from tests.core.alignment.test_hybrid_memory import step
from tests.harness import hybrid, steps
from tests.harness.command_line import BUNDLED, forked
from tests.harness.failures import Countdown, Fault
from tests.harness.one_group import schedule_with
from tests.harness.one_rank import one_rank, small_model
from tests.harness.rows import rows
from tests.harness.steps import Contract

pytestmark = pytest.mark.turns

EXACT = hybrid.limit(176, 3)
JOINED: dict[str, Any] = {"min_gain": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("tiny-llama", {}),
    "norms of Q and K": ("tiny-qwen3", {}),
    "latents": ("tiny-deepseek", {"num_layers": 2, "num_moe_experts": None}),
}
RECOMPUTES: dict[str, dict[str, Any]] = {
    "full": {"recompute": "full"},
    **{
        name: {
            "config_overrides": {
                "recompute_granularity": "selective",
                "recompute_modules": [name],
            }
        }
        for name in ("core_attn", "layernorm", "mlp")
    },
}


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


def model_of(name: str = "dense", **options: Any) -> Any:
    """Equal arguments give equal weights."""
    preset, fields = MODELS[name]
    return small_model(preset, spec=fields, **options)


@functools.cache
def expected_of(name: str = "dense") -> steps.Reference:
    return steps.plain(model_of(name, wrap_ddp=False), Contract(), hybrid.items())


@pytest.mark.parametrize("name", MODELS)
def test_exact(name: str) -> None:
    model, expected = model_of(name), expected_of(name)
    for fields in ({}, {"memory": "auto"}, *({"segment_tokens": n} for n in (100, 64, 24))):
        assert hybrid.worst(model, expected, **JOINED, **fields) <= EXACT, fields
    [segment] = hybrid.report_of(model, **JOINED).forest.segments
    assert segment.joined == 0 and len({span.start for span in segment.spans}) > 2
    some = hybrid.report_of(model, **JOINED, segment_tokens=100).forest.segments
    assert len(some) > 1 and any(one.joined >= 0 for one in some)
    below = hybrid.report_of(model, **JOINED, segment_tokens=64).forest.segments
    assert any(one.joined >= 0 and one.parents for one in below)  # and read a prompt


@pytest.mark.parametrize("name", RECOMPUTES)
def test_megatrons_own_recomputation(name: str) -> None:
    model = model_of(**RECOMPUTES[name])
    for fields in ({}, {"segment_tokens": 100}, {"segment_tokens": 64}):
        assert hybrid.worst(model, expected_of(), **JOINED, **fields) <= EXACT, fields


def test_without_gradients() -> None:
    """Losses of a pass without gradients are those of the step, bit by bit."""
    model, logs = model_of(), []
    for forward_only in (False, True):
        steps.zero_gradients(model)
        logs.append(
            steps.call(
                schedule_with(**JOINED), Contract().step, model, hybrid.items(),
                forward_only=forward_only,
            )
        )  # fmt: skip
    assert [log["loss"].item() for log in logs[0]] == [log["loss"].item() for log in logs[1]]
    assert not any(bool(one.any()) for one in steps.gradients(model).values())


def test_what_suffixes_send_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that spans send to others of their segment count: without them it is wrong."""
    monkeypatch.setattr(Arena, "add", lambda *_: None)
    found = hybrid.errors(model_of(), expected_of(), schedule_with(**JOINED))
    assert found["losses"] <= EXACT
    assert max(found.values()) > 1e3 * EXACT


@pytest.mark.parametrize("name", ["dense", "latents"])
def test_the_sidecar_takes_what_was_predicted(name: str) -> None:
    for fields in ({}, {"segment_tokens": 100}, {"segment_tokens": 64}):
        report = hybrid.report_of(model_of(name), **JOINED, **fields)
        assert report.memory is not None and report.cache_bytes > 0
        assert report.memory.cache_peak == pytest.approx(report.cache_bytes, rel=1e-9)


def test_saved_bytes_are_those_that_were_predicted() -> None:
    for name in ("dense", "norms of Q and K"):
        saved, report = step(model_of(name, dtype=torch.float32), **JOINED)
        assert report.memory.saved == pytest.approx(saved + report.cache_bytes, rel=0.03), name


def test_a_failure_in_the_middle_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    for method in ("write", "read", "add", "sent"):
        with monkeypatch.context() as patch:
            count, stock = Countdown(Fault, 2), getattr(Arena, method)

            def failing(*args: Any, count: Any = count, stock: Any = stock) -> Any:
                count()
                return stock(*args)

            patch.setattr(Arena, method, failing)
            with pytest.raises(Fault):
                hybrid.worst(model, expected_of(), **JOINED)
        assert installed(model).current is None  # type: ignore[union-attr]
        assert hybrid.worst(model, expected_of(), **JOINED) <= EXACT, method


LAYOUTS = [
    "--tp 2 --sequence-parallel --pack-tokens 200",
    "--dp 2",
    "--model tiny-moe --tp 2",
    "--model tiny-moe --ep 2 --pack-tokens 200",
    "--model tiny-deepseek --ep 2 --pack-tokens 200 --segment-tokens 150",
    "--model tiny-qwen3 --cp 2 --pack-tokens 200 --cp-reduce wave --recompute full",
    "--model tiny-qwen3 --cp 2 --pack-tokens 200 --cp-reduce segment --segment-tokens 250",
    "--model tiny-deepseek --cp 2 --ep 2 --pack-tokens 200",
]


@pytest.mark.parametrize("layout", rows(LAYOUTS, [LAYOUTS[2], LAYOUTS[7]]))
def test_layouts(layout: str) -> None:
    options = "--groups 3 --max-tokens 96 --min-gain 4 --dtype float64 --overlap-grad-reduce"
    if "deepseek" not in layout:  # which of its four layers have experts is a list
        options += " --set num_layers=2"
    if "--sequence-parallel" not in layout and "--tp" in layout:
        layout += " --sequence-parallel"
    done = forked("align", "--rollouts", BUNDLED, *f"{options} {layout}".split())
    assert done.returncode == 0, done.stderr


def with_ends(group: Group) -> Group:
    """With rollouts that are the beginnings of some, up to the middle of their answers."""
    ends = [
        replace(one, uid=f"{one.uid}, begun", tokens=one.tokens[:72], loss=((60, 72),))
        for one in group.rollouts[::2]
    ]
    return replace(group, rollouts=(*group.rollouts, *ends))


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rollouts of three levels below their prompts, of which some join waves below, and others end
    there."""
    groups = [with_ends(one) for one in generate(2, 60, 24, 8, tree="branch", depth=3)]
    rollouts, _ = pairs_of_groups(groups)
    sizes = pack_sizes([len(rollout) for rollout in rollouts], 200)
    owners = [number for number, size in enumerate(sizes) for _ in range(size)]
    config = PrefixConfig(min_gain=2, segment_tokens=100)
    options = replace(config.tree_options(1), joins=True)
    forest = build(rollouts, None, options, owners)
    below = [one for one in forest.segments if one.joined >= 0 and one.parents]
    read = {span.parent for one in below for span in one.spans}
    inside = [path for path in forest.paths if path[-1] in read]
    assert any(forest.segments[path[-1].segment] in below for path in inside)
    path = tmp_path_factory.mktemp("trees") / "trees.jsonl"
    write_rollouts(path, groups)
    return path


WAVES = [
    "--tp 2 --sequence-parallel",
    "--model tiny-moe --ep 2",
    "--model tiny-deepseek --ep 2",
    "--model tiny-qwen3 --cp 2 --cp-reduce wave --recompute full",
    "--model tiny-qwen3 --cp 2 --cp-reduce segment",
]


@pytest.mark.parametrize("layout", rows(WAVES, WAVES[1:2]))
def test_layouts_of_waves_that_join(layout: str, trees: Path) -> None:
    """Prompts apart, and what pairs of rollouts share behind them in their waves."""
    options = "--min-gain 2 --segment-tokens 100 --pack-tokens 200 --dtype float64"
    if "deepseek" not in layout:
        options += " --set num_layers=2"
    done = forked("align", "--rollouts", str(trees), *f"{options} {layout}".split())
    assert done.returncode == 0, done.stderr
