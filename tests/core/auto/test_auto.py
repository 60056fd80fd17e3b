"""The schedule in Megatron's place: which references are swapped and restored, and its settings."""

import importlib.machinery
import importlib.util
import logging
import subprocess
import sys
import types
from dataclasses import fields

import pytest
from megatron.core import pipeline_parallel
from megatron.core.pipeline_parallel import schedules

from megatron_prefix import PrefixConfig, PrefixSchedule, auto
from megatron_prefix.auto import first_line
from megatron_prefix.auto.settings import FIELDS, described_config, flag, read_config, variable
from megatron_prefix.auto.swap import NAME
from megatron_prefix.errors import UserError
from megatron_prefix.trainers.table import NEMO_RL
from tests.harness.data import REPOSITORY

KEPT = (schedules.get_forward_backward_func,)  # a global would be swapped, too
SIZES = (1, None)  # pp_size, vp_size


@pytest.fixture(autouse=True)
def _off():
    yield
    auto.off()
    assert schedules.get_forward_backward_func is KEPT[0]


def module(monkeypatch, **members):
    """An imported module with these members."""
    made = types.ModuleType("somebodys_trainer")
    vars(made).update(members)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def test_earlier_and_later_references_are_swapped_and_restored(monkeypatch):
    trainer = module(monkeypatch, schedule_of=KEPT[0], other=len)
    monkeypatch.setitem(sys.modules, "somebodys_nothing", None)
    auto.on(PrefixConfig())
    ours = schedules.get_forward_backward_func
    assert ours is not KEPT[0]
    assert pipeline_parallel.get_forward_backward_func is ours
    assert (trainer.schedule_of, trainer.other) == (ours, len)
    exec(f"from megatron.core.pipeline_parallel import {NAME} as later", vars(trainer))
    assert trainer.later is ours
    assert isinstance(ours(*SIZES), PrefixSchedule)
    auto.off()
    assert pipeline_parallel.get_forward_backward_func is KEPT[0]
    assert (trainer.schedule_of, trainer.later) == (KEPT[0], KEPT[0])
    auto.off()  # nothing to undo


def test_off_is_megatrons_own_function():
    auto.on(PrefixConfig(mode="off"))
    for size, virtual in ((1, None), (2, None), (2, 2)):
        expected = KEPT[0](size, virtual)
        assert schedules.get_forward_backward_func(pp_size=size, vp_size=virtual) is expected


def test_lazy_modules_are_not_woken(monkeypatch):
    path = REPOSITORY / "tests" / "harness" / "__init__.py"
    loader = importlib.machinery.SourceFileLoader("somebodys_lazy", str(path))
    lazy = importlib.util.LazyLoader(loader)
    spec = importlib.util.spec_from_loader("somebodys_lazy", lazy)
    asleep = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "somebodys_lazy", asleep)
    lazy.exec_module(asleep)
    auto.on(PrefixConfig())
    assert type(asleep).__name__ == "_LazyModule"


def test_a_megatron_without_the_function_is_an_error(monkeypatch):
    monkeypatch.delattr(schedules, NAME)
    with pytest.raises(UserError, match="has no get_forward_backward_func"):
        auto.on(PrefixConfig())


def python(code, environ):
    """A new process that runs the code."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=environ,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_a_megatron_that_is_imported_later_gets_it():
    """As verl's plugin and slime's first function turn it on."""
    code = """
