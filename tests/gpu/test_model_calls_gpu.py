"""Model calls on a GPU: packed samples with transformer-engine, side streams, autocast; hybrid
models with flash-linear-attention's kernels."""

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func as stock_schedule

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.models.build import build_model, has_transformer_engine
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.numerics import tolerance
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.run.execute.executor import Executor
from megatron_prefix.run.read.forward_step_state import Settings
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness.calls import ROWS, VOCAB, Form, Trainer, run_step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_one_gpu")]
CONFIG = PrefixConfig(min_gain=0, segment_tokens=64, chunk_tokens=16)


def small(dtype, **options):
    spec = resolve("tiny-qwen3", num_layers=2).with_vocab(VOCAB)
    return build_model(spec, dtype=dtype, device="cuda", **options)


def compare(chunks, form, dtype, ours=Trainer):
    """Losses of every position and gradients within the policy of a dtype."""
    schedule = PrefixSchedule(CONFIG)
    expected, gradients = run_step(stock_schedule(), Trainer(form, 0, Layout(), "cuda"), chunks)
    before = Settings.now()
    found, own = run_step(schedule, ours(form, 0, Layout(), "cuda"), chunks)
    assert Settings.now() == before
    assert schedule.report is not None and schedule.report.decision.share
    limit = tolerance(dtype, 512)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine["nll"] - theirs["nll"]).abs().max() <= limit * theirs["nll"].abs().max()
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert own[name].isfinite().all(), name
        assert float((own[name] - gradient).abs().max()) <= limit * largest, name


@pytest.mark.parametrize("form", [Form(), Form(pad=8), Form(logits=True), Form(mask=False), ROWS])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_local_layers(form, dtype):
    compare(small(dtype, layer_spec="local"), form, getattr(torch, dtype))


@pytest.mark.skipif(not has_transformer_engine(), reason="transformer-engine is not installed")
@pytest.mark.parametrize("form", [Form(pad=8), Form(pad=8, logits=True)])
def test_transformer_engine(form):
    compare(small("bfloat16", layer_spec="te"), form, torch.bfloat16)


@pytest.mark.skipif(not has_transformer_engine(), reason="transformer-engine is not installed")
@pytest.mark.parametrize("shape", ["tokens", "transformer-engine's"])
def test_transformer_engine_ignores_masks_where_it_is_causal(shape):
    """So run/calls.py takes masks that cut off the ends of samples."""
    (model,) = small("bfloat16", layer_spec="te")
    tokens = torch.randint(0, VOCAB, (2, 16), device="cuda")
    kept = (torch.arange(16, device="cuda") < torch.tensor([[16], [9]], device="cuda")).bool()
    mask = kept if shape == "tokens" else ~kept[:, None, None, :]
    with torch.no_grad():
        without, found = (model(tokens, None, one) for one in (None, mask))
    assert torch.equal(found, without)


class OnAStream(Trainer):
    """Calls the model on a stream of its own."""

    stream: Any = None

    def step(self, iterator, model):
        self.stream = self.stream or torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            found = super().step(iterator, model)
        torch.cuda.current_stream().wait_stream(self.stream)
        return found


class UnderAutocast(Trainer):
    """Calls the model under autocast to bf16."""

    def step(self, iterator, model):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            output, loss_func = super().step(iterator, model)
        assert not torch.is_autocast_enabled("cuda")
        return output, loss_func


def test_a_stream_of_the_forward_steps_own():
    compare(small("float32", layer_spec="local"), Form(), torch.float32, OnAStream)


def test_autocast_around_the_call_reaches_the_segments():
    chunks = small("float32", layer_spec="local")
    seen = []
    decoder = chunks[0].module.decoder
    handle = decoder.register_forward_pre_hook(
        lambda *_: seen.append(torch.is_autocast_enabled("cuda"))
    )
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(handle.remove)
        compare(chunks, ROWS, torch.bfloat16, UnderAutocast)
    assert not all(seen) and seen[-1]  # the stock schedule's without, then ours with


@pytest.mark.parametrize("layers", ["local", "te"])
def test_no_action_of_a_step_waits_for_the_device(layers, monkeypatch):
    """Roots, chunks and waves, forward and backward; the first step compiles.

    With the rule's real widths, whose kernels others need as well (benchmarks/compile_fla.py).
    """
    pytest.importorskip("fla")
    if layers == "te":  # with its cross entropy, too
        pytest.importorskip("transformer_engine.pytorch")
    spec = resolve("qwen3.5-9b", num_layers=4, hidden_size=256, ffn_hidden_size=256)
    spec = dataclasses.replace(spec, vocab_size=None).with_vocab(VOCAB)
    chunks = build_model(spec, dtype="bfloat16", device="cuda", layer_spec=layers)
    schedule = PrefixSchedule(PrefixConfig(min_gain=0, segment_tokens=64, chunk_tokens=16))
    stock, steps = Executor.run, []

    def watched(self, *given):
        steps.append(given)
        torch.cuda.set_sync_debug_mode("error" if len(steps) > 1 else "default")
        try:
            stock(self, *given)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Executor, "run", watched)
    for _ in range(2):
        run_step(schedule, Trainer(ROWS, 0, Layout(), "cuda"), chunks)
    assert len(steps) == 2
    assert schedule.report is not None and schedule.report.decision.share
