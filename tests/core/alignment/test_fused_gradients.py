"""Weight gradients that a kernel adds to main_grad itself; layers frozen beside adapters; outputs
that no loss looks at are not computed, and everything else is as if they were."""

import contextlib
import sys
from collections import Counter
from types import ModuleType
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel import layers

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.features.measure.cost_meter import key_of
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.megatron.install import install
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.plan.cost import NUM_FEATURES
from megatron_prefix.run.rank import Rank
from tests.harness import steps
from tests.harness.one_group import items, schedule_with
from tests.harness.one_rank import small_model
from tests.harness.recorded import RecordedGraph, recorded_graphs  # noqa: F401
from tests.oracle.model import AROUND

pytestmark = pytest.mark.usefixtures("on_one_rank")
NAME = "fused_weight_gradient_mlp_cuda"


class Kernel(ModuleType):
    """What apex's kernel computes; it counts its calls."""

    calls = 0

    def wgrad_gemm_accum_fp32(self, inputs, gradient, main):
        self.calls += 1
        main.add_(gradient.t() @ inputs)


@pytest.fixture
def kernel(monkeypatch):
    made = Kernel(NAME)
    monkeypatch.setitem(sys.modules, NAME, made)
    monkeypatch.setattr(layers, NAME, made, raising=False)
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    return made


def updates(schedule, **options):
    """Gradients of three updates on the same microbatches."""
    overrides = {"gradient_accumulation_fusion": True}
    model = small_model(dtype=torch.float32, config_overrides=overrides, **options)
    data = [
        {name: value.float() if name in ("weight", "loss_mask") else value for name, value in one}
        for one in map(dict.items, items())
    ]
    found = []
    for _ in range(3):
        model.zero_grad_buffer()
        steps.call(schedule, steps.Contract().step, model, data)
        found.append({n: p.main_grad.clone() for n, p in model.named_parameters()})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.main_grad
    return found


@pytest.mark.parametrize(("kept", "overlaps"), [
    ({"memory": "retain"}, False), ({"memory": "recompute"}, True),
    ({"memory": "retain", "graph_tokens": 32}, True),
])  # fmt: skip
def test_a_kernel_that_adds_to_main_grad(
    kernel,
    kept,
    overlaps,
    recorded_graphs,  # noqa: F811
):
    options = {"overlap_grad_reduce": overlaps, "bucket_size": 1}
    config = PrefixConfig(min_gain=0, kernel="math", segment_tokens=8, chunk_tokens=8, **kept)
    wanted = updates(stock_schedule(), **options)
    stock, kernel.calls = kernel.calls, 0
    found = updates(PrefixSchedule(config), **options)
    assert 0 < kernel.calls != stock > 0
    assert (recorded_graphs.replays > 0) is ("graph_tokens" in kept)
    tokens = sum(one["tokens"].numel() for one in items())
    for mine, its in zip(found, wanted, strict=True):
        steps.assert_gradients(mine, its, tokens)


