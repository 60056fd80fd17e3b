"""The probe of recurrent kernels notices wrong ones, and says what is not there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_prefix.features.recurrent import probe
from megatron_prefix.features.recurrent.definition import chunk_gated_delta_rule
from megatron_prefix.lab.platforms import cpu
from megatron_prefix.megatron import features
from megatron_prefix.refusals.table import DELTA_KERNEL
from tests.harness import ranks  # noqa: F401  # applies the CPU platform


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_right_rule_is_taken(dtype: torch.dtype) -> None:
    def rule(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Any:
        """In fp32 inside, as CUDA's."""
        wide = torch.promote_types(dtype, torch.float32)
        given = {n: x.to(wide) if n in ("beta", "g") else x for n, x in given.items()}
        out, final = chunk_gated_delta_rule(q.to(wide), k.to(wide), v.to(wide), **given)
        return out.to(dtype), final

    assert probe.rule_refusal(rule, "cpu", dtype, 16, 8) is None


def test_a_rule_is_tried_with_a_models_heads() -> None:
    """For which its kernels are tuned; lengths come from the host, too, where it takes them."""
    seen: list[tuple[int, int]] = []

    def rule(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_cpu: Any = None, **given: Any) -> Any:
        seen.append((q.shape[2], len(cu_seqlens_cpu)))
        return chunk_gated_delta_rule(q, k, v, **given)

    assert probe.rule_refusal(rule, "cpu", torch.float64, 16, 8, heads=5) is None
    assert seen == [(5, 4)]


class _Wrong(torch.autograd.Function):
    """The identity; its gradient is a tenth off in a part, as a miscompiled kernel's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return torch.cat([gradient[:, :64] * 1.1, gradient[:, 64:]], 1)


def _without_states(*given: Any, **more: Any) -> Any:
    more["initial_state"] = more["initial_state"] * 0
    return chunk_gated_delta_rule(*given, **more)


def _detached(*given: Any, **more: Any) -> Any:
    state = more["initial_state"]
    more["initial_state"] = state.detach() + 0 * state
    return chunk_gated_delta_rule(*given, **more)


def _wrong_backward(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Any:
    return chunk_gated_delta_rule(q, _Wrong.apply(k), v, **more)


def _one_sequence(*given: Any, **more: Any) -> Any:
    out, _ = chunk_gated_delta_rule(*given, **{**more, "cu_seqlens": None, "initial_state": None})
    return out, chunk_gated_delta_rule(*given, **more)[1]


def _failing(*_: Any, **__: Any) -> Any:
    raise ValueError("no kernel image\nand more")


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (_without_states, "wrong output"),
        (_one_sequence, "wrong output"),
        (_detached, "wrong gradient of initial state"),
        (_wrong_backward, "wrong gradient of keys"),
        (_failing, "ValueError: no kernel image with "),
    ],
)
def test_a_wrong_rule_is_refused(rule: Callable[..., Any], reason: str) -> None:
    found = probe.rule_refusal(rule, "cpu", torch.float64, 16, 8)
    assert found is not None and found.startswith(reason) and "\n" not in found


def test_what_is_not_installed_is_said_with_the_fix() -> None:
    assert probe.refusals("cpu") == {"GatedDeltaNet": None, "MambaMixer": None}
    found = probe.refusals("cuda")
    assert "pip install fla-core==" in (found["GatedDeltaNet"] or "")
    assert "build mamba-ssm" in (found["MambaMixer"] or "")


def test_a_wrong_rule_is_refused_when_a_model_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU only: the CPU's rule is the definition itself."""
    cpu.load_recurrent_layers()
    kind = sys.modules["megatron.core.ssm.gated_delta_net"].GatedDeltaNet
    layer = SimpleNamespace(self_attention=kind.__new__(kind))
    wrong = DELTA_KERNEL.given("wrong output")
    for device, found in (("cuda", [wrong]), ("cpu", [])):
        model = SimpleNamespace(
            config=SimpleNamespace(
                linear_key_head_dim=64,
                linear_value_head_dim=32,
                linear_num_value_heads=8,
                tensor_model_parallel_size=2,
                context_parallel_size=1,
            ),
            decoder=SimpleNamespace(layers=[layer]),
            parameters=lambda device=device: iter([SimpleNamespace(device=torch.device(device))]),
        )
        asked: list[tuple[object, ...]] = []

        def refusals(*given: object, asked: list[tuple[object, ...]] = asked) -> dict[str, str]:
            asked.append(given)
            return {"GatedDeltaNet": "wrong output"}

        monkeypatch.setattr(probe, "refusals", refusals)
        assert [*features.layer_refusals(model)] == found
        assert asked == ([("cuda", 64, 32, 4)] if found else [])


def test_a_module_imported_without_kernels_gets_them_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the import of flash-linear-attention fails Megatron leaves names undefined."""
    cpu.load_recurrent_layers()
    module = sys.modules["megatron.core.ssm.gated_delta_net"]
    for name in ("l2norm", "chunk_gated_delta_rule"):
        monkeypatch.delattr(module, name)
    monkeypatch.setattr(module, "HAVE_FLA", False)
    monkeypatch.setattr(sys.modules["megatron.core.ssm.mamba_mixer"], "_on_cpu", False)
    cpu.load_recurrent_layers()
    assert module.HAVE_FLA and module.chunk_gated_delta_rule is chunk_gated_delta_rule
    assert callable(module.l2norm)
