"""Planning and reading need neither torch nor Megatron, so that anybody can run and test them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.harness.data import REPOSITORY

PURE = """
tree config
pipeline.actions pipeline.planner pipeline.simulator pipeline.cost
attention.blocks
data.rollouts data.importers data.generate data.shorten data.balance
models.presets models.hf runtime.layout
cli.main cli.plan cli.show
""".split()


@pytest.mark.parametrize("module", PURE)
def test_a_pure_module_imports_neither_torch_nor_megatron(module):
    program = (
        f"import sys, megatron_prefix.{module}\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'megatron'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