import sys
import megatron_prefix.auto.on_import
from megatron_prefix import auto
auto.init("arguments")
assert not {"torch", "megatron"} & sys.modules.keys()
from megatron_prefix.lab.platforms import cpu
cpu.enable()
from megatron.core.pipeline_parallel import get_forward_backward_func as early, schedules
assert early is schedules.get_forward_backward_func and early.stock is not early
from megatron_prefix import PrefixSchedule
from megatron_prefix.trainers.table import NEMO_RL
made = early(1, None)
assert isinstance(made, PrefixSchedule) and made.config.min_gain == 7, made
auto.off()  # `early` is a global of __main__, and is restored, too
assert early is schedules.get_forward_backward_func and not hasattr(early, "stock")
assert not any(type(one).__module__.startswith("megatron_prefix") for one in sys.meta_path)
"""
    done = python(code, {"MEGATRON_PREFIX_MIN_GAIN": "7"})
    assert done.returncode == 0, done.stderr


def test_what_was_found_is_said_once(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "slime", types.ModuleType("slime"))
    sys.modules["slime"].__version__ = "9.8"
    auto.on(PrefixConfig(mode="auto", chunk_tokens=512))
    with caplog.at_level(logging.WARNING, "megatron_prefix.auto"):
        for _ in range(3):
            schedules.get_forward_backward_func(*SIZES)
    (line,) = caplog.messages
    assert " in slime 9.8 (megatron-core 0." in line
    assert line.endswith(": mode auto, chunk_tokens 512")


@pytest.mark.parametrize("heeded", [True, False])
def test_a_trainers_file_says_where_its_masks_are(monkeypatch, heeded):
    monkeypatch.setattr(NEMO_RL.__class__, "is_running", lambda one: one.name == "NeMo-RL")
    auto.on(PrefixConfig(trainer_masks=heeded))
    found = schedules.get_forward_backward_func(*SIZES).callbacks.samples
    assert found is (NEMO_RL.samples if heeded else None)
    own = schedules.get_forward_backward_func(*SIZES, samples=len).callbacks.samples
    assert own is len


TEXTS = {
    "mode": ("observe", "observe"), "chunk_tokens": ("auto", "auto"),
    "segment_tokens": ("4096", 4096), "min_gain": ("0", 0), "loss_in_leaves": ("true", True),
    "kernel": ("math", "math"), "memory": ("offload", "offload"),
    "memory_budget_gb": ("1.5", 1.5), "cache_host_layers": ("2", 2),
    "cp_reduce": ("wave", "wave"), "across_ranks": ("on", "on"),
    "run_ahead": ("1", 1), "min_speedup": ("2", 2.0),
    "align": ("2", 2), "trainer_masks": ("false", False),
    "cost_file": ("no-such.json", "no-such.json"), "graph_tokens": ("4096", 4096),
    "verify": ("2", 2),
    "watchdog_minutes": ("0.5", 0.5),
}  # fmt: skip


def test_every_field_that_a_step_has_is_a_setting():
    assert {one.name for one in FIELDS.values()} == {f.name for f in fields(PrefixConfig)} - {
        "share"
    }
    assert FIELDS.keys() == {*TEXTS, "plan"}
    assert (variable("plan"), flag("plan"), flag("mode")) == (
        "MEGATRON_PREFIX_PLAN", "--prefix-plan", "--prefix-schedule",
    )  # fmt: skip


def test_without_settings_the_mode_is_auto():
    assert read_config({}) == PrefixConfig(mode="auto")
    assert read_config({"MEGATRON_PREFIX_MODE": "", "PATH": "x"}) == PrefixConfig(mode="auto")
    assert described_config(read_config({})) == "mode auto"


@pytest.mark.parametrize("name", TEXTS)
def test_variables_flags_and_files(name, tmp_path):
    text, value = TEXTS[name]
    wanted = PrefixConfig(**{"mode": "auto", FIELDS[name].name: value})
    assert read_config({variable(name): text}) == wanted
    assert read_config({}, {name: text}) == wanted
    file = tmp_path / "prefix.toml"
    shown = f"'{text}'" if isinstance(value, str) else text
    file.write_text(f"{name} = {shown}\n", encoding="utf-8")
    assert read_config({"MEGATRON_PREFIX_CONFIG": str(file)}) == wanted


def test_graphs_may_be_left_to_measurements():
    auto = {"MEGATRON_PREFIX_GRAPH_TOKENS": "auto"}
    for mode in ("auto", "on", "off", "observe"):
        assert read_config(auto, {"mode": mode}) == PrefixConfig(mode=mode, graph_tokens="auto")


def test_a_flag_wins_over_a_variable_and_that_over_the_file(tmp_path):
    file = tmp_path / "prefix.toml"
    file.write_text("min_gain = 1\nrun_ahead = 1\nmode = 'off'\n", encoding="utf-8")
    environ = {
        "MEGATRON_PREFIX_CONFIG": str(file), "MEGATRON_PREFIX_MIN_GAIN": "2",
        "MEGATRON_PREFIX_MODE": "observe",
    }  # fmt: skip
    found = read_config(environ, {"mode": "on"})
    assert found == PrefixConfig(mode="on", min_gain=2, run_ahead=1)
    assert described_config(found) == "mode on, min_gain 2, run_ahead 1"


@pytest.mark.parametrize(("environ", "message"), [
    ({"MODE": "maybe"}, "MEGATRON_PREFIX_MODE: mode is 'maybe': give one of off, observe"),
    ({"MIN_GAIN": "few"}, "MEGATRON_PREFIX_MIN_GAIN is 'few': give an integer"),
    ({"SEGMENT_TOKENS": "4k"}, "MEGATRON_PREFIX_SEGMENT_TOKENS: segment_tokens is '4k'"),
    ({"KERNEL": "zzz"}, "MEGATRON_PREFIX_KERNEL: attention kernel 'zzz' is not auto, one of"),
    ({"PLAN": "no-such.csv"}, "MEGATRON_PREFIX_PLAN: no-such.csv: "),
    ({"SEGMENT_TOKEN": "4096"}, "MEGATRON_PREFIX_SEGMENT_TOKEN is not a setting; known are M"),
    ({"CONFIG": "no-such.toml"}, "MEGATRON_PREFIX_CONFIG: no-such.toml cannot be read"),
])  # fmt: skip
def test_a_bad_variable_is_one_line(environ, message):
    with pytest.raises(UserError) as caught:
        read_config({f"MEGATRON_PREFIX_{name}": text for name, text in environ.items()})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "message"), [
    ("mode = ", "is not valid TOML: "),
    (f"min_gain = {'9' * 5000}", "is not valid TOML: "),
    (f"x = {'[' * 5000}", "is not valid TOML: "),
    ("mode = 'maybe'", "mode: mode is 'maybe': give one of"),
    ("min_gain = true", "min_gain is True: give an integer"),
    ("chunk_tokens = 1.5", "chunk_tokens is 1.5: give an integer or 'auto'"),
    ("plan_file = 'x'", "plan_file is not a setting; known are mode, "),
    ("[verl]\nmode = 'on'", "verl is not a setting"),
])  # fmt: skip
def test_a_bad_file_is_one_line(text, message, tmp_path):
    file = tmp_path / "prefix.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError) as caught:
        read_config({"MEGATRON_PREFIX_CONFIG": str(file)})
    assert str(caught.value).startswith(str(file))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bad_variable_ends_a_trainer_that_hides_plugin_errors():
    code = "try:\n    import megatron_prefix.auto.on_import\nexcept Exception:\n    pass\n"
    done = python(code, {"MEGATRON_PREFIX_MODE": "maybe"})
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("megatron_prefix: MEGATRON_PREFIX_MODE: mode is 'maybe': give one of")


STATE = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
finders = list(sys.meta_path)
import megatron_prefix.auto.plugin
print(sys.meta_path != finders, "megatron" in sys.modules)
"""


