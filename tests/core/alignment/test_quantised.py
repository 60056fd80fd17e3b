"""ModelOpt's fake quantisation: exact where a token's scales are its own or fixed, else refused."""

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.errors import CannotShare
from megatron_prefix.features.qat import quantisers
from megatron_prefix.lab.data.rollouts import dense_vocabulary
from megatron_prefix.lab.models.build import build_model, unwrap
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.rl.baseline import Baseline
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import align
from megatron_prefix.lab.verify.matrix import SHAPES
from tests.core.trainers.registry import installed
from tests.harness import quantised, steps
from tests.harness.ranks import check_cases, run_ranks

BY_TOKEN = "FP8_PER_CHANNEL_PER_TOKEN_CFG"
INT8_WEIGHTS = {"num_bits": 8, "axis": 0}
INT4_BLOCKS = {"num_bits": 4, "block_sizes": {-1: 32, "type": "static"}}
TOKENS = {"num_bits": (4, 3), "axis": None, "type": "dynamic", "block_sizes": {-1: None}}
TENSOR = {"num_bits": 8, "axis": None, "type": "dynamic"}
WHOLE = [{"quantizer_name": "*input_quantizer", "cfg": TENSOR}]
KEYS = {"num_bits": (4, 3), "axis": None}
QKV = [{"quantizer_name": "*_bmm_quantizer", "cfg": KEYS}]
MIXED: list[dict[str, Any]] = [
    {"quantizer_name": "*linear_qkv.weight_quantizer", "cfg": INT8_WEIGHTS},
    {"quantizer_name": "*linear_qkv.input_quantizer", "cfg": TOKENS},
    {"quantizer_name": "*linear_fc2.weight_quantizer", "cfg": INT4_BLOCKS},
    *QKV,
]
"""Beside the e4m3 of FP8_DEFAULT_CFG."""


@dataclass(frozen=True)
class Case:
    """A recipe of ModelOpt's, and what is changed of it."""

    recipe: str
    model: str = "tiny-llama"
    more: Sequence[dict[str, Any]] = ()  # quantisers that are set otherwise
    wrong: bool = False  # what the schedule refuses is run, and not equal


def built(case, layout):
    """Groups, and model chunks in which every kind of quantiser is at work."""
    config = quantised.recipe(case.recipe)
    config["quant_cfg"] += case.more
    groups, vocab, _ = dense_vocabulary(SHAPES["tree"].groups(2, "float64")[:2])
    spec = resolve(case.model, num_layers=2).with_vocab(vocab)
    with quantised.quantised(lambda model: quantised.quantise(model, config)):
        chunks = build_model(spec, layout=layout, dtype="float64")
    model = unwrap(chunks[0])
    names = [name for name, one in quantised.quantisers(model) if one.is_enabled]
    on = Counter(name.rpartition(".")[2] for name in names)
    linear = {"weight_quantizer"}
    if "WEIGHT_ONLY" not in case.recipe:
        linear.add("input_quantizer")
    keys = {f"{one}_bmm_quantizer" for one in "qkv"} if QKV[0] in case.more else set()
    assert on.keys() == linear | keys
    assert all(on[kind] >= len(model.decoder.layers) * (1 if kind in keys else 4) for kind in on)
    return groups, chunks


def compare(case, layout):
    """Ours against the stock schedule, both on packs."""
    groups, chunks = built(case, layout)
    prefix = PrefixConfig(
        segment_tokens=64, chunk_tokens=8, min_gain=0, kernel="math", memory="recompute"
    )
    packed = Baseline("packed", pack_tokens=150)
    with contextlib.ExitStack() as inside:
        if case.wrong:
            inside.enter_context(mock.patch.object(quantisers, "refusals", return_value=()))
        mine = align.align(chunks, groups, prefix, multiple=layout.alignment, baseline=packed)
    found = align.over_ranks(mine)
    assert found.executed_tokens < found.raw_tokens
    if case.wrong:
        assert found.failures and found.grad_max_rel_diff > 1e-4
    else:
        assert found.failures == () and found.grad_max_rel_diff <= found.tolerance < 1e-12


