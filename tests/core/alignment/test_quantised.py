"""ModelOpt's fake quantisation: exact where a token's scales are its own or fixed, else refused."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import CannotShare
from megatron_prefix.lab import runtime
from megatron_prefix.lab.data.rollouts import dense_vocabulary
from megatron_prefix.lab.models.build import build_model, unwrap
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.rl.baseline import Baseline
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import align
from megatron_prefix.lab.verify.matrix import SHAPES
from megatron_prefix.layers import quantisers
from megatron_prefix.run.schedule import PrefixSchedule
from tests.core.trainers.registry import installed
from tests.harness import quantised, steps
from tests.harness.ranks import run_ranks
from tests.harness.steps import Contract

Inputs = dict[str, Any]
BY_TOKEN = "FP8_PER_CHANNEL_PER_TOKEN_CFG"
WHOLE: Inputs = {"num_bits": 8, "axis": None, "type": "dynamic"}
KEYS: Inputs = {"num_bits": (4, 3), "axis": None}


@pytest.fixture(autouse=True)
def modelopt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks can import it."""
    monkeypatch.syspath_prepend(str(installed("modelopt")))


def run(layout: Layout, name: str, recipe: str, inputs: Inputs, keys: Inputs) -> list[Any]:
    """A rank's alignments with the stock schedule, both on packs."""
    runtime.initialize(layout)
    config = quantised.recipe(recipe, **inputs)
    if keys:
        quantised.with_attention()
        config["quant_cfg"].append({"quantizer_name": "*_bmm_quantizer", "cfg": keys})
    groups, vocab, _ = dense_vocabulary(SHAPES["tree"].groups(2, "float64"))
    spec = resolve(name, num_layers=4).with_vocab(vocab)
    with quantised.quantised(lambda model: quantised.quantise(model, config)):
        chunks = build_model(spec, layout=layout, dtype="float64")
    on = [one for _, one in quantised.quantisers(unwrap(chunks[0])) if one.is_enabled]
    # Of a layer's four linear ones or more, weights or inputs, too; its q, k and v.
    kinds = (1 if "WEIGHT_ONLY" in recipe else 2) * 4 + 3 * bool(keys)
    assert len(on) >= kinds * len(unwrap(chunks[0]).decoder.layers)
    found = []
    for fields in ({}, {"memory": "recompute", "chunk_tokens": 8}):
        prefix = PrefixConfig(segment_tokens=64, min_gain=0, kernel="math", **fields)  # type: ignore[arg-type]
        packed = Baseline("packed", pack_tokens=150)
        mine = align.align(chunks, groups, prefix, multiple=layout.alignment, baseline=packed)
        found.append(align.over_ranks(mine))
    runtime.shutdown()
    return found


