"""FlashAttention-3's kernel, with a stand-in for its operators: which calls it makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_prefix.errors import UserError
from megatron_prefix.layers.blocks import operators
from megatron_prefix.layers.blocks.batched import batches
from megatron_prefix.layers.blocks.interface import Runs
from megatron_prefix.layers.blocks.kernels import KERNELS
from tests.harness.attention_cases import CASES, LAYOUTS, Case, check, on_cuda

FA3, MATH = KERNELS["fa3"], KERNELS["math"]
NAMES = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


class StandIn:
    """The two operators, with the names of their arguments and their layouts."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, bool]] = []
        self.starts: list[list[Tensor]] = []

    def fwd(
        self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, is_causal: bool,
        num_splits: int, **lengths: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        assert num_splits == 1
        runs = self._runs(q, k, is_causal, lengths)
        rows = [self._rows(x) for x in (q, k, v)]
        out, lse, _ = MATH.forward(*rows, runs, softmax_scale)
        if q.ndim == 4:
            out = out.unflatten(0, (len(q), -1))
            lse = lse.unflatten(1, (len(q), -1)).transpose(0, 1).contiguous()
        return out, lse, lse, lse

    def bwd(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
        dq: Tensor, dk: Tensor, dv: Tensor, softmax_scale: float, is_causal: bool, **lengths: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert lse.is_contiguous() and dq.is_contiguous()
        runs = self._runs(q, k, is_causal, lengths)
        rows = [self._rows(x) for x in (dout, q, k, v, out)]
        if q.ndim == 4:
            lse = lse.transpose(0, 1).flatten(1)
        aux = ((),) * len(batches(runs, len(rows[1]), len(rows[2])))
        gradients = MATH.backward(*rows, lse, aux, runs, softmax_scale)
        for into, gradient in zip((dq, dk, dv), gradients, strict=True):
            into.copy_(gradient.view(into.shape))
        return dq, dk, dv

    @staticmethod
    def _rows(x: Tensor) -> Tensor:
        return x.flatten(0, 1) if x.ndim == 4 else x

    def _runs(self, q: Tensor, k: Tensor, causal: bool, lengths: dict[str, Any]) -> Runs:
        self.calls.append((q.ndim, causal))
        if q.ndim == 4:
            assert not lengths and len(q) == len(k)
            return Runs((q.shape[1],) * len(q), (k.shape[1],) * len(k), causal)
        assert set(lengths) == set(NAMES)
        starts = [lengths[name] for name in NAMES[:2]]
        self.starts.append(starts)
        assert all(x.dtype == torch.int32 and x.is_contiguous() for x in starts)
        queries, keys = (tuple(x.diff().tolist()) for x in starts)
        assert (max(queries), max(keys)) == (lengths["max_seqlen_q"], lengths["max_seqlen_k"])
        return Runs(queries, keys, causal)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn()
    monkeypatch.setattr(operators, "flash_attn_3", lambda: found)
    return found


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_blocks_match_full_attention(case: Case, library: StandIn) -> None:
    check(FA3, case, torch.bfloat16)
    assert library.calls


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout: str, library: StandIn) -> None:
    for name in ("equal rollouts", "uneven rollouts"):
        check(FA3, CASES[name], torch.float16, layout)


def test_equal_runs_are_dense_and_others_one_call(library: StandIn) -> None:
    for runs, kind in ((Runs.own((8, 8)), 4), (Runs.own((8, 9)), 3), (Runs((3,), (9,)), 4)):
        q = torch.randn(sum(runs.queries), 4, 16, dtype=torch.bfloat16)
        k = torch.randn(sum(runs.keys), 2, 16, dtype=torch.bfloat16)
        library.calls.clear()
        part = FA3.forward(q, k, k, runs, 0.25)
        FA3.backward(q, q, k, k, part.out, part.lse, part.aux, runs, 0.25)
        assert library.calls == [(kind, runs.causal)] * 2


def test_starts_of_runs_are_made_once(library: StandIn) -> None:
    """In a segment's first layer, for all others."""
    x = torch.randn(8, 2, 16, dtype=torch.bfloat16)
    for keys in (8, 9):
        for _ in range(2):
            runs = Runs.own((3, 1, 4)) if keys == 8 else Runs((3, 5), (2, 7))
            k = torch.randn(keys, 2, 16, dtype=torch.bfloat16)
            FA3.forward(x, k, k, runs, 0.25)
    one, again, other, _ = library.starts
    assert one[0] is one[1] is again[0] is again[1] and one[0].tolist() == [0, 3, 4, 8]
    assert [starts.tolist() for starts in other] == [[0, 3, 8], [0, 2, 9]]


def test_a_misaligned_tensor_is_refused_in_either_call(library: StandIn) -> None:
    rows = torch.zeros(17 * 4 * 16 + 1, dtype=torch.bfloat16)[1:].view(17, 4, 16)
    for runs in (Runs.own((17,)), Runs.own((8, 9))):
        with pytest.raises(UserError, match="'fa3' needs tensors aligned to 16 bytes"):
            FA3.forward(rows, rows, rows, runs, 0.25)
    assert not library.calls


def test_what_it_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    q = on_cuda(torch.zeros(4, 2, 16, dtype=torch.bfloat16))
    for capability, words in (((8, 0), "runs on Hopper"), ((9, 0), "build the folder hopper")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert words in (FA3.refusal(q, q, q) or "")
