"""What tests of imports share."""

import pytest


@pytest.fixture
def source(tmp_path):
    return tmp_path / "in.jsonl"
