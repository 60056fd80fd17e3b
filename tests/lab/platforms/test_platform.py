"""Choosing where to run, and the CPU platform. What it lets run is in tests/lab/models."""

import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch

from megatron_prefix.errors import UserError
from megatron_prefix.lab import platforms, runtime
from megatron_prefix.lab.platforms import cpu
from megatron_prefix.lab.runtime import Layout
from tests.harness.ranks import run_ranks


def test_select_describes_the_cpu():
    platform = platforms.select("cpu")
    assert (platform.device_type, platform.backend, platform.name) == ("cpu", "gloo", "CPU")
    assert platform.device(3) == torch.device("cpu")
    assert cpu.enabled()


def test_select_refuses_what_is_not_there():
    with pytest.raises(UserError, match="'tpu' is not known; choose one of cpu, cuda"):
        platforms.select("tpu")
    with pytest.raises(UserError, match="torch sees no GPU"):
        platforms.select("cuda")


def test_enable_twice_rebinds_once():
    before = (torch.zeros, torch.Tensor.type, torch.distributed.all_gather)
    cpu.enable()
    assert (torch.zeros, torch.Tensor.type, torch.distributed.all_gather) == before


@pytest.fixture
def fresh(monkeypatch):
    """As in a process that has not chosen a platform, on a machine with a GPU."""
    monkeypatch.setattr(cpu, "_enabled", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.usefixtures("fresh")
def test_a_visible_gpu_is_not_overridden_unasked():
    with pytest.raises(RuntimeError, match="insist with hide_gpus=True"):
        cpu.enable()
    assert not cpu.enabled()


@pytest.mark.usefixtures("fresh")
def test_a_gpu_in_use_is_not_hidden(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="already uses a GPU"):
        cpu.enable(hide_gpus=True)


def test_cuda_names_mean_the_cpu():
    for factory in (torch.zeros, torch.ones, torch.empty):
        assert factory(2, device="cuda", pin_memory=True).device.type == "cpu"
        assert factory(2, device=torch.device("cuda", 0)).device.type == "cpu"
    assert torch.tensor([1], device="cuda").cuda().device.type == "cpu"
    assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.zeros(1).type(torch.float64).dtype == torch.float64


def in_a_new_process(code, **environment):
    """Output and exit code of python -c `code`."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120,
        check=False, env={**os.environ, **environment},
    )  # fmt: skip


def test_platform_comes_only_when_asked_even_after_megatron():
    done = in_a_new_process(
        "import megatron.core.models.gpt.gpt_model, torch; zeros = torch.zeros; "
        "import megatron_prefix.lab.models.build, megatron_prefix.lab.runtime; "
        "from megatron_prefix.lab.platforms import cpu; "
        "assert torch.zeros is zeros and not cpu.enabled(); "
        "from megatron_prefix.lab import runtime; runtime.initialize(runtime.Layout()); "
        "from megatron_prefix.lab.models.build import build_model; "
        "from megatron_prefix.lab.models.presets import resolve; "
        "[model] = build_model(resolve('tiny-llama', num_layers=1).with_vocab(9)); "
        "x = torch.zeros(1, 4, dtype=torch.long); model(x, x, None, labels=x).sum().backward(); "
        "runtime.shutdown()"  # gloo's threads may abort a process that leaves without it
    )
    assert done.returncode == 0, done.stderr


def gather_and_scatter():
    rank = runtime.initialize(Layout(dp=3)).rank
    lengths = [2, 0, 3]
    mine = torch.full((lengths[rank], 2), float(rank + 1))
    gathered = [torch.empty(length, 2) for length in lengths]
    torch.distributed.all_gather(tensor_list=gathered, tensor=mine)
    out = torch.empty(lengths[rank], 2)
    pieces = [piece * (rank + 1) for piece in gathered]
    torch.distributed.reduce_scatter(output=out, input_list=pieces)
    return gathered, out


def test_gloo_collectives_of_unequal_length():
    for rank, (gathered, out) in enumerate(run_ranks(3, gather_and_scatter)):
        for number, (piece, length) in enumerate(zip(gathered, [2, 0, 3], strict=True)):
            assert torch.equal(piece, torch.full((length, 2), float(number + 1)))
        assert torch.equal(out, gathered[rank] * 6)


def threads_of_a_group():
    runtime.initialize(Layout(dp=2))
    before = len(os.listdir("/proc/self/task"))
    group = torch.distributed.new_group(timeout=timedelta(seconds=7))
    started = len(os.listdir("/proc/self/task")) - before
    ours = group._get_backend(torch.device("cpu"))
    theirs = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
    return started, ours.options._timeout, ours.options._devices == theirs.options._devices


def test_groups_share_gloos_thread():
    """A group starts one thread for its own work, and keeps its time limit."""
    assert run_ranks(2, threads_of_a_group) == [(1, timedelta(seconds=7), True)] * 2


def test_stand_ins_last_for_the_import_which_needs_them(monkeypatch):
    cpu.enable(hide_gpus=True)
    cpu.load_recurrent_layers()
    names = {name.partition(".")[0] for name in sys.modules}
    assert not names & {"fla", "causal_conv1d", "mamba_ssm"}
    mixer = sys.modules["megatron.core.ssm.mamba_mixer"]
    cpu.load_recurrent_layers()
    assert sys.modules["megatron.core.ssm.mamba_mixer"] is mixer
    monkeypatch.delattr(mixer, "_on_cpu")
    monkeypatch.setattr(mixer, "HAVE_MAMBA_SSM", False)
    with pytest.raises(UserError, match="imported without mamba-ssm"):
        cpu.load_recurrent_layers()
