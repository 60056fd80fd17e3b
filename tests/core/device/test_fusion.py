"""Whether Triton is used, and the sums that it computes, as torch computes them on the CPU."""

import importlib.util
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_prefix.device.fusion import has_triton
from megatron_prefix.features.context_parallel import places
from megatron_prefix.features.context_parallel.own_keys import key_sums
from megatron_prefix.tree import cp_layout
from tests.harness.data import REPOSITORY

PROBE = "megatron_prefix.device.triton_probe"


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No answer is remembered, and new tensors are on the CPU."""
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *sizes, **_: ones(*sizes))
    has_triton.cache_clear()
    yield
    has_triton.cache_clear()


def probing(monkeypatch, doubled):
    monkeypatch.setitem(sys.modules, PROBE, SimpleNamespace(doubled=doubled))


def raises(error):
    def doubled(_):
        raise error

    return doubled


def test_it_is_used_where_its_kernel_runs(monkeypatch):
    probing(monkeypatch, lambda x: 2 * x)
    assert has_triton("cuda") and not has_triton("cpu")


@pytest.mark.parametrize(("doubled", "why"), [
    (None, "ModuleNotFoundError"),
    (raises(RuntimeError("no such device\nmore")), "RuntimeError: no such device"),
    (lambda x: 3 * x, "a wrong result"),
], ids=["not installed", "no such device", "wrong"])  # fmt: skip
def test_where_it_does_not_work_this_is_said_once(doubled, why, monkeypatch, caplog):
    probing(monkeypatch, doubled)
    if doubled is None:
        monkeypatch.setitem(sys.modules, PROBE, None)
    with caplog.at_level(logging.WARNING):
        assert not any(has_triton("cuda") for _ in range(3))
    (record,) = caplog.records
    assert why in record.getMessage() and "more" not in record.getMessage()


def test_out_of_memory_is_not_taken_for_a_missing_triton(monkeypatch):
    probing(monkeypatch, raises(torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError):
        has_triton("cuda")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("lengths", [(12,), (12, 24, 12)], ids=str)
def test_places_of_own_keys_say_the_same_both_ways(lengths, size):
    """Sums over the places that keys have, and over the keys that places have."""
    num = sum(lengths)
    for rank in range(size):
        runs = cp_layout.own_runs(lengths, rank, size)
        own = cp_layout.view_order(lengths, size)[runs.visible]
        gradients = torch.randn(len(own), 2, 3), torch.randn(len(own), 2, 5)
        for begin in (None, torch.randn(num, 2, 8)):
            tables = {"own": torch.from_numpy(own)}
            base = None if begin is None else begin.clone()
            got = key_sums(gradients, tables.__getitem__, num, base)
            both = torch.cat([torch.cat(gradients, -1), torch.zeros(1, 2, 8)])
            sources = places.own_sums(lengths, rank, size)
            wanted = both[sources[0]] + both[sources[1]] + (0 if begin is None else begin)
            torch.testing.assert_close(got, wanted)
            found = np.sort(sources[sources >= 0])
            assert np.array_equal(found, np.arange(len(own)))


# Our Triton kernels, run on the CPU by Triton's interpreter, equal torch's formulas ---------------

FOLDER = REPOSITORY / ".triton"

MERGE = """
import torch
from megatron_prefix.layers.blocks.merge import formula
from megatron_prefix.layers.blocks.merge_triton import merge_triton

for num, width, dtype in [(2, 24, torch.float32), (3, 64, torch.float32), (3, 16, torch.float64)]:
    outs = [torch.randn(70, 3, width, dtype=dtype) for _ in range(num)]
    lses = [torch.randn(3, 70, dtype=dtype) for _ in range(num)]
    lses[0][:, :5] = -float("inf")
    outs[0][:5] = float("nan")  # a block without a key counts as 0, whatever it holds
    for lse in lses:
        lse[:, 7] = -float("inf")
    got, wanted = merge_triton(outs, lses, dtype), formula(outs, lses, dtype)
    torch.testing.assert_close(got, wanted)
"""

SUMS = """
import torch
from megatron_prefix.features.context_parallel import own_keys as sums
from megatron_prefix.features.context_parallel import places as of
from megatron_prefix.features.context_parallel.key_sums_triton import key_sums_triton
from megatron_prefix.tree import cp_layout

lengths, size, heads = (24, 48, 8), 2, 3
for rank in range(size):
    seen = cp_layout.own_runs(lengths, rank, size).visible
    places = torch.from_numpy(cp_layout.view_order(lengths, size)[seen])
    table = {"own": places, "own sums": torch.from_numpy(of.own_sums(lengths, rank, size))}
    for begun, width in [(False, (16, 16)), (True, (12, 20))]:
        parts = tuple(torch.randn(len(seen), heads, w) for w in width)
        begin = torch.randn(sum(lengths), heads, sum(width)) if begun else None
        base = None if begin is None else begin.clone()
        wanted = sums.key_sums(parts, table.__getitem__, sum(lengths), base)
        got = key_sums_triton(parts, table["own sums"], begin)
        torch.testing.assert_close(got, wanted)
"""

PRINTS = """
import torch
from megatron_prefix.features.vision import fingerprints as prints
from megatron_prefix.features.vision.fingerprints_triton import BLOCK, sums_triton

for width, dtype in [(24, torch.bfloat16), (BLOCK + 5, torch.float32), (2 * BLOCK, torch.int64)]:
    rows = torch.randn(9, width).mul(100).to(dtype)
    rows[0], rows[1] = -1, 0
    words = rows.view(prints._WORDS[dtype.itemsize])
    keys = prints._keys(width, words.device)
    assert torch.equal(sums_triton(words, keys, prints._FACTOR), prints._row_sums(words, keys))
"""


@pytest.mark.parametrize("code", [MERGE, SUMS, PRINTS], ids=["merge", "sums of keys", "words"])
def test_a_kernel_equals_its_formula(code):
    path = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    if importlib.util.find_spec("triton") is None:
        if not FOLDER.is_dir():
            pytest.skip("Triton is not installed (.ci/run does it)")
        path.append(str(FOLDER))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(path)}
    environment |= {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
