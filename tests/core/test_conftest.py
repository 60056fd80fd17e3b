"""What tests/conftest.py promises to every test."""

import sys

import pytest
import torch

from tests.harness.forked_workers import import_tests


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_unwritten_memory_is_nan(dtype):
    assert torch.empty(7, dtype=dtype).isnan().all()
    assert torch.zeros(3, dtype=dtype).new_empty(5).isnan().all()


def test_unwritten_memory_is_nan_in_forked_ranks():
    from tests.harness.ranks import run_ranks

    assert run_ranks(2, lambda: bool(torch.empty(7).isnan().all())) == [True, True]


def test_what_cannot_be_imported_is_left_to_workers(pytestconfig, tmp_path):
    """A worker that found the first half of a file would miss the tests of the second."""
    lines = {"skipped": "pytest.skip(allow_module_level=True)", "wrong": "1 / 0", "right": ""}
    files = [tmp_path / f"test_{name}.py" for name in lines]
    for file, line in zip(files, lines.values(), strict=True):
        file.write_text(f"import pytest\n{line}\n", "utf-8")
    before = {*sys.modules}
    import_tests(files, pytestconfig)
    new = {*sys.modules} - before
    assert [name.rpartition(".")[2] for name in new if name.endswith((*lines,))] == ["test_right"]
    for name in new:
        del sys.modules[name]
