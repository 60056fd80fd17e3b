"""`doctor`: what it finds, what it calls a problem, and how it ends."""

import pytest
import torch

from megatron_prefix.errors import NOT_YET, Refusal
from megatron_prefix.lab.cli import doctor, packages
from megatron_prefix.layers.blocks import kernels
from megatron_prefix.layers.blocks.kernels import KERNELS
from megatron_prefix.megatron import features
from megatron_prefix.refusals.table import GROUPS, TABLE
from megatron_prefix.trainers import TRAINERS
from megatron_prefix.trainers.table import VERL
from tests.harness.command_line import forked, printed

REQUIREMENTS = [
    "torch>=2.6", "einops", 'tensorboard; extra == "train"',
    'tokenizers>=0.20; extra == "tokenizers"', 'megatron_prefix[train]; extra == "test"',
    'tomli; python_version < "3"',
]  # fmt: skip


@pytest.fixture(scope="module")
def report():
    """Of a process of its own, since the verb selects a platform."""
    return printed("doctor", "--device", "cpu", "--model", "tiny-llama")


def test_kernels_come_with_the_reason_for_each_that_is_missing(report):
    assert set(report["kernels"]) == {"float64", "float32", "bfloat16"}
    for dtype, reasons in report["kernels"].items():
        assert set(reasons) == set(KERNELS)
        assert reasons["math"] is None
        assert "CUDA" in reasons["cudnn"]
        assert reasons[report["chosen"][dtype]] is None
    assert report["chosen"]["float64"] == "math"
    assert report["why"] == {
        "float64": "math, which is exact", "float32": "flash_cpu, the fastest here",
        "bfloat16": "flash_cpu, the fastest here",
    }  # fmt: skip


def test_a_model_is_checked_with_its_own_heads(monkeypatch):
    """A kernel compiles for a width and a number of query heads a K/V head."""
    asked, probed = set(), kernels.probed

    def noted(*args):
        asked.add(args[3:6])
        return probed(*args)

    monkeypatch.setattr(kernels, "probed", noted)
    assert doctor.examine("cpu", "qwen3-8b")["ok"]
    assert asked == {(128, 128, 4)}
    asked.clear()
    assert doctor.examine("cpu")["ok"]
    assert asked == {(128, 128, 2)}


@pytest.mark.parametrize("probe", [False, True])
def test_what_compiles_first_is_only_run_to_probe(monkeypatch, probe):
    ran, small_run = set(), kernels.small_run

    def noted(kernel, *tensors):
        ran.add(kernel.name)
        return small_run(kernel, *tensors)

    kernels.probed.cache_clear()
    monkeypatch.setattr(kernels, "COMPILED", ("flash_cpu",))
    monkeypatch.setattr(kernels, "small_run", noted)
    assert doctor.examine("cpu", probe=probe)["chosen"]["float32"] == "flash_cpu"
    assert ("flash_cpu" in ran) is probe
    kernels.probed.cache_clear()


def test_every_refused_feature_is_listed_with_what_to_do(report):
    listed = report["refused_features"]
    assert listed.keys() == {one.name for one in TABLE if one.where in doctor.MODEL}
    assert len(listed) > 40
    assert listed["hidden_dropout"].startswith("set it to 0")
    assert listed["fp8_recipe delayed"].startswith("use blockwise")
    assert listed["overlap_moe_expert_parallel_comm"].startswith("turn it off")
    assert listed["layer …'s router …"] == "use Megatron's TopKRouter"
    assert [line["name"] for line in report["refusals"]] == [one.name for one in TABLE]
    (found,) = [line for line in report["refusals"] if line["name"] == "hidden_dropout"]
    fix = report["refused_features"]["hidden_dropout"]
    name = "hidden_dropout"
    assert found == {"name": name, "where": "config", "fix": fix, "kind": "never supported"}
    assert {line["kind"] for line in report["refusals"]} == {"never supported", "not supported yet"}


def test_for_people(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # as wide as in a file
    done = forked("doctor", "--device", "cpu", "--refused")
    words = " ".join(done.stdout.split())
    for title in ("attention kernels on cpu", *(f"refused: {title}" for title in GROUPS.values())):
        assert title in words
    done = forked("doctor", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    first = done.stdout.partition("on cpu: ready\n")[0]
    for text in ("megatron-core 0.", "1 x CPU (", "flash_cpu, the fastest here"):
        assert text in first
    assert len(done.stdout.splitlines()) <= 20
    assert "features, with what to do: doctor --refused" in done.stdout


LINE = Refusal(
    "num_layers", "config", NOT_YET, "use another", lambda config: config.num_layers == 4
)


@pytest.mark.parametrize(("patched", "arguments", "problem"), [
    ((torch.cuda, "is_available", lambda: False), ["cuda"], "torch sees no GPU"),
    ((features, "OPTIONS", (LINE,)), ["cpu", "tiny-llama"],
     "tiny-llama has num_layers: use another"),
    ((features, "OLDEST", features.Version("99.0")), ["cpu"],
     f"megatron-core {features.megatron.core.__version__} is too old: install 99.0 or newer"),
], ids=["a device that is not there", "a model that is refused", "an old Megatron"])  # fmt: skip
def test_what_is_a_problem(monkeypatch, patched, arguments, problem):
    monkeypatch.setattr(*patched)
    told = doctor.examine(*arguments)
    assert not told["ok"] and len(told["problems"]) == 1 and problem in told["problems"][0]
    assert told["kernels"] == {} or arguments != ["cuda"]
    assert arguments[1:] == [] or told["model"]["refused"] == ["num_layers: use another"]


def test_what_is_needed_and_what_is_optional():
    installed = {"torch": "2.5.1", "tokenizers": "0.19"}.get
    needed, extras = packages.missing(REQUIREMENTS, ["train", "tokenizers", "test"], installed)
    assert needed == ["torch>=2.6", "einops"]
    assert extras == {
        "train": {"missing": ["tensorboard"], "command": "pip install tensorboard"},
        "tokenizers": {
            "missing": ["tokenizers>=0.20"],
            "command": "pip install 'tokenizers>=0.20'",
        },
    }


def test_installed_trainers_are_listed_with_tried_versions(monkeypatch, capsys):
    monkeypatch.setattr(packages, "version", {"verl": "1.0"}.get)
    monkeypatch.setattr("megatron_prefix.trainers.trainer.version_of", lambda *_: "1.0")
    assert {f"{one.name} 1.0" for one in TRAINERS} <= {*doctor.examine("cpu")["untested"]}
    found = doctor._trainers()
    assert found.keys() == {"verl"}
    assert (found["verl"]["version"], found["verl"]["tried"]) == ("1.0", [*VERL.tried])
    doctor.show({**EMPTY, "trainers": found, "untested": ["verl 1.0", "torch 3.0"]})
    said = " ".join(capsys.readouterr().out.split())
    assert "not tested verl 1.0, torch 3.0; run with verify=2" in said
    assert f"verl 1.0 tried: {', '.join(VERL.tried)}; on by MEGATRON_PREFIX_MODE=auto" in said


EMPTY = {
    "ok": True, "problems": [], "device": "cpu", "versions": {}, "untested": [], "devices": [],
    "kernels": {}, "chosen": {}, "why": {}, "recurrent": {}, "untried": [], "stock_packs": None,
    "refusals": [], "extras": {}, "model": None,
}  # fmt: skip
