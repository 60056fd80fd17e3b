"""The script of the rows over NCCL, with a torchrun that only notes what it is asked to do."""

import os
import subprocess

import pytest

from megatron_prefix.lab.cli.main import make_parser
from megatron_prefix.lab.verify.matrix import rows
from tests.harness.data import REPOSITORY

SCRIPT = REPOSITORY / "benchmarks" / "nccl_rows.sh"


def run(folder, status=0, **environment):
    """The script; what it asked of torchrun is in `folder/notes`."""
    torchrun = folder / "torchrun"
    torchrun.write_text(f'#!/bin/sh\necho "$@" >>{folder}/notes\nexit {status}\n', encoding="utf-8")
    torchrun.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(SCRIPT), str(folder / "out"), "--allow-refused"],
        env={"PATH": path, **environment}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(("gpus", "num"), [(2, 16), (4, 13)])
def test_rows_fill_the_gpus_in_both_dtypes(tmp_path, gpus, num):
    done = run(tmp_path, NGPU=str(gpus))
    assert done.returncode == 0, done.stderr
    known = {row.name: row for row in rows()}
    dtypes = []
    for line in (tmp_path / "notes").read_text(encoding="utf-8").splitlines():
        option, ranks, _, module, *arguments = line.split()
        assert (option, ranks, module) == ("--nproc-per-node", str(gpus), "megatron_prefix")
        args = make_parser("matrix").parse_args(arguments)
        assert args.device == "cuda" and args.allow_refused
        assert args.record == str(tmp_path / "out" / f"{args.dtype}.jsonl")
        assert len(args.only) == num
        assert all(known[name].layout_in().world_size == gpus for name in args.only)
        dtypes.append(args.dtype)
    assert dtypes == ["bfloat16", "float32"]


def test_a_failed_row_fails_the_script_and_the_other_dtype_runs(tmp_path):
    assert run(tmp_path, status=1, NGPU="2").returncode == 1
    assert len((tmp_path / "notes").read_text(encoding="utf-8").splitlines()) == 2


def test_one_dtype_alone(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "float32.jsonl").write_text("of an earlier run", encoding="utf-8")
    assert run(tmp_path, NGPU="2", DTYPES="float32").returncode == 0
    assert "--dtype float32" in (tmp_path / "notes").read_text(encoding="utf-8")
    assert not (tmp_path / "out" / "float32.jsonl").exists()


def test_other_numbers_of_gpus_are_refused(tmp_path):
    done = run(tmp_path, NGPU="3")
    assert done.returncode == 2 and "not 3; set NGPU" in done.stderr
