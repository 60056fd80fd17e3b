"""What is known of trainers: which one runs, what it is refused for, and the pages about them."""

import argparse
import logging
import re
import sys
import types
from unittest import mock

import pytest
import torch
from megatron.core.pipeline_parallel import schedules

from benchmarks.trainers import run_sources, which_runs
from megatron_prefix import PrefixConfig, PrefixSchedule, auto, trainers
from megatron_prefix.errors import UserError
from megatron_prefix.refusals.table import MULTI_LORA, TABLE
from megatron_prefix.trainers import TRAINERS, table, versions
from megatron_prefix.trainers.trainer import version_of
from megatron_prefix.tree.cp_layout import Slices
from tests.harness.data import REPOSITORY

PAGES = REPOSITORY / "docs" / "trainers"


def imported(monkeypatch, name, **members):
    """A module that is there."""
    module = types.ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def arguments(monkeypatch, **given):
    """Megatron-LM's command line."""
    parsed = argparse.Namespace(**given)
    imported(monkeypatch, "megatron.training")
    imported(monkeypatch, "megatron.training.global_vars", get_args=lambda: parsed)


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda one: one.name)
def test_a_trainer_that_is_imported_is_the_one_that_runs(monkeypatch, trainer):
    assert trainers.running_trainer() is None
    arguments(monkeypatch, perform_rl_step=trainer.name == "Megatron-RL")
    imported(monkeypatch, "megatron.rl.rl_utils")  # by megatron.training, too
    imported(monkeypatch, trainer.module, get_args=trainer.module)
    assert trainers.running_trainer() is trainer


def test_versions_that_did_not_run_are_said_once(monkeypatch, caplog):
    """By the first rank, in the order of the tables; those inside a range are not."""
    monkeypatch.setattr(versions, "TESTED", {"torch": ("2.6.0 to 2.9.1",), "nobodys": ("1.0",)})
    imported(monkeypatch, "verl", __version__="0.9.1")
    monkeypatch.setattr(torch, "__version__", "2.8.0+cu130")
    versions.warn_untested.cache_clear()
    versions.warn_untested(table.VERL)
    assert caplog.messages == versions.untested(TRAINERS) == []
    sys.modules["verl"].__version__, torch.__version__ = "0.10", "2.10.0"
    versions.warn_untested.cache_clear()
    with caplog.at_level(logging.WARNING):
        monkeypatch.setenv("RANK", "1")
        versions.warn_untested(None)
        monkeypatch.setenv("RANK", "0")
        for _ in range(2):
            versions.warn_untested(table.VERL)
    assert caplog.messages == ["verl 0.10, torch 2.10.0: not tested; run with verify=2"]
    assert version_of("not.there", "not-there") == ""


def test_a_version_between_two_that_ran_counts_as_tested():
    found = [*"0.16.0rc0 0.16.1 0.18.2 0.19.2+dc4f901 0.16.0 0.19.3 1.0 main".split()]
    assert [versions.is_tested("megatron-core", one) for one in found] == [True] * 4 + [False] * 4


@pytest.fixture
def callbacks():
    """What a schedule knows of the trainer that runs."""
    auto.on(PrefixConfig(mode="on"))
    yield lambda: schedules.get_forward_backward_func(1, None).callbacks
    auto.off()


def test_distillation_gets_the_stock_schedule(monkeypatch, caplog):
    """Its loss reads what segments do not keep; nothing would tell."""
    arguments(monkeypatch, export_kd_teacher_load="teacher")
    try:
        auto.on(PrefixConfig(mode="auto"))
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                found = schedules.get_forward_backward_func(1, None)
                assert found is schedules.forward_backward_no_pipelining
        (record,) = [one for one in caplog.records if one.name == "megatron_prefix.auto"]
        assert "stock schedule in every step: --export-kd-teacher-load" in record.getMessage()
        auto.on(PrefixConfig(mode="on"))
        for _ in range(2):
            with pytest.raises(UserError, match="--export-kd-teacher-load"):
                schedules.get_forward_backward_func(1, None)
        arguments(monkeypatch, export_kd_teacher_load=None)
        assert isinstance(schedules.get_forward_backward_func(1, None), PrefixSchedule)
    finally:
        auto.off()


@pytest.mark.parametrize("given", [True, False])
def test_flags_that_slime_and_miles_share(monkeypatch, callbacks, given):
    arguments(monkeypatch, allgather_cp=given, multi_lora=given)
    wanted = Slices.CONTIGUOUS if given else Slices.ZIGZAG
    assert trainers.slices() is callbacks().slices is wanted
    assert table.MILES.refusal() is (MULTI_LORA if given else None)


def test_before_the_command_line_is_parsed_nothing_is_refused(monkeypatch):
    get_args = mock.Mock(side_effect=AssertionError("args is not initialized."))
    imported(monkeypatch, "megatron.training.global_vars", get_args=get_args)
    assert table.MEGATRON_LM.refusal() is None


@pytest.mark.parametrize("name", ["ROLL", "SLIME", "NEMO_RL"])
def test_rolls_masks_are_over_tokens(monkeypatch, callbacks, name):
    imported(monkeypatch, vars(table)[name].module)
    assert callbacks().masks_tokens is (name != "SLIME")


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda one: one.name)
def test_every_trainer_has_its_page(trainer):
    """A recipe that verifies first, the line that follows, and what helps scattered groups."""
    page = PAGES / f"{trainer.name.lower().replace('-', '_')}.md"
    text = page.read_text(encoding="utf-8")
    settings = "MEGATRON_PREFIX_VERIFY=2", 'MEGATRON_PREFIX_VERIFY: "2"', "--prefix-verify 2"
    assert any(setting in text for setting in settings)
    assert re.search(
        rf"^megatron_prefix \S+ in {trainer.name} .*: mode auto, verify 2$", text, re.M
    )
    if trainer is not table.MILES:  # slime's page has it
        assert "(../several-nodes.md#groups-on-several-data-parallel-ranks)" in text


def test_what_is_said_to_have_run_is_run():
    """No trainer is in the tables by reading alone."""
    ran = {name.partition(", ")[0] for name in run_sources.TRAINERS}
    assert ran == {one.name for one in TRAINERS if one.tried}
    for one in run_sources.TRAINERS.values():
        assert {*one.stock} <= {name for name in one.layouts if name.endswith("-auto")}
        assert {*one.stock.values()} <= {*TABLE}


def test_the_documents_table_is_of_what_is_run_and_refused():
    text = which_runs.PAGE.read_text(encoding="utf-8")
    assert text.count(which_runs.BEGIN) == 1
    found = text.partition(which_runs.BEGIN)[2].partition(which_runs.END)[0]
    assert found == which_runs.documented()
