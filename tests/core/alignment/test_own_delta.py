"""slime's and miles' own GatedDeltaNet under the prefix schedule in fp64, by stand-ins."""

import types
from types import SimpleNamespace

import pytest

from megatron_prefix.errors import UserError
from megatron_prefix.features.own_gdn import kind as own_gdn
from megatron_prefix.features.recurrent.definition import chunk_gated_delta_rule
from megatron_prefix.features.recurrent.gdn import GatedDeltaNet
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.platforms.linear_kernels import causal_conv1d
from megatron_prefix.megatron.install import install, installed
from tests.core.alignment.test_hybrid import change
from tests.harness import hybrid, own_delta
from tests.harness.own_delta import FULL, LINEAR, own_model

pytestmark = pytest.mark.usefixtures("on_one_rank")


LAYER = "decoder.layers.0.self_attention"
INSIDE = f"{LAYER}.linear_attn"
AROUND, CLOSE = own_delta.Attention.hf_forward, own_delta.OwnNet.close


def reads_more(self, hidden_states, packed):
    hidden_states = self.input_layernorm(hidden_states) * hidden_states.mean()
    return self.linear_attn(hidden_states=hidden_states, cu_seqlens=packed.cu_seqlens_q)


def wrong_rule(*given, **more):
    return chunk_gated_delta_rule(*given, **{**more, "initial_state": None})


OTHER = "layer 0's mixer Attention: use Megatron's own"
OWN = "a trainer's own GatedDeltaNet with context parallelism: use tensor"
MIXES = "layer 0's OwnNet, which mixes positions outside"
REFUSED = [
    ("config.context_parallel_size", 2,
     "slime's GatedDeltaNet with context parallelism, whose ranks drop"),
    (f"{LAYER}.__class__.hf_forward", lambda *given: AROUND(*given).roll(1), OTHER),
    (f"{LAYER}.__class__.hf_forward", reads_more, OTHER),
    (f"{INSIDE}.conv1d.__class__", type("Conv1d", (own_delta.ShortConvolution,), {}), OTHER),
    (f"{INSIDE}.forward", print, OTHER),
    (f"{INSIDE}.__class__.forward", lambda self, hidden_states, **_: hidden_states, OTHER),
    (f"{INSIDE}.chunk_gated_delta_rule", wrong_rule,
     r"GatedDeltaNet's kernel does not work here \(RuntimeError"),
    (f"{INSIDE}.__class__.close", lambda self, out, x: CLOSE(self, out, x.roll(1, 1)), MIXES),
    # It cannot be told what a layer mixes that fails on numbers of its own.
    (f"{INSIDE}.__class__.close", lambda self, out, x: x.no_such_tensor, MIXES),
    (f"{LAYER}.hf_config.layer_types", [FULL, LINEAR],
     "layer 0's mixer OwnNet: use Megatron's own"),
    ("config.pipeline_model_parallel_size", 2,
     "GatedDeltaNet, and a pipeline stage without any: use fewer stages"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "value", "message"), REFUSED)
def test_refused_by_name(place, value, message, monkeypatch):
    model = unwrap(own_model(wrap_ddp=False))
    change(monkeypatch, model, place, value)
    with pytest.raises(UserError, match=message) as caught:
        install(model)
    assert "\n" not in str(caught.value) and installed(model) is None


def kept_to_itself(self, hidden_states, attention_mask, packed_seq_params=None, **_):
    return self.hf_forward(hidden_states, packed_seq_params), None


def ranks(size):
    return SimpleNamespace(size=lambda: size, rank=lambda: 0)


@pytest.mark.parametrize(("place", "value", "size", "message"), [
    (f"{INSIDE}.cp_group", None, 2, OWN),
    (f"{INSIDE}.cp_group", ranks(4), 2, OWN),
    (f"{INSIDE}.__class__", own_delta.OlderNet, 2, OWN),  # its kernels take no context
    (f"{LAYER}.__class__.__base__.forward", kept_to_itself, 2, OWN),
    (f"{INSIDE}.cp_group", ranks(8), 8,
     "of 4 and 8 heads on 8 context-parallel ranks: use a number"),
])  # fmt: skip
def test_refused_where_ranks_pass_states(place, value, size, message, monkeypatch):
    """As miles' do, on this one rank."""
    model = unwrap(own_model(wrap_ddp=False))
    for each in (
        ("config.context_parallel_size", size), (f"{LAYER}.hybrid_cp", True),
        (f"{INSIDE}.cp_group", ranks(size)), (place, value),
    ):  # fmt: skip
        change(monkeypatch, model, *each)
    with pytest.raises(UserError, match=message):
        install(model)


def _subclass(module, where, **kernels):
    """A module of Megatron's that becomes one of a subclass, whose forward is in another file."""

    def calls(self, hidden_states, *_, **__):
        return chunk_gated_delta_rule(causal_conv1d(hidden_states))

    forward = types.FunctionType(calls.__code__, kernels, "forward")
    forward.__module__ = where
    module.__class__ = type("GatedDeltaNet", (type(module),), {"forward": forward})
    return module


def test_every_tensor_parallel_rank_does_the_whole_work():
    """Where costs are divided by the ranks, one of them still has all of it."""
    fields = vars(resolve("tiny-qwen3-next"))
    one, two = (SimpleNamespace(**fields, tensor_model_parallel_size=size) for size in (1, 2))
    kind = own_gdn.OwnGatedDeltaNet()
    assert kind.work(one).products == GatedDeltaNet().work(one).products
    assert kind.work(two).products == 2 * kind.work(one).products


@pytest.mark.parametrize(("fields", "layers"), [
    ({"full_attention_interval": 3}, {0, 1, 3, 4, 6}),
    ({}, {0, 1, 2, 4, 5, 6}),
    ({"layer_types": ["full_attention", "linear_attention"]}, {1}),
])  # fmt: skip
def test_layers_that_have_one(fields, layers):
    """Every so many layers the last is attention; or the config names them."""
    config = SimpleNamespace(num_hidden_layers=7, **fields)
    assert own_gdn._own_layers(config) == layers


def test_subclasses_of_megatrons(monkeypatch):
    """mcore-bridge's is taken where it has its kernels, and without context parallelism."""
    kernels = {"causal_conv1d": causal_conv1d, "chunk_gated_delta_rule": chunk_gated_delta_rule}
    without = {**kernels, "causal_conv1d": None}
    for where, found in (("mcore_bridge.model", without), ("other.model", kernels)):
        model = hybrid.model_of(hybrid.GDN, wrap_ddp=False)
        _subclass(model.decoder.layers[0].self_attention, where, **found)
        with pytest.raises(UserError, match="layer 0's mixer GatedDeltaNet: use"):
            install(model)
    model = hybrid.model_of(hybrid.GDN, wrap_ddp=False)
    _subclass(model.decoder.layers[0].self_attention, "mcore_bridge.model", **kernels)
    with monkeypatch.context() as patch:
        patch.setattr(model.config, "context_parallel_size", 2)
        with pytest.raises(UserError, match="a trainer's own GatedDeltaNet with context"):
            install(model)
    install(model)
