"""What other tests compare with: each helper must refuse a wrong result."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_prefix.layers.blocks.kernels import KERNELS
from tests.harness import attention_cases, failures, one_group, pipelines, steps, training

NAME = "decoder.layers.0.weight"
CHUNK = SimpleNamespace(
    config=SimpleNamespace(
        hidden_size=16, ffn_hidden_size=64, num_attention_heads=2, kv_channels=8, num_layers=2,
        moe_router_topk=2, moe_ffn_hidden_size=None, num_query_groups=2,
    )
)  # fmt: skip


def gradients() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(6, 5, generator=draw, dtype=torch.float64) for name in (NAME, "other")
    }


def logs() -> list[dict[str, Any]]:
    losses = torch.tensor([0.5, 1.5, 2.5], dtype=torch.float64)
    return [{"uid": uid, "loss": loss.clone(), "sum": loss} for uid, loss in enumerate(losses)]


def by_policy(found: tuple[Any, Any]) -> None:
    wanted = gradients()
    terms = {name: float(value.abs().max()) for name, value in wanted.items()}
    steps.assert_gradients(found[1], steps.Reference(wanted, terms), 100)


def by_difference(found: tuple[Any, Any]) -> None:
    wanted = pipelines.Result(logs(), gradients())
    assert pipelines.difference(wanted, pipelines.Result(*found), [CHUNK], 100) == ""


def bit_by_bit(found: tuple[Any, Any]) -> None:
    one_group.assert_bitwise(found, (logs(), gradients()))


def same_after_failure(found: tuple[Any, Any]) -> None:
    failures.assert_same(found, (logs(), gradients()))


def same_state(found: tuple[Any, Any]) -> None:
    training.assert_same(found[1], gradients())


def changed(change: Callable[[Tensor], Tensor], name: str = NAME) -> tuple[Any, Any]:
    found = gradients()
    found[name] = change(found[name])
    return logs(), found


def cut() -> tuple[Any, Any]:
    found = gradients()
    del found["other"]
    return logs(), found


def worse_loss() -> tuple[Any, Any]:
    found = logs()
    found[-1]["loss"] += 1e-6
    return found, gradients()


JUDGES = [by_policy, by_difference, bit_by_bit, same_after_failure, same_state]


@pytest.mark.parametrize("judge", JUDGES)
def test_the_same_passes(judge: Callable[..., None]) -> None:
    judge((logs(), gradients()))


@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize("name", [NAME, "other"])
@pytest.mark.parametrize("factor", [1 + 1e-6, 0.0, math.nan])
def test_a_wrong_gradient_is_refused(judge: Callable[..., None], name: str, factor: float) -> None:
    with pytest.raises(AssertionError):
        judge(changed(lambda gradient: factor * gradient, name))


@pytest.mark.parametrize("judge", JUDGES)
def test_a_missing_gradient_is_refused(judge: Callable[..., None]) -> None:
    with pytest.raises(AssertionError):
        judge(cut())


@pytest.mark.parametrize("judge", [by_difference, bit_by_bit, same_after_failure])
def test_a_wrong_loss_is_refused(judge: Callable[..., None]) -> None:
    with pytest.raises(AssertionError):
        judge(worse_loss())


def test_logs_in_another_order_are_refused() -> None:
    with pytest.raises(AssertionError):
        by_difference((logs()[::-1], gradients()))


@pytest.mark.parametrize("result", ["out", "lse", "dq", "dk0", "dv0", "dk1", "dv1"])
def test_a_wrong_kernel_is_refused(result: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of its results, by a millionth."""
    case, right = attention_cases.NARROW, attention_cases.by_blocks
    attention_cases.check(KERNELS["math"], case, torch.float64)

    def wrong(*arguments: Any) -> dict[str, Tensor]:
        found = right(*arguments)
        return {**found, result: found[result] * (1 + 1e-6)}

    monkeypatch.setattr(attention_cases, "by_blocks", wrong)
    with pytest.raises(AssertionError):
        attention_cases.check(KERNELS["math"], case, torch.float64)