def plugin(environ):
    """Exit code, stdout and stderr of a process that verl's plugin is imported in."""
    done = python(STATE, environ)
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def test_to_be_installed_changes_nothing():
    code, changed, line = plugin({})
    assert (code, changed) == (0, "False False")
    assert line.startswith("INFO megatron_prefix ") and "\n" not in line
    assert "is installed and off: MEGATRON_PREFIX_MODE=auto turns it on" in line
    assert plugin({"RANK": "1"}) == (0, "False False", "")


def test_settings_without_a_mode_are_a_warning():
    code, changed, line = plugin({"MEGATRON_PREFIX_MIN_GAIN": "7"})
    assert (code, changed) == (0, "False False")
    assert line.startswith("WARNING ") and "whatever MEGATRON_PREFIX_MIN_GAIN says" in line


def test_a_mode_turns_the_plugin_on(tmp_path):
    file = tmp_path / "prefix.toml"
    file.write_text("mode = 'observe'\n", encoding="utf-8")
    for name, text in (("MODE", "auto"), ("CONFIG", str(file))):
        assert plugin({f"MEGATRON_PREFIX_{name}": text}) == (0, "True False", "")


# Bad usage is one line, whatever has started the process ------------------------------------------

WAITS = [
    ({}, 0.0),
    ({"RANK": "1", "LOCAL_RANK": "1"}, 0.0),  # not torchrun's
    ({"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "LOCAL_RANK": "0"}, 0.0),
    ({"TORCHELASTIC_RUN_ID": "none", "RANK": "8", "LOCAL_RANK": "0"}, first_line.WAIT_S),
    ({"TORCHELASTIC_RUN_ID": "none", "RANK": "9", "LOCAL_RANK": "1"}, 2 * first_line.WAIT_S),
]


@pytest.mark.parametrize(("environ", "seconds"), WAITS)
def test_the_first_rank_is_heard_first(monkeypatch, capsys, environ, seconds):
    """torchrun ends the others meanwhile; one that stays has an error of its own."""
    waited = []
    monkeypatch.setattr(first_line.time, "sleep", waited.append)
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    first_line.first_line("a line")
    assert capsys.readouterr().err == "a line\n"
    assert sum(waited) == seconds
