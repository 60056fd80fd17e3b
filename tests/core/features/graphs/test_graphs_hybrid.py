"""Recurrent layers, experts and latents on CUDA graphs; launches are noted and launched again on
the CPU."""

import functools
import gc
import weakref

import pytest
import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import router
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_prefix import PrefixSchedule
from megatron_prefix.features.graphs import cut_layer
from megatron_prefix.features.graphs.kinds import GRAPHED, Graphed
from megatron_prefix.features.graphs.part import numbered_layers
from megatron_prefix.features.graphs.pieces import CannotCaptureError
from megatron_prefix.features.graphs.placed_spans import PlacedSpans
from megatron_prefix.features.recurrent.mamba import Mamba2
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.layers.releases import transformer_layers
from megatron_prefix.megatron.install import installed
from tests.core.features.graphs.test_graphs import as_without, config, made, same, steps, without
from tests.harness.hybrid import GDN, MAMBA, gated_delta, mamba
from tests.harness.one_rank import small_model

pytestmark = pytest.mark.usefixtures("on_one_rank", "recorded_graphs")


@pytest.mark.usefixtures("cores_in_fp64")
def test_layers_of_one_kind_may_have_none(monkeypatch, caplog):
    """The others have theirs, and a line says so."""
    monkeypatch.setitem(GRAPHED, Mamba2, Graphed.NOTHING)
    as_without(*(small_model(MAMBA, spec=mamba("-M*M-")) for _ in range(2)), config())
    assert f"layers of {Mamba2.name} run without CUDA graphs" in caplog.text


class Scaled(torch.nn.Conv1d):
    """Whose weight is another tensor in every call; a graph in front of it would leave one."""

    @property
    def weight(self):
        """The parameter's values."""
        return 1.0 * dict(self.named_parameters())["weight"]


def _another_weight(module):
    module.conv1d.__class__ = Scaled


def _nobodys_parameter(module):
    stock, more = module.in_proj.forward, torch.zeros((), dtype=torch.float64, requires_grad=True)
    module.in_proj.forward = lambda x: (stock(x)[0] + more, None)


@pytest.mark.parametrize(
    ("change", "said"), [(_another_weight, "other weights"), (_nobodys_parameter, "no module")]
)
def test_what_cannot_be_captured_leaves_others_theirs(change, said, caplog):
    plain, graphed = (small_model(GDN, spec=gated_delta(4)) for _ in range(2))
    for model in (plain, graphed):
        for layer in unwrap(model).decoder.layers[::2]:
            change(layer.self_attention)
    ours = steps(graphed, config(), 3)
    assert made(graphed).captures > 0 and not made(graphed).refused
    assert caplog.text.count("layers of GatedDeltaNet and MLP run without CUDA graphs") == 1
    assert said in caplog.text
    same(ours, without(plain, config(), 3))


def test_a_rule_that_cannot_be_inside_runs_between_graphs(monkeypatch, caplog):
    def refused(*_):
        raise CannotCaptureError("chunks of 32")

    plain, model = (small_model(GDN, spec=gated_delta(4)) for _ in range(2))
    expected = without(plain, config(), 3)
    monkeypatch.setattr(PlacedSpans, "run", refused)
    same(steps(model, config(), 3), expected)
    assert caplog.text.count("run their cores without CUDA graphs: chunks of 32") == 1
    assert not made(model).refused and len(made(model).layers) == 3 and made(model).captures > 0


def test_a_layer_without_megatrons_method_has_none(monkeypatch, caplog):
    """It runs as before, and a line says so."""
    monkeypatch.setattr(cut_layer, "can_be_cut", lambda _: False)
    spec = {"moe_layer_freq": (False, True)}
    plain, model = (small_model("tiny-moe", spec=spec) for _ in range(2))
    as_without(model, plain, config())  # on those of the dense one
    assert caplog.text.count("a layer is put together differently") == 2  # of each model


def test_what_is_beside_experts_is_in_graphs(monkeypatch):
    """Nothing of it runs again in a step of the same lengths."""
    model, schedule, ran, counts = small_model("tiny-deepseek"), PrefixSchedule(config()), [], []
    for number in range(4):
        steps(model, config(), 1, schedule)
        counts.append([ran.count(kind) for kind in (SharedExpertMLP, torch.Tensor)])
        for holder, name in [(MLP, "forward"), (router, "router_gating_linear")] * (not number):
            run = functools.partial(_noted, ran, getattr(holder, name))
            monkeypatch.setattr(holder, name, lambda *args, run=run, **named: run(*args, **named))
    assert counts[3] == counts[2] and 0 not in counts[2]


def test_gradients_of_experts_inputs_are_bitwise_those_without(monkeypatch):
    """They are added up in the same order; norms read their input once, as on a GPU."""
    monkeypatch.setattr(cut_layer, "inside_form", lambda _: None)  # attention itself is the same
    models = [
        small_model("tiny-deepseek", spec={"num_layers": 3}, dtype=torch.float32) for _ in range(2)
    ]
    for module in (module for model in models for module in unwrap(model).modules()):
        if "Norm" in type(module).__name__:
            monkeypatch.setattr(module, "forward", functools.partial(_normed, module))
    (ours,), (others,) = steps(models[0], config()), without(models[1], config())
    names = [name for name in others.gradients if "decoder.layers.1." in name]
    assert made(models[0]).captures > 0 and len(names) > 20
    for name in names:
        assert torch.equal(ours.gradients[name], others.gradients[name]), name


