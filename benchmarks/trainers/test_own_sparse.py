"""The real sparse attention of slime and miles in fp64, from sources that are there already.

The variable TRAINER_SOURCES names a folder with checkouts `slime` and `miles`, as run_sources.py
takes it; without it the tests are skipped. Kernels are their definitions (own_sparse.py).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks.trainers.own_sparse import real_sparse
from tests import judge
from tests.cases import Row, row
from tests.core.trainers.stand_ins import where_missing
from tests.oracle import model

SHARED = "own sparse sharing"
ROWS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("own sparse", "small", {}), ("own sparse", "whole", {}), (SHARED, "small", {}),
    (SHARED, "joined", {"session": "evaluate"}),
    (SHARED, "recompute chunks", {"recompute": "full"}),
)  # fmt: skip
FORMS = {"one": "thd", "tp2_sp": "thd", "pp2": "thd", "cp2": "thd_parts", "cp2_pp2": "thd_parts"}


def rows(layout: str) -> list[Row]:
    """Those of tests/cases.py, in a form that the trainers' packs have."""
    return [row(name, options, form=FORMS[layout], **more) for name, options, more in ROWS]


@pytest.mark.parametrize("layout", FORMS)
@pytest.mark.parametrize("trainer", ["slime", "miles"])
def test_real_modules(trainer: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = os.environ.get("TRAINER_SOURCES", "")
    if not folder or not (Path(folder) / trainer).is_dir():
        pytest.skip(f"no checkout of {trainer} in a folder that TRAINER_SOURCES names")
    monkeypatch.setattr(sys, "path", [str(Path(folder) / trainer), *sys.path])
    where_missing("ray", "sglang", "wandb", "omegaconf", "httpx", "transformers")
    around = {
        "own sparse": lambda case: real_sparse(trainer),
        SHARED: lambda case: real_sparse(trainer, 2, 1),
    }
    judge._stock.cache_clear()  # of the other trainer's
    with mock.patch.dict(model.AROUND, around):
        judge.check(layout, rows(layout))
