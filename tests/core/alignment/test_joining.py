"""A prompt and its suffixes in one segment, in fp64 against plain autograd and Megatron."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_prefix.megatron.install import installed
from megatron_prefix.sidecar.arena import Arena
from tests.core.alignment.test_hybrid_memory import step
from tests.harness import hybrid, steps
from tests.harness.failures import Countdown, Fault
from tests.harness.one_group import schedule_with
from tests.harness.one_rank import one_rank, small_model
from tests.harness.steps import Contract

pytestmark = pytest.mark.turns

EXACT = hybrid.limit(176, 3)
JOINED: dict[str, Any] = {"min_gain": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("tiny-llama", {}),
    "norms of Q and K": ("tiny-qwen3", {}),
    "latents": ("tiny-deepseek", {"num_layers": 2, "num_moe_experts": None}),
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
