"""Our Triton kernels, run on the CPU by Triton's interpreter, equal torch's formulas.

Only a GPU compiles them, so without this a kernel could lose its meaning unseen. The interpreter
is chosen by a variable that Triton reads when it is imported, so it has a process of its own.
Triton is in a folder of its own (.ci/run), since other packages act differently when they find it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.harness.data import REPOSITORY

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
def test_a_kernel_equals_its_formula(code: str) -> None:
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
