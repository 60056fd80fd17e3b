"""Kimi K3's layers: what is refused of them, and the rule's trial. Rows compare their steps."""

import sys
from types import SimpleNamespace
from unittest.mock import MagicMock as Mock

import pytest
import torch

from benchmarks.trainers import kimi
from megatron_prefix.errors import UserError
from megatron_prefix.features.kda import kind, layer
from megatron_prefix.features.recurrent import probe
from megatron_prefix.lab.models.build import build_model, unwrap
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.layers.model import layers_of, sent_width
from megatron_prefix.megatron.install import install
from megatron_prefix.run.execute.messages import message_shape
from tests.core.alignment.test_hybrid import change

pytestmark = pytest.mark.usefixtures("on_one_rank")
DELTA, LATENT = (f"decoder.layers.{number}.self_attention" for number in (0, 1))


@pytest.fixture
def model():
    spec = resolve("tiny-deepseek", num_moe_experts=None, num_layers=3).with_vocab(64)
    with kimi.own_layers():
        yield unwrap(build_model(spec, dtype=torch.float64, wrap_ddp=False)[0])


REFUSED = [
    (f"{DELTA}.forward", print, {}, "layer 0's mixer KimiK3Attention: use Megatron's"),
    (f"{LATENT}.forward", print, {}, "layer 1's attention KimiK3Attention, which has a forward"),
    ("config.context_parallel_size", 3, {}, "own Kimi Delta Attention of 4 and 4 heads on 3"),
    ("config.tensor_model_parallel_size", 2, {"o_norm": False},
     r"parallelism, and decoder.layers.0.self_attention.o_norm.weight, whose gradient this"),
    ("config.tensor_model_parallel_size", 2, {"mixes": False, "o_norm": True},
     "parallelism, and decoder.layers.0.mixes.0, whose"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "value", "marked", "message"), REFUSED)
def test_refused_by_name(place, value, marked, message, model, monkeypatch):
    change(monkeypatch, model, place, value)
    for name, parameter in model.named_parameters():
        parameter.sequence_parallel = all(marked[part] for part in marked if part in name)
    with pytest.raises(UserError, match=message):
        install(model)


def test_a_megatron_that_reads_the_mark_is_taken(model, monkeypatch):
    def reads(parameter):
        return getattr(parameter, "sum_gradients_across_tp_domain", False)

    finalize = sys.modules["megatron.core.distributed.finalize_model_grads"]
    monkeypatch.setattr(finalize, "reset_model_temporary_tensors", reads)
    monkeypatch.setattr(model.config, "tensor_model_parallel_size", 2)
    assert [*kind.unsummed(0, model)] == []


def test_numbers(model):
    """One more hidden state is sent for every two layers; one alone in front of all, and behind."""
    [mixer, *_], [latent, *_], *_ = layers_of(model.config, "")
    assert (type(mixer), type(latent)) == (kind.KimiDelta, kind.KimiLatents)
    attention, hidden = model.decoder.layers[0].self_attention, model.config.hidden_size
    assert [sent_width(model.config, layers) // hidden for layers in range(4)] == [1, 2, 2, 1]
    stage = Mock(config=model.config, language_models=[Mock(**{"decoder.layers": []})])
    shape = message_shape(stage, Mock(segments=[Mock()]))  # of a stage without layers
    assert {shape(Mock(kind=kind, segment=0, chunk=0))[2] for kind in "FB"} == {hidden}
    streams = SimpleNamespace(enable_hyper_connections=True, num_residual_streams=4, hidden_size=8)
    assert sent_width(streams, 3) == 4 * 8
    products = sum(one.numel() for one in attention.parameters() if one.dim() > 1)
    # What decays come from is projected twice, by way of one head's width.
    factored = kimi.WIDTH * (hidden + kimi.WIDTH * kimi.HEADS) - attention.f_proj.weight.numel()
    assert mixer.parameters(model.config) == products + factored


def test_the_rule_is_tried_on_a_gpu(model, monkeypatch):
    attention, asked = model.decoder.layers[0].self_attention, []
    monkeypatch.setitem(sys.modules, type(attention).__module__, kimi)
    for without in ({}, {"initial_state": None}, {"output_final_state": False}):
        monkeypatch.setattr(
            sys.modules[layer.KERNELS], layer.RULE,
            lambda *inputs, without=without, **named: kimi.chunk_kda(*inputs, **named | without),
        )  # fmt: skip
        layer.rule_with_one_decay.cache_clear()
        assert bool(layer.rule_refusal(attention, "cpu", 2)) == bool(without)
    monkeypatch.setattr(probe, "tried", lambda *given: asked.append(given[1:]) or "wrong output")
    monkeypatch.setattr(attention, "parameters", lambda: iter([Mock(device=torch.device("cuda"))]))
    with pytest.raises(UserError, match=r"Kimi Delta Attention's kernel does .*wrong output"):
        install(model)
    assert asked == [("cuda", kimi.WIDTH, kimi.WIDTH, kimi.HEADS)]