def _normed(module, x):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], module.weight, 1e-5)


def _noted(ran, stock, first, *args, **named):
    ran.append(type(first))
    return stock(first, *args, **named)


OTHERS = [
    (0, TransformerLayer, "_forward_mlp", lambda y, hidden, *_: y + 0.5 * hidden),
    *((n, MoELayer, "dispatch", lambda sent, *_: (sent[0], 0.5 * sent[1])) for n in (0, 2)),
    *((n, MoELayer, "postprocess", lambda y, _, shared: y + shared * y.tanh()) for n in (0, 2)),
    *((n, router.TopKRouter, "gating", lambda y, *_: 2.0 * y) for n in (0, 2)),
]


@pytest.mark.parametrize(("before", "holder", "name", "other"), OTHERS)
def test_layers_of_experts_with_methods_of_others(before, holder, name, other, monkeypatch):
    """And a hook on a router, which is called as without graphs."""
    models = [small_model("tiny-deepseek", spec={"num_layers": 4}) for _ in range(2)]
    unwrap(models[0]).decoder.layers[1].mlp.router.register_forward_pre_hook(lambda *_: None)
    pairs, stock = [(models[0], PrefixSchedule(config()))], getattr(holder, name)
    pairs.append((models[1], PrefixSchedule(config(graph_tokens=0))))
    for model, schedule in pairs:
        steps(model, config(), before, schedule)
    monkeypatch.setattr(holder, name, lambda m, *args, **kw: other(stock(m, *args, **kw), *args))
    same(*(steps(model, config(), 2, schedule) for model, schedule in pairs))
    assert made(models[0]).captures > 0


def test_shared_experts_are_launched_as_tokens_are_sent(recorded_graphs, monkeypatch):
    """Behind all that routes these, for whose numbers the host waits next."""
    model, schedule, events = small_model("tiny-deepseek"), PrefixSchedule(config()), []
    steps(model, config(), 3, schedule)
    dispatcher = type(unwrap(model).decoder.layers[-1].mlp.token_dispatcher)
    names = "dispatch_preprocess", "dispatch_postprocess"
    for holder, name in (recorded_graphs, "replay"), *((dispatcher, name) for name in names):
        monkeypatch.setattr(holder, name, _telling(events, name, getattr(holder, name)))
    steps(model, config(), 1, schedule)
    routed = [n for n, event in enumerate(events) if event == names[0]]
    assert len(routed) > 2
    assert {tuple(events[n : n + 3]) for n in routed} == {(names[0], "replay", names[1])}


def _telling(events, name, stock):
    def told(*args, **named):
        events.append(name)
        return stock(*args, **named)

    return told


def test_shared_experts_are_there_for_others_that_send_tokens():
    """On the instance, once graphs are made."""
    models = [small_model("tiny-deepseek") for _ in range(2)]
    schedules = PrefixSchedule(config()), PrefixSchedule(config(graph_tokens=0))
    for model, schedule in zip(models, schedules, strict=True):
        steps(model, config(), 2, schedule)
        for layer in unwrap(model).decoder.layers[1:]:
            layer.mlp.dispatch = functools.partial(MoELayer.dispatch, layer.mlp)
    pairs = zip(models, schedules, strict=True)
    same(*(steps(model, config(), 2, schedule) for model, schedule in pairs))
    assert made(models[0]).captures > 0


def test_a_capture_that_fails_keeps_nothing(caplog):
    """Of latents that were on their way to attention: their autograd graph has all before it."""
    model, left = small_model("tiny-deepseek"), []
    inside = unwrap(model).decoder.layers[0].self_attention.linear_kv_up_proj
    stock = inside.forward

    def failing(x):
        if made(model).cut is not None:
            left.append(weakref.ref(x.grad_fn))
            raise RuntimeError("no memory here")
        return stock(x)

    inside.forward = failing
    steps(model, config())
    assert "no memory here" in caplog.text
    gc.collect()
    assert [node() for node in left] == [None]


def test_layers_of_further_tokens_are_launches_of_their_own(monkeypatch):
    """What they are given is made in between; a step that does not predict further has none."""
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", {})  # it has one size in a process
    model, twin = (small_model(spec={"mtp_num_layers": 2}) for _ in range(2))
    as_without(model, twin, config())
    graphs, hooks = made(model), installed(model)
    first, second, *further = (layer.number for layer in graphs.layers)
    of_further = [
        sides[number] for s in graphs.sets for sides in s.made.values() for number in further
    ]
    assert len(further) == 2 and of_further and all(len(s.pieces) == 1 for s in of_further)
    with monkeypatch.context() as patch:
        patch.setattr(hooks.model.config, "fp32_residual_connection", True)
        assert [number for number, *_ in numbered_layers(hooks)] == [first, second]
    hooks.predicts_further = False
    assert [number for number, *_ in numbered_layers(hooks)] == [first, second]


def test_further_layers_are_given_up_by_themselves(monkeypatch, caplog):
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", {})
    model = small_model(spec={"mtp_num_layers": 2})
    linear = transformer_layers(unwrap(model))[-1].mlp.linear_fc2
    stock, more = linear.forward, torch.zeros((), dtype=torch.float64, requires_grad=True)
    linear.forward = lambda x: (stock(x)[0] + more, None)
    steps(model, config(), 3)
    assert [layer.number for layer in made(model).layers] == [0, 1] and made(model).captures > 0
    assert "MLP inside multi-token prediction run without CUDA graphs" in caplog.text
