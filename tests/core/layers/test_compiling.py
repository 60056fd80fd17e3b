"""What is compiled beside: every call of a probe, and every variant that Triton tunes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_prefix.layers import compiling
from megatron_prefix.layers.blocks import kernels, operators
from tests.core.layers.test_fa4 import StandIn
from tests.harness.data import REPOSITORY

FOLDER = REPOSITORY / ".triton"
"""Where Triton is if it is not installed (.ci/run)."""

TUNED = """
import argparse, sys
import torch, triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from megatron_prefix.layers.compiling import compile_share

driver.set_active(argparse.Namespace(  # names a device, and has none
    utils=argparse.Namespace(
        get_device_properties=lambda _: {"max_shared_mem": 232448, "multiprocessor_count": 132}
    ),
    get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
    get_current_stream=lambda _: 0, get_active_torch_device=lambda: torch.device("cpu"),
))
compile_share(*map(int, sys.argv[1:]))
variants = [triton.Config({"B": b}, num_warps=w) for b in (16, 32) for w in (1, 2)]


@triton.autotune(variants, key=["n"], cache_results=True)
@triton.heuristics({"EVEN": lambda given: given["n"] % 16 == 0})
@triton.jit
def tuned(x, n, EVEN: tl.constexpr, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + at, 2.0, mask=at < n)


@triton.jit
def plain(x, n, B: tl.constexpr):
    at = tl.arange(0, B)
    tl.store(x + at, 3.0, mask=at < n)


x = torch.ones(64)
tuned[lambda given: (triton.cdiv(64, given["B"]),)](x, 64)
plain[(1,)](x, 64, B=64)
assert x.sum() == 64, "it was launched"
"""


def jobs_of(monkeypatch: pytest.MonkeyPatch, ask: Any) -> tuple[list[tuple[str, Any]], Path, str]:
    """Kind and arguments of every job, the folder, and the key."""
    found: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(compiling, "compile_beside", lambda *given: found.append(given))
    ask()
    ((_, jobs, folder, key, _),) = found
    assert all(job[:2] == ["-m", "megatron_prefix.layers.compiling"] for job in jobs)
    return [(kind, json.loads(given)) for _, _, kind, given in jobs], folder, key


def test_every_call_of_the_probe_is_compiled(monkeypatch, tmp_path: Path) -> None:
    """Once, forward and backward, in the way in which the probe makes it."""
    monkeypatch.setattr(kernels, "fa4_folder", lambda: str(tmp_path))
    device = torch.device("cuda", 1)
    jobs, folder, key = jobs_of(
        monkeypatch, lambda: kernels.compile_probe(device, torch.bfloat16, 16, 8, 4, None)
    )
    assert folder == tmp_path and '"head_dim": 16' in key and "a GPU" in key
    library = StandIn()
    monkeypatch.setattr(operators, "flash_attn_4", lambda: library)
    monkeypatch.setattr(kernels.KERNELS["fa4"], "refusal", lambda *_: None)
    cpu, probe = torch.device("cpu"), kernels.probed.__wrapped__
    assert probe("fa4", cpu, torch.bfloat16, 16, 8, 4) is None
    wanted = {_variant(call) for call in library.calls}
    library.calls.clear()
    for kind, given in jobs:
        assert kind == "attention" and given.pop("device") == 1
        kernels.run_one(cpu, getattr(torch, given.pop("dtype")), **given)
    assert [_variant(call) for call in library.calls] == list(
        dict.fromkeys(_variant(call) for call in library.calls)
    )
    assert {_variant(call) for call in library.calls} == wanted and len(wanted) == 8


def _variant(call: dict[str, Any]) -> tuple[Any, ...]:
    widths = call["q"].shape[-1], call["v"].shape[-1], call["q"].shape[-2] // call["k"].shape[-2]
    return "dout" in call, call["q"].ndim, call["causal"], call["q"].dtype, *widths


def test_the_rule_is_compiled_in_shares(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling, "workers", lambda: 3)
    jobs, folder, key = jobs_of(monkeypatch, lambda: compiling.rule(128, 64, 32))
    sizes = {"key_dim": 128, "value_dim": 64, "heads": 32}
    assert jobs == [("rule", {"device": 3, "part": n, "parts": 3, **sizes}) for n in range(3)]
    other = jobs_of(monkeypatch, lambda: compiling.rule(128, 64, 16))[2]
    assert folder == tmp_path and key != other


def test_shares_are_all_variants_and_no_choice_is_kept(tmp_path: Path) -> None:
    path = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    if importlib.util.find_spec("triton") is None:
        if not FOLDER.is_dir():
            pytest.skip("Triton is not installed (.ci/run does it)")
        path.append(str(FOLDER))
    program = tmp_path / "tuned.py"  # Triton reads a kernel's source
    program.write_text(TUNED)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}

    def compiled(part: int, parts: int) -> set[str]:
        cache = tmp_path / f"cache {part} of {parts}"
        done = subprocess.run(
            [sys.executable, str(program), str(part), str(parts)], capture_output=True, text=True,
            env=environment | {"TRITON_CACHE_DIR": str(cache)}, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert not [*cache.rglob("*.autotune.json")]
        return {file.parent.name for file in cache.rglob("*.cubin")}

    whole, shares = compiled(0, 1), [compiled(part, 2) for part in range(2)]
    assert len(whole) == 5 and set.union(*shares) == whole
    assert max(map(len, shares)) <= 3