ONE = {
    "weights": Case("INT8_WEIGHT_ONLY_CFG"),
    "blocks of weights": Case("INT4_BLOCKWISE_WEIGHT_ONLY_CFG"),
    "by token, experts": Case(BY_TOKEN, model="tiny-moe"),
    "queries, keys and values": Case("FP8_DEFAULT_CFG", more=QKV),
    "a scale of a whole tensor would be wrong": Case("INT8_DEFAULT_CFG", more=WHOLE, wrong=True),
}
MIX = Case("FP8_DEFAULT_CFG", more=MIXED)
JOBS = (
    (Layout(), ONE),
    (Layout(tp=2, sequence_parallel=True), {"all, TP2 SP": MIX}),
    (Layout(pp=2), {"all, PP2": MIX}),
)


def _changed(model, **fields):
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


def _told():
    """By change: the quantiser's name, and what is refused."""
    spec = resolve("tiny-llama", num_layers=1).with_vocab(64)
    found = {}
    for case, (fields, _) in CHANGES.items():
        (chunk,) = build_model(spec, dtype="float64", wrap_ddp=False)
        quantised.quantise(unwrap(chunk), quantised.recipe("INT8_DEFAULT_CFG"))
        name = _changed(unwrap(chunk), **fields)
        found[case] = name, [one.text for one in quantisers.refusals(unwrap(chunk))]
    (chunk,) = build_model(spec, dtype="float64", wrap_ddp=False)
    config = quantised.recipe("INT8_DEFAULT_CFG")
    config["quant_cfg"].append({"quantizer_name": "*k_bmm_quantizer", "cfg": KEYS})
    quantised.quantise(unwrap(chunk), config)
    unwrap(chunk).config.multi_latent_attention = True
    found["latents"] = "", [one.text for one in quantisers.refusals(unwrap(chunk))]
    return found


def _calibrated():
    """What is in the way of steps, in modes "on" and "auto", of a model that has been trained."""
    spec = resolve("tiny-llama", num_layers=2).with_vocab(64)
    with quantised.quantised(
        lambda model: quantised.quantise(model, quantised.recipe("INT8_DEFAULT_CFG"))
    ):
        (model,) = build_model(spec, dtype="float64")
    schedule = PrefixSchedule(PrefixConfig(mode="on", min_gain=0))
    steps.call(schedule, steps.Contract().step, model, steps.group(0, 2))
    _changed(unwrap(model), _if_calib=True)
    with pytest.raises(CannotShare, match="which is being calibrated") as caught:
        steps.call(schedule, steps.Contract().step, model, steps.group(0, 2))
    auto = PrefixSchedule(PrefixConfig(mode="auto", min_speedup=0.01))
    steps.call(auto, steps.Contract().step, model, steps.group(0, 2))
    assert auto.report is not None and auto.report.fallback_count == 1
    return [str(caught.value), auto.report.decision.reason]


def check_refusals(_, __):
    """What is refused of a quantiser of inputs that is changed, and of one that is calibrated."""
    found = _told()
    (text,) = found["latents"][1]
    assert "core_attention.k_bmm_quantizer of multi-latent attention: disable" in text
    for case, (_, wanted) in CHANGES.items():
        name, texts = found[case]
        if wanted is None:
            assert texts == [], case
        else:
            assert len(texts) == 1 and texts[0].startswith(f"quantiser {name}"), case
            assert wanted in texts[0], case
    assert all("linear_proj.input_quantizer, which is being calibrated" in x for x in _calibrated())


def _jobs():
    """All jobs, from a process that has imported ModelOpt: their ranks are forked from it."""
    quantised.with_attention()
    check_cases(Layout(), {"refusals": None}, check_refusals)
    for layout, cases in JOBS:
        check_cases(layout, cases, compare)


def test_equal_to_the_stock_schedule_or_refused(monkeypatch):
    monkeypatch.syspath_prepend(str(installed("modelopt")))
    run_ranks(1, _jobs)