def test_frozen_weights_cost_half_a_backward_and_get_no_gradient():
    """A frozen weight has no gradient: its backward is one product, and not two."""
    with AROUND["adapted"](mock.Mock()):
        model, ours = small_model(), schedule_with()
        steps.call(ours, steps.Contract().step, model, items())
        frozen = Rank.of([model]).frozen_share
        assert 0.8 < frozen < 1 and "of the weights frozen" in key_of(Rank.of([model]), "math")
    (costs,) = ours.requests.costs.values()
    forward, backward = costs.times.prices[0], costs.times.prices[NUM_FEATURES // 2]
    assert backward == pytest.approx((2 - frozen) * forward, rel=0.05)
    for name, parameter in unwrap(model).named_parameters():
        assert parameter.requires_grad == (".linear_in." in name or ".linear_out." in name)
        assert parameter.requires_grad or parameter.grad is None


def test_adapters_are_entered_where_layers_run_again():
    """The reference keeps everything: with all layers recomputed, and an input without gradient
    before them, Megatron's own backward does not enter them, and adapters get zeros."""
    found = []
    with AROUND["adapted"](mock.Mock()):
        for schedule, recompute in ((stock_schedule(), "none"), (schedule_with(), "full")):
            model = small_model(recompute=recompute)
            steps.run(schedule, steps.Contract().step, model, items())
            named = unwrap(model).named_parameters()
            found.append({name: one.main_grad for name, one in named if one.requires_grad})
        stock, own = found
        assert any(one.any() for one in stock.values())
        steps.assert_gradients(own, stock, 100)


READ_CONFIG = PrefixConfig(min_gain=0, kernel="math", mode="on")


def read_items():
    """Groups that begin to train inside of a shared prompt, and a rollout that shares nothing."""
    found = [*steps.group(0, 3), *steps.group(1, 1), *steps.group(2, 2)]
    for item in found[::2]:
        item["loss_mask"][:, 13:15] = 0.0  # as an answer of a tool in the middle of a response
    found[1]["loss_mask"][:, 5] = 1.0  # of a prompt that the others share and do not train
    return [{**item, "uid": uid} for uid, item in enumerate(found)]


@contextlib.contextmanager
def counted(model):
    """Counts the positions that go through the MLPs' first products and the output layer."""
    seen: Counter[str] = Counter()
    inner, undo = unwrap(model), []
    modules = {f"mlp {i}": layer.mlp for i, layer in enumerate(inner.decoder.layers)}
    modules = {name: getattr(mlp, "linear_fc1", mlp) for name, mlp in modules.items()}
    for name, module in [*modules.items(), ("output", inner.output_layer)]:

        def hook(_, args, __, name=name):
            seen[name] += args[0].shape[0] * args[0].shape[1]

        undo.append(module.register_forward_hook(hook).remove)
    try:
        yield seen
    finally:
        for one in undo:
            one()


def num_read(forest):
    """Positions that carry loss in any rollout, at least two a segment with loss."""
    trained = [pairs.trained for item in read_items() for pairs in steps.pairs_of(item)]
    found = 0
    for segment in forest.segments:
        read = sum(
            int(np.any([trained[one][span.start : span.end] for one in span.rollouts], 0).sum())
            for span in segment.spans
        )
        found += min(max(read, 2), segment.padded_length) if segment.scored else 0
    return found


@pytest.mark.parametrize(("contract", "options", "recompute"), [
    (steps.Contract(), {}, "none"), (steps.Contract(logits=True), {}, "full"),
    (steps.Contract(logits=True), {"segment_tokens": 8, "chunk_tokens": 4}, "none"),
    (steps.Contract(), {"memory": "recompute"}, "full"),
])  # fmt: skip
def test_only_what_is_read_is_computed(contract, options, recompute):
    model = small_model(recompute=recompute, wrap_ddp=False)
    expected = steps.plain(model, contract, read_items())
    schedule = PrefixSchedule(PrefixConfig(**{**vars(READ_CONFIG), **options}))
    with counted(model) as seen:
        found = steps.run(schedule, contract.step, model, read_items()).gradients
    forest = schedule.report.forest
    steps.assert_gradients(found, expected, forest.raw_tokens)
    times = 2 if recompute == "full" else 1
    assert num_read(forest) < 0.8 * forest.executed_tokens
    if "memory" not in options:
        assert seen["mlp 0"] == times * forest.executed_tokens
        assert seen["mlp 1"] == times * num_read(forest)
        assert seen["output"] == num_read(forest)


def test_routers_see_all_positions():
    """Their losses count positions of the last layer, too; the output layer runs on fewer."""
    model = small_model("tiny-moe", wrap_ddp=False)
    schedule = PrefixSchedule(READ_CONFIG)
    with counted(model) as seen:
        steps.run(schedule, steps.Contract().step, model, read_items())
    forest = schedule.report.forest
    assert seen["mlp 1"] == seen["mlp 0"] == forest.executed_tokens
    assert seen["output"] == num_read(forest)


def test_a_layer_with_a_forward_of_its_own_runs_to_its_end():
    """It may add up other streams than Megatron's (hyper-connections)."""
    for own in ({}, {"forward": lambda self, *given: given}):
        model = small_model(wrap_ddp=False)
        layer = unwrap(model).decoder.layers[-1]
        layer.__class__ = type("Own", (type(layer),), own)
        assert install(model).keys_only == (None if own else 1)
