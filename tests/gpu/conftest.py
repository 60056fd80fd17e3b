"""What tests on a GPU share."""

import pytest

from megatron_prefix.lab import runtime
from megatron_prefix.lab.runtime import Layout


@pytest.fixture(scope="module")
def on_one_gpu():
    runtime.initialize(Layout(), "cuda")
    yield
    runtime.shutdown()
