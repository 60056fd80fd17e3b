"""Choosing where to run, the CPU platform, and the trial of transformer-engine's packs."""

import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_prefix.errors import UserError
from megatron_prefix.lab import platforms
from megatron_prefix.lab.platforms import cpu, stock_packs


def test_select_refuses_what_is_not_there():
    with pytest.raises(UserError, match="'tpu' is not known; choose one of cpu, cuda"):
        platforms.select("tpu")
    with pytest.raises(UserError, match="torch sees no GPU"):
        platforms.select("cuda")


@pytest.mark.parametrize(("options", "in_use", "message"), [
    ({}, False, "insist with hide_gpus=True"), ({"hide_gpus": True}, True, "already uses a GPU"),
])  # fmt: skip
def test_a_gpu_is_not_hidden_unasked_or_in_use(monkeypatch, options, in_use, message):
    """In a process that has not chosen a platform, on a machine with a GPU."""
    monkeypatch.setattr(cpu, "_enabled", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    with pytest.raises(RuntimeError, match=message):
        cpu.enable(**options)
    assert not cpu.enabled()


def test_cuda_names_mean_the_cpu():
    for factory in (torch.zeros, torch.ones, torch.empty):
        assert factory(2, device="cuda", pin_memory=True).device.type == "cpu"
        assert factory(2, device=torch.device("cuda", 0)).device.type == "cpu"
    assert torch.tensor([1], device="cuda").cuda().device.type == "cpu"
    assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.zeros(1).type(torch.float64).dtype == torch.float64


def test_platform_comes_only_when_asked_even_after_megatron():
    code = (
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
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


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


def library(break_it):
    class DotProductAttention:
        def __init__(self, heads, width, num_gqa_groups):
            assert (heads, width, num_gqa_groups) == (4, 8, 2)

        def __call__(self, query, key, value, **given):
            assert given["qkv_format"] == "thd" and given["attn_mask_type"] == "padding_causal"
            ends = given["cu_seqlens_q"].tolist()
            assert ends == given["cu_seqlens_kv"].tolist() == [0, 1000, 1300, 1377, 2556]
            return stock_packs._definition(query, break_it(key), value)

    return SimpleNamespace(DotProductAttention=DotProductAttention)


def tried(monkeypatch, package):
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", package)
    stock_packs.refusal.cache_clear()
    return stock_packs.refusal(4, 2, 8, "cpu")


def sent(factor):
    """Keys whose gradient is wrong by that factor, and the output is right."""

    def scaled(key):
        out = key.clone()
        out.register_hook(lambda gradient: gradient * factor)
        return out

    return scaled


def fail(_):
    raise RuntimeError("no backend\nand more")


@pytest.mark.parametrize(("break_it", "message"), [
    (lambda key: key, "None"), (fail, "RuntimeError: no backend"),
    (sent(0.76), "wrong gradient of keys (relative error 2.4e-01)"),
    (sent(math.nan), "NaN or infinite"),
], ids=["right", "fails", "wrong gradient", "no number"])  # fmt: skip
def test_what_is_wrong_with_packs_is_named(monkeypatch, break_it, message):
    assert message in str(tried(monkeypatch, library(break_it)))


def test_without_the_library_nothing_is_said(monkeypatch):
    assert tried(monkeypatch, None) is None
