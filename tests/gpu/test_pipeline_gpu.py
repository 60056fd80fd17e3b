"""Pipelines over NCCL: both schedules agree, in fp32 and in bf16 by the numerics policy."""

import pytest
import torch

from megatron_prefix.lab.cli.matrix import align_row
from megatron_prefix.lab.verify.matrix import Row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices"),
]
ROWS = """
dense/PP2/tree/none
dense/PP2/chunked/full
dense/PP2xVPP2/tree/none
dense/PP4/chunked/none
""".split()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ROWS)
def test_row(name, dtype):
    row = Row(*name.split("/"))
    num_ranks = row.layout_in().world_size
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} CUDA devices")
    verdict = align_row(row, "cuda", dtype, timeout_s=300)
    assert verdict.passed, verdict.failures
    assert 0 < verdict.executed_tokens < verdict.raw_tokens
