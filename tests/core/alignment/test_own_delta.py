"""slime's and miles' own GatedDeltaNet under the prefix schedule in fp64, by stand-ins."""

import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_prefix.errors import UserError
from megatron_prefix.features.own_gdn import kind as own_gdn
from megatron_prefix.features.recurrent.definition import chunk_gated_delta_rule
from megatron_prefix.features.recurrent.gdn import GatedDeltaNet
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.platforms.linear_kernels import causal_conv1d
from megatron_prefix.lab.rl import packing
from megatron_prefix.megatron.install import install, installed
from tests.harness import hybrid, own_delta, steps
from tests.harness.one_group import schedule_with
from tests.harness.own_delta import FULL, LINEAR, Packed, own_model

pytestmark = pytest.mark.usefixtures("on_one_rank")


def _inside(model):
    return model.decoder.layers[0].self_attention.linear_attn


def _context_parallel(model, patch):
    patch.setattr(model.config, "context_parallel_size", 2)


def _passes_states(model, patch, size=2):
    """As miles' has it, on this one rank."""
    patch.setattr(model.config, "context_parallel_size", size)
    model.decoder.layers[0].self_attention.hybrid_cp = True
    _inside(model).cp_group = SimpleNamespace(size=lambda: size, rank=lambda: 0)


def _without_group(model, patch):
    _passes_states(model, patch)
    _inside(model).cp_group = None


def _another_group(model, patch):
    _passes_states(model, patch)
    _inside(model).cp_group = SimpleNamespace(size=lambda: 4, rank=lambda: 0)


def _kernels_take_no_context(model, patch):
    _passes_states(model, patch)
    _inside(model).__class__ = own_delta.OlderNet


def _other_moves(model, patch):
    _passes_states(model, patch)
    patch.setattr(own_delta.HuggingfaceAttention, "forward", _kept_to_itself)


def _kept_to_itself(self, hidden_states, attention_mask, packed_seq_params=None, **_):
    return self.hf_forward(hidden_states, packed_seq_params), None


def _more_ranks_than_heads(model, patch):
    _passes_states(model, patch, size=8)


def _another_around(model, patch):
    stock = own_delta.Attention.hf_forward
    patch.setattr(own_delta.Attention, "hf_forward", lambda *given: stock(*given).roll(1))


def _reads_more(model, patch):
    def hf_forward(self, hidden_states, packed):
        hidden_states = self.input_layernorm(hidden_states) * hidden_states.mean()
        return self.linear_attn(hidden_states=hidden_states, cu_seqlens=packed.cu_seqlens_q)

    patch.setattr(own_delta.Attention, "hf_forward", hf_forward)


def _another_convolution(model, patch):
    _inside(model).conv1d.__class__ = type("Conv1d", (own_delta.ShortConvolution,), {})


def _own_forward(model, patch):
    patch.setattr(_inside(model), "forward", _inside(model).forward)


def _no_rule(model, patch):
    patch.setattr(own_delta.OwnNet, "forward", lambda self, hidden_states, **_: hidden_states)


def _wrong_rule(model, patch):
    def rule(*given, **more):
        return chunk_gated_delta_rule(*given, **{**more, "initial_state": None})

    patch.setattr(_inside(model), "chunk_gated_delta_rule", rule)


def _mixes(model, patch):
    stock = own_delta.OwnNet.close
    patch.setattr(own_delta.OwnNet, "close", lambda self, out, x: stock(self, out, x.roll(1, 1)))


def _ends_alone(model, patch):
    """It cannot be told what a layer mixes that fails on numbers of its own."""
    patch.setattr(own_delta.OwnNet, "close", lambda self, out, x: x.no_such_tensor)


def _other_layers(model, patch):
    config = model.decoder.layers[0].self_attention.hf_config
    patch.setattr(config, "layer_types", [FULL, LINEAR])


def _stage_without(model, patch):
    patch.setattr(model.config, "pipeline_model_parallel_size", 2)


REFUSED: dict[Callable[[Any, pytest.MonkeyPatch], None], str] = {
    _context_parallel: "slime's GatedDeltaNet with context parallelism, whose ranks drop",
    _without_group: "a trainer's own GatedDeltaNet with context parallelism: use tensor",
    _another_group: "a trainer's own GatedDeltaNet with context parallelism: use tensor",
    _kernels_take_no_context: "a trainer's own GatedDeltaNet with context parallelism: use tensor",
    _other_moves: "a trainer's own GatedDeltaNet with context parallelism: use tensor",
    _more_ranks_than_heads: "of 4 and 8 heads on 8 context-parallel ranks: use a number",
    _another_around: "layer 0's mixer Attention: use Megatron's own",
    _reads_more: "layer 0's mixer Attention: use Megatron's own",
    _another_convolution: "layer 0's mixer Attention: use Megatron's own",
    _own_forward: "layer 0's mixer Attention: use Megatron's own",
    _no_rule: "layer 0's mixer Attention: use Megatron's own",
    _wrong_rule: r"GatedDeltaNet's kernel does not work here \(RuntimeError",
    _mixes: "layer 0's OwnNet, which mixes positions outside",
    _ends_alone: "layer 0's OwnNet, which mixes positions outside",
    _other_layers: "layer 0's mixer OwnNet: use Megatron's own",
    _stage_without: "GatedDeltaNet, and a pipeline stage without any: use fewer stages",
}


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__.strip("_"))
def test_refused_by_name(change, monkeypatch):
    model = unwrap(own_model(wrap_ddp=False))
    change(model, monkeypatch)
    with pytest.raises(UserError, match=REFUSED[change]) as caught:
        install(model)
    assert "\n" not in str(caught.value) and installed(model) is None


def test_what_is_refused_runs_with_the_stock_schedule(monkeypatch):
    model, ours = own_model(), schedule_with(mode="auto")
    _own_forward(unwrap(model), monkeypatch)
    steps.call(ours, Packed().step, model, [packing.pack(hybrid.items())])
    assert ours.report is not None and ours.report.decision.fallback


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


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"full_attention_interval": 3}, {0, 1, 3, 4, 6}),
        ({}, {0, 1, 2, 4, 5, 6}),
        ({"layer_types": ["full_attention", "linear_attention"]}, {1}),
    ],
)
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
