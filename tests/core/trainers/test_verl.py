"""verl of the registry runs its own engine steps with the prefix schedule in Megatron's place."""

import os

import pytest

from benchmarks.trainers.verl_run import write_plugin
from megatron_prefix.features.watch.around import WATCHED
from tests.core.trainers.both import Step
from tests.core.trainers.registry import installed, printed

LAYOUTS = ("tp2-pp2", "cp2-fused", "pp2-mtp-detached-recompute", "1-mtp-detached", "1-plugin")
"""The last one with the schedule that verl's plugin puts into its engine."""
FORMS = {
    "1-padded-auto": ("", ""), "pp2-r2-auto": ("records routes", ""),
    "tp2-sp-r3-recompute-auto": ("", ""), "dp2-across-r3-auto": ("", ""),
}  # fmt: skip
"""Of mode "auto": why log-probs and updates run as stock's do; "" if they share."""
SETTINGS = {"MODE": "on", "MIN_GAIN": "0", "SEGMENT_TOKENS": "128", "KERNEL": "math"}
ON = {f"MEGATRON_PREFIX_{name}": text for name, text in SETTINGS.items()}
"""Small segments, so that small steps have many; the kernel without probing."""


def run(*layouts, **environ):
    """What every layout's ranks saw; one process imports verl for all of them."""
    words = "tests.core.trainers.verl_steps", str(installed("verl")), *layouts
    return {run["layout"]: run for run in printed(len(layouts), *words, **environ)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """With nothing but the plugin's entry point and variables; all but its layout then put a
    schedule in the place of the plugin's."""
    plugin = tmp_path_factory.mktemp("plugin")
    write_plugin(plugin)
    # Before the installed package, whose metadata may be of another version.
    named = {**ON, "PYTHONPATH": os.pathsep.join([str(plugin), os.environ.get("PYTHONPATH", "")])}
    return run(*LAYOUTS, *FORMS, **named)


def check(run):
    """Whether every rank's steps are those of the stock schedule, and shared."""
    assert not run["error"], run["error"]
    for rank in run["ranks"]:
        steps = [Step(**step) for step in rank]
        assert [step.kind for step in steps] == ["forward", "update"]
        assert [step.problem for step in steps] == ["", ""]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_verl_gets_the_stock_schedules_results(runs, layout):
    check(runs[layout])


@pytest.mark.slow
@pytest.mark.parametrize("layout", FORMS)
def test_in_mode_auto_verl_shares_or_gets_stocks_bits(runs, layout):
    assert not runs[layout]["error"], runs[layout]["error"]
    for rank in runs[layout]["ranks"]:
        watched, forward, again, update = (Step(**step) for step in rank)
        assert [watched.reason, again.reason] == [WATCHED] * 2
        assert [step.problem for step in (watched, forward, again, update)] == [""] * 4
        for step, reason in zip((forward, update), FORMS[layout], strict=True):
            assert reason in step.reason
            assert bool(reason) == bool(step.reason)
