"""The fused merge: everything is compiled before the first step, and nothing after it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_prefix.attention import merge as merging
from megatron_prefix.attention.fused import Fused, Pass
from megatron_prefix.attention.interface import Partial
from megatron_prefix.attention.merge import merge, prepare

HEADS, WIDTH = 4, 8
CPU = torch.device("cpu")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Every graph that has been compiled, by a backend that runs it as it is."""
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    fused = Fused(merging._merge, backend)
    monkeypatch.setattr(merging, "_implementation", lambda _: fused)
    with torch.compiler.set_stance("default"):  # platforms/cpu.py forces eager
        yield graphs
    torch._dynamo.reset()


def parts_of(num: int, rows: int, dtype: torch.dtype = torch.bfloat16) -> list[Partial]:
    return [
        Partial(torch.randn(rows, HEADS, WIDTH).to(dtype), torch.randn(HEADS, rows))
        for _ in range(num)
    ]


def eager(parts: list[Partial]) -> tuple[Tensor, Tensor]:
    """In the passes that `merge` makes, none of them compiled."""
    formula = merging._merge
    outs, lses = [part.out for part in parts], [part.lse for part in parts]
    while len(outs) > 3:
        out, lse = formula(outs[:3], lses[:3], torch.float32)
        outs, lses = [out, *outs[3:]], [lse, *lses[3:]]
    return formula(outs, lses, parts[0].out.dtype)


def same(parts: list[Partial]) -> None:
    for got, wanted in zip(merge(parts), eager(parts), strict=True):
        assert torch.equal(got, wanted)
        assert got.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_no_shape_compiles_after_the_first_step(dtype: torch.dtype, compiled: list[Any]) -> None:
    prepare(CPU, dtype, HEADS, WIDTH)
    before = len(compiled)
    assert before == (6 if dtype is torch.bfloat16 else 2)
    for rows in (100, HEADS, WIDTH, 1, 2, 3, 16, 17, 1024, 1025, 5000):
        for num in (2, 3, 4, 5, 6, 7):
            same(parts_of(num, rows, dtype))
    prepare(CPU, dtype, HEADS, WIDTH)
    assert len(compiled) == before


def test_no_layout_compiles_after_the_first_step(compiled: list[Any]) -> None:
    """cuDNN's strides, slices, an output that is not aligned, a lse by queries."""
    prepare(CPU, torch.bfloat16, HEADS, WIDTH)
    assert (before := len(compiled))
    for rows in (40, HEADS, WIDTH):
        fine, other = parts_of(2, rows)
        shifted = torch.zeros(other.out.numel() + 1, dtype=torch.bfloat16)[1:].view_as(other.out)
        lse_by_query = other.lse.T.contiguous().T
        heads_first = other.out.transpose(0, 1).contiguous().transpose(0, 1)
        longer = torch.cat([other.out, other.out])
        for out in (heads_first, shifted.copy_(other.out), longer[rows:], longer[::2]):
            same([fine, Partial(out, lse_by_query)])
        same([fine, Partial(other.out, torch.cat([other.lse, other.lse], 1)[:, :rows])])
    assert len(compiled) == before


def test_no_state_of_the_caller_compiles_after_the_first_step(compiled: list[Any]) -> None:
    """Autocast, gradients, and the thread on which a backward recomputes."""
    prepare(CPU, torch.bfloat16, HEADS, WIDTH)
    assert (before := len(compiled))
    with torch.enable_grad():
        same(parts_of(2, 30))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        same(parts_of(3, 31))
    thread = threading.Thread(target=lambda: same(parts_of(2, 32)))
    thread.start()
    thread.join()
    assert len(compiled) == before


def test_an_unknown_kind_is_compiled_once(
    compiled: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Tensors of inference mode, which no training step has; another number of heads."""
    prepare(CPU, torch.bfloat16, HEADS, WIDTH)
    before = len(compiled)
    with torch.inference_mode(), caplog.at_level(logging.WARNING):
        for rows in (10, 11):
            same(parts_of(2, rows))
    assert len(compiled) == before + 1
    assert "4 heads of 8: 1 versions" in caplog.text


def test_more_kinds_than_torch_keeps_of_a_function(compiled: list[Any]) -> None:
    """It would stop compiling after eight."""
    fused = Fused(merging._merge, merging._implementation("cpu")._backend)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=1):
        fused.prepare(Pass(2, *[torch.float32] * 4, heads, WIDTH, CPU) for heads in range(2, 12))
    assert len(compiled) == 10 and not fused._failed


class Failing:
    """A torch.compile whose functions raise."""

    def __init__(self, error: Exception) -> None:
        self.error, self.calls = error, 0

    def __call__(self, function: object, **options: object) -> Callable[..., Any]:
        def run(*args: object) -> None:
            self.calls += 1
            raise self.error

        return run


def test_a_failed_compilation_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing(RuntimeError("Cannot find a working triton installation\nmore"))
    monkeypatch.setattr(torch, "compile", failing)
    fused = merging._implementation.__wrapped__("cuda")
    first, second = parts_of(2, 5)
    arguments = [first.out, second.out], [first.lse, second.lse], torch.float32
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert torch.equal(fused(*arguments)[0], merging._merge(*arguments)[0])
    assert failing.calls == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "working triton installation" in caplog.text and "more" not in caplog.text


def test_out_of_memory_is_not_taken_for_a_failed_compilation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", Failing(torch.OutOfMemoryError("full")))
    first, second = parts_of(2, 5)
    with pytest.raises(torch.OutOfMemoryError):
        merging._implementation.__wrapped__("cuda")(
            [first.out, second.out], [first.lse, second.lse], torch.float32
        )


def test_nothing_is_compiled_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", Failing(AssertionError("compiled")))
    prepare(CPU, torch.bfloat16, HEADS, WIDTH)
    same(parts_of(5, 9))


def test_after_a_reset_one_version_is_made_again(compiled: list[Any]) -> None:
    """Trainers and inference engines may call `torch._dynamo.reset`."""
    prepare(CPU, torch.bfloat16, HEADS, WIDTH)
    before = len(compiled)
    torch._dynamo.reset()
    for rows in range(5, 25):
        same(parts_of(2, rows))
    assert len(compiled) == before + 1


def test_a_version_that_fails_in_a_step_is_run_unfused(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no such device\nmore")

    prepare(CPU, torch.bfloat16, HEADS, WIDTH)
    fused = merging._implementation("cpu")
    monkeypatch.setattr(fused, "_compiled", dict.fromkeys(fused._compiled, fails))
    for _ in range(2):
        same(parts_of(2, 30))
        prepare(CPU, torch.bfloat16, HEADS, WIDTH)
    assert caplog.text.count("merged without fusion") == 1 and "no such device" in caplog.text


def test_where_compiling_is_disabled_nothing_is_tried(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """TORCH_COMPILE_DISABLE=1."""
    monkeypatch.setattr(torch._dynamo.config, "disable", True)
    prepare(CPU, torch.bfloat16, HEADS, WIDTH)
    same(parts_of(2, 30))
    assert not compiled and "failed" not in caplog.text