CASES: dict[str, tuple[Layout, str, str, Inputs, Inputs]] = {
    "weights": (Layout(), "tiny-llama", "INT8_WEIGHT_ONLY_CFG", {}, {}),
    "weights, TP2+SP": (
        Layout(tp=2, sequence_parallel=True), "tiny-llama", "INT8_WEIGHT_ONLY_CFG", {}, {},
    ),
    "blocks of weights, PP2": (
        Layout(pp=2), "tiny-llama", "INT4_BLOCKWISE_WEIGHT_ONLY_CFG", {}, {},
    ),
    "int8": (Layout(), "tiny-llama", "INT8_DEFAULT_CFG", {}, {}),
    "e4m3, TP2+SP": (
        Layout(tp=2, sequence_parallel=True), "tiny-llama", "FP8_DEFAULT_CFG", {}, {},
    ),
    "e4m3, PP2": (Layout(pp=2), "tiny-llama", "FP8_DEFAULT_CFG", {}, {}),
    "by token": (Layout(), "tiny-llama", BY_TOKEN, {}, {}),
    "by token, experts": (Layout(), "tiny-moe", BY_TOKEN, {}, {}),
    "queries, keys and values": (Layout(), "tiny-llama", "FP8_DEFAULT_CFG", {}, KEYS),
    "queries, keys and values, TP2+SP": (
        Layout(tp=2, sequence_parallel=True), "tiny-llama", "FP8_DEFAULT_CFG", {}, KEYS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_stock_schedule(name: str) -> None:
    layout = CASES[name][0]
    for ours in run_ranks(layout.world_size, run, *CASES[name]):
        for one in ours:
            assert one.failures == () and one.grad_max_rel_diff <= one.tolerance < 1e-12
            assert one.executed_tokens < one.raw_tokens


def test_a_scale_of_a_whole_tensor_would_be_wrong() -> None:
    with mock.patch.object(quantisers, "refusals", return_value=()):
        ((one, _),) = run_ranks(1, run, Layout(), "tiny-llama", "INT8_DEFAULT_CFG", WHOLE, {})
    assert one.failures
    assert one.grad_max_rel_diff > 1e-4


def _changed(model: Any, **fields: Any) -> str:
    """The name of a quantiser of inputs whose attributes are changed."""
    name, one = next(pair for pair in quantised.quantisers(model) if "input_q" in pair[0])
    for field, value in fields.items():
        if value is delattr:
            delattr(one, field)
        else:
            setattr(one, field, value)
    return name


FP4 = {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}
MX = {-1: 32, "type": "dynamic", "scale_bits": (8, 0)}
CHANGES: dict[str, tuple[dict[str, Any], str | None]] = {
    "static": ({}, None),
    "static, of each feature": ({"_amax": torch.ones(1, 1, 64)}, None),
    "static, of each position": ({"_amax": torch.ones(7, 1, 1)}, "of a whole tensor"),
    "dynamic": ({"_amax": delattr, "_dynamic": True}, "of a whole tensor"),
    "not calibrated": ({"_amax": delattr}, "of a whole tensor"),
    "without an amax": ({"_amax": delattr, "_use_constant_amax": True}, None),
    "being calibrated": ({"_if_calib": True}, "is being calibrated"),
    "observed only": ({"_amax": delattr, "_if_quant": False}, None),
    "off": ({"_amax": delattr, "_disabled": True}, None),
    "by token": ({"_amax": delattr, "_block_sizes": {-1: None}}, None),
    "by token, as an axis": ({"_amax": delattr, "_axis": (0, 1)}, None),
    "by position of a batch": ({"_amax": delattr, "_axis": 0}, "of a whole tensor"),
    "by feature": ({"_amax": delattr, "_axis": (2,)}, "of a whole tensor"),
    "MX": ({"_amax": delattr, "_block_sizes": MX}, None),
    "NVFP4": ({"_block_sizes": FP4}, None),
    "NVFP4 without its second scale": ({"_amax": delattr, "_block_sizes": FP4}, "whole tensor"),
    "static blocks": ({"_block_sizes": {-1: 16}}, "with blocks with static scales"),
    "blocks of positions": ({"_block_sizes": {-1: None, 0: 8}}, "with blocks of several positions"),
    "another backend": ({"backend": "own"}, "with backend own"),
    "an offset": ({"_bias": {-1: None}}, "with an offset"),
    "real": ({"_fake_quant": False}, "with real quantisation"),
}


def _told() -> dict[str, tuple[str, list[str]]]:
    """By change: the quantiser's name, and what is refused."""
    runtime.initialize(Layout())
    spec = resolve("tiny-llama", num_layers=1).with_vocab(64)
    found = {}
    for case, (fields, _) in CHANGES.items():
        (chunk,) = build_model(spec, dtype="float64", wrap_ddp=False)
        quantised.quantise(unwrap(chunk), quantised.recipe("INT8_DEFAULT_CFG"))
        name = _changed(unwrap(chunk), **fields)
        found[case] = name, [one.text for one in quantisers.refusals(unwrap(chunk))]
    quantised.with_attention()
    (chunk,) = build_model(spec, dtype="float64", wrap_ddp=False)
    config = quantised.recipe("INT8_DEFAULT_CFG")
    config["quant_cfg"].append({"quantizer_name": "*k_bmm_quantizer", "cfg": KEYS})
    quantised.quantise(unwrap(chunk), config)
    unwrap(chunk).config.multi_latent_attention = True
    found["latents"] = "", [one.text for one in quantisers.refusals(unwrap(chunk))]
    runtime.shutdown()
    return found


def test_what_a_quantiser_is_refused_for() -> None:
    (found,) = run_ranks(1, _told)
    (text,) = found["latents"][1]
    assert "core_attention.k_bmm_quantizer of multi-latent attention: disable" in text
    for case, (_, text) in CHANGES.items():
        name, texts = found[case]
        if text is None:
            assert texts == [], case
        else:
            assert len(texts) == 1 and texts[0].startswith(f"quantiser {name}"), case
            assert text in texts[0], case


def _calibrated() -> list[str]:
    """What is in the way of steps, in modes "on" and "auto", of a model that has been trained."""
    runtime.initialize(Layout())
    spec = resolve("tiny-llama", num_layers=2).with_vocab(64)
    with quantised.quantised(
        lambda model: quantised.quantise(model, quantised.recipe("INT8_DEFAULT_CFG"))
    ):
        (model,) = build_model(spec, dtype="float64")
    schedule = PrefixSchedule(PrefixConfig(mode="on", min_gain=0))
    steps.call(schedule, Contract().step, model, steps.group(0, 2))
    _changed(unwrap(model), _if_calib=True)
    with pytest.raises(CannotShare, match="which is being calibrated") as caught:
        steps.call(schedule, Contract().step, model, steps.group(0, 2))
    auto = PrefixSchedule(PrefixConfig(mode="auto", min_speedup=0.01))
    steps.call(auto, Contract().step, model, steps.group(0, 2))
    assert auto.report is not None and auto.report.fallback_count == 1
    runtime.shutdown()
    return [str(caught.value), auto.report.decision.reason]


def test_calibration_is_the_stock_schedules() -> None:
    (texts,) = run_ranks(1, _calibrated)
    assert all("linear_proj.input_quantizer, which is being calibrated" in one for one in texts)
