"""The metrics file and its counterpart in TensorBoard."""

import json
import sys

import pytest
import torch

from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.rl import flops, metrics
from megatron_prefix.lab.rl.metrics import MetricsWriter
from megatron_prefix.lab.rl.run_folder import METRICS


def lines(folder):
    return [json.loads(line) for line in (folder / METRICS).read_text("utf-8").splitlines()]


def write(folder, steps, first=1, value=0.5):
    writer = MetricsWriter(folder, first)
    try:
        for step in steps:
            writer.write(step, {"train/loss": value + step, "prefix_sharing/active": 1})
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 PCIe", None), ("NVIDIA H200", 989e12), ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("NVIDIA GeForce RTX 4090", None),
    ],
)  # fmt: skip
def test_the_rate_of_a_gpu_is_that_of_its_card(name, rate, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert flops.peak_flops("bfloat16") == rate
    assert flops.peak_flops("float32") is None


def test_resuming_drops_what_comes_again_and_a_cut_line(tmp_path):
    write(tmp_path, range(1, 5))
    with open(tmp_path / METRICS, "a", encoding="utf-8") as file:
        file.write('{"step": 5, "train/lo')
    write(tmp_path, range(3, 5), first=3, value=0.25)
    assert [(row["step"], row["train/loss"]) for row in lines(tmp_path)] == [
        (1, 1.5), (2, 2.5), (3, 3.25), (4, 4.25),
    ]  # fmt: skip


def test_tensorboard_has_the_same_names(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, range(1, 4))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "prefix_sharing/active"}
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (1, 1.5), (2, 2.5), (3, 3.5),
    ]  # fmt: skip


# Weights & Biases ---------------------------------------------------------------------------------

STAND_IN = """
import json, pathlib
class errors:
    class Error(Exception): pass
class Run:
    def __init__(self, folder, options):
        self.folder, self.lines = folder, [options]
    def log(self, row, step): self.lines.append({"step": step, **row})
    def finish(self, exit_code):
        self.lines.append(exit_code)
        (self.folder / "rows.json").write_text(json.dumps(self.lines))
def init(**options):
    folder = pathlib.Path(options["dir"]) / "wandb"
    folder.mkdir(exist_ok=True)
    if options["project"] == "refused": raise errors.Error("api_key not configured\\nmore lines")
    if options["project"] == "odd": raise ValueError("1 error\\nmode\\n  Input should be 'online'")
    return Run(folder, options)
"""


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """A module of that name, as far as it is used."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "wandb.py").write_text(STAND_IN, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    yield
    sys.modules.pop("wandb", None)


@pytest.mark.usefixtures("wandb")
def test_weights_and_biases_gets_the_same_rows(tmp_path):
    writer = MetricsWriter(tmp_path / "run", wandb_project="mine")
    writer.begin()
    writer.write(3, {"train/loss": 0.5, "prefix_sharing/fallback_reason": "short"})
    writer.close()
    rows = json.loads((tmp_path / "run" / "wandb" / "rows.json").read_text("utf-8"))
    options, row, exit_code = rows
    assert options == {"project": "mine", "name": "run", "dir": str(tmp_path / "run")}
    assert row == {"step": 3, "train/loss": 0.5, "prefix_sharing/fallback_reason": "short"}
    assert exit_code == 0


# Rates --------------------------------------------------------------------------------------------


def test_times_and_rates_under_verls_names():
    found = {"train/step_s": 4.0, "train/updates_s": 3.0, "prefix_sharing/raw_tokens": 4000}
    assert metrics.under_verls_names(found, {"ref_logprobs": 0.5}, 2) == {
        "timing_s/ref": 0.5,
        "timing_s/update_actor": 3.0,
        "timing_s/step": 4.0,
        "perf/total_num_tokens": 4000,
        "perf/time_per_step": 4.0,
        "perf/throughput": 500.0,  # a second and rank
    }


def test_flops_of_packs_are_those_of_their_rollouts():
    import torch

    cost = flops.cost_model(resolve("tiny-llama").with_vocab(100))
    rows = [{"tokens": torch.zeros(1, n)} for n in (5, 7)]
    pack = {"tokens": torch.zeros(1, 12), "cu_seqlens": torch.tensor([0, 5, 12])}
    assert flops.of_microbatches(cost, rows, 1) == flops.of_microbatches(cost, [pack], 1)
    positions, pairs = 12, 15 + 28
    linear, head, attention, *_ = cost.forward
    by_hand = (linear + head) * positions + attention * pairs
    assert flops.of_microbatches(cost, rows, 1) == pytest.approx(3 * by_hand)
    slices = [{"tokens": torch.zeros(1, 6)}]
    whole = [{"tokens": torch.zeros(1, 12)}]
    assert flops.of_microbatches(cost, slices, 2) == flops.of_microbatches(cost, whole, 1)
