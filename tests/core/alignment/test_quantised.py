"""ModelOpt's fake quantisation: exact where a token's scales are its own or fixed, else refused."""

from typing import Any

import pytest
import torch

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.errors import CannotShare
from megatron_prefix.features.qat import quantisers
from megatron_prefix.lab.models.build import build_model, unwrap
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.runtime import Layout
from tests import judge
from tests.cases import row, wrong
from tests.core.trainers.registry import installed
from tests.harness import quantised, steps
from tests.harness.ranks import check_cases, run_ranks

OPTIONS = "recompute chunks"
ROWS = {
    "one": [
        *(row(f"quantised: {name}", OPTIONS, form="thd")
          for name in ("weights", "blocks of weights", "by token", "queries, keys and values")),
        wrong("quantisers are not refused", "gradient", "quantised: a scale of a whole tensor",
              OPTIONS, form="thd"),
    ],
    "tp2_sp": [row("quantised: mixed", OPTIONS, form="thd_padded")],
    "pp2": [row("quantised: mixed", OPTIONS, form="thd")],
}  # fmt: skip


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
    "static": ({}, None), "static, of each feature": ({"_amax": torch.ones(1, 1, 64)}, None),
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
    "MX": ({"_amax": delattr, "_block_sizes": MX}, None), "NVFP4": ({"_block_sizes": FP4}, None),
    "NVFP4 without its second scale": ({"_amax": delattr, "_block_sizes": FP4}, "whole tensor"),
    "static blocks": ({"_block_sizes": {-1: 16}}, "with blocks with static scales"),
    "blocks of positions": ({"_block_sizes": {-1: None, 0: 8}}, "with blocks of several positions"),
    "another backend": ({"backend": "own"}, "with backend own"),
    "an offset": ({"_bias": {-1: None}}, "with an offset"),
    "real": ({"_fake_quant": False}, "with real quantisation"),
}  # fmt: skip


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
    config["quant_cfg"].append({"quantizer_name": "*k_bmm_quantizer", "cfg": quantised.KEYS})
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
    for layout, rows in ROWS.items():
        judge.check(layout, rows)


def test_equal_to_the_stock_schedule_or_refused(monkeypatch):
    monkeypatch.syspath_prepend(str(installed("modelopt")))
    run_ranks(1, _jobs)
