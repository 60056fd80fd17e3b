"""Classes of vision-language models that are taken, and what of them is refused."""

import functools
import types

import pytest
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import nn

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import CannotShare
from megatron_prefix.features.vision import models
from megatron_prefix.features.vision.part import Images
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.layers import attention
from megatron_prefix.layers.kind import PATCHES
from megatron_prefix.megatron import families, features
from megatron_prefix.megatron.install import install, language_model, uninstall
from megatron_prefix.run.calls import Callbacks
from tests.harness.one_rank import small_model

pytestmark = pytest.mark.usefixtures("on_one_rank")


def named(full, *bases, **members):
    """A class of that full name with a forward of its own."""
    module, _, name = full.rpartition(".")
    own = {"__module__": module, "__qualname__": name, **members}

    def forward(self, *args, **named):
        return bases[0].forward(self, *args, **named)

    own.setdefault("forward", forward)
    return types.new_class(name, bases, {}, lambda space: space.update(own))


@pytest.mark.parametrize("line", families.FAMILIES, ids=lambda line: line.forward)
def test_known_language_models_are_taken(line):
    model = small_model(wrap_ddp=False)
    model.__class__ = named(line.forward, type(model))
    assert families.family(model) is line
    install(model)
    uninstall(model)


def test_unknown_ones_are_not():
    model = small_model(wrap_ddp=False)
    model.__class__ = named("someone.elses.GPTModel", type(model))
    with pytest.raises(CannotShare, match="GPTModel, which has a forward of its own"):
        install(model)


@pytest.mark.parametrize("full", sorted(attention.FORWARDS - {attention.MEGATRON}))
def test_known_attention_is_taken(full):
    """But for one that computes Megatron's local attention itself, in the place of its core."""
    model = small_model(wrap_ddp=False)
    for layer in model.decoder.layers:
        layer.self_attention.__class__ = named(full, SelfAttention)
    if full in attention.PASSED_OVER:
        with pytest.raises(CannotShare, match="layer 0's core attention LocalAttention"):
            install(model)
        return
    install(model)
    uninstall(model)


@pytest.mark.parametrize("known", [True, False])
def test_rotary_embeddings(known):
    model = small_model(wrap_ddp=False)
    model.position_embedding_type = "mrope"
    full = sorted(models.ROTARY)[0] if known else "someone.elses.Rotary"
    model.rotary_pos_emb.__class__ = named(full, nn.Module)
    reasons = [reason.refusal.name for reason in models.rotary_refusals(model)]
    assert reasons == ([] if known else ["rotary embedding …"])


REPLACED = {
    "core attention": (DotProductAttention, "layer 0's core attention"),
    "attention": (Attention, "layer 0's attention SelfAttention"),
    "rotary embedding": (RotaryEmbedding, "rotary embedding RotaryEmbedding"),
}


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("part", REPLACED)
def test_methods_put_into_classes_of_megatron(part, known, monkeypatch):
    """By somebody who is not known to follow the same rule."""
    kind, refusal = REPLACED[part]
    stock = kind.forward

    @functools.wraps(stock)
    def forward(self, *args, **named):
        return stock(self, *args, **named)

    del forward.__wrapped__  # as by one who copies its name and text only
    forward.__module__ = sorted(PATCHES)[0] if known else "someone.elses"
    model = small_model(wrap_ddp=False)
    for layer in model.decoder.layers:
        layer.self_attention.core_attention.__class__ = DotProductAttention
    monkeypatch.setattr(kind, "forward", forward)
    if known:
        install(model)
        uninstall(model)
        return
    with pytest.raises(CannotShare, match=refusal):
        install(model)


class Wrapper(nn.Module):
    """As vision-language models are: a tower and a language model."""

    def __init__(self, tower):
        super().__init__()
        self.language_model = small_model(wrap_ddp=False)
        self.config, self.vision_model = self.language_model.config, tower

    @property
    def decoder(self):
        """The language model's."""
        return self.language_model.decoder


def test_towers_are_found_by_their_class():
    full = "transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionModel"
    tower = named(full, nn.Linear)(2, 2)
    model = Wrapper(tower)
    assert models.towers(model) == [tower]
    assert language_model(model) is unwrap(model.language_model)
    model = Wrapper(nn.Linear(2, 2))
    assert models.towers(model) == []


@pytest.mark.parametrize("where", ["module", "number", "config", "nowhere", "not in training"])
def test_towers_that_drop_at_random_are_not_run_twice(where):
    full = "transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionModel"
    tower = named(full, nn.Sequential)(nn.Linear(2, 2), nn.Dropout(0.1 * (where == "module")))
    tower[0].attention_dropout = 0.1 if where in ("number", "not in training") else 0.0
    tower.config = types.SimpleNamespace(hidden_dropout=0.1 if where == "config" else 0.0)
    tower.train(where != "not in training")
    found = models.towers(Wrapper(tower))
    assert found == ([tower] if where in ("nowhere", "not in training") else [])


def test_what_changes_around_the_language_model_is_seen():
    model = Wrapper(nn.Linear(2, 2).requires_grad_(False))
    model.__class__ = named(sorted(models.SPLIT_BY_RANKS)[0], Wrapper)
    inner = model.language_model
    facts = types.SimpleNamespace(refused=[], looks_ahead=False)
    features.check_again(inner, model, (), facts)
    handle = model.vision_model.requires_grad_().weight.register_hook(lambda one: one.clamp(-1, 1))
    with pytest.raises(CannotShare, match=r"hooks on the gradient of vision_model\.weight"):
        features.check_again(inner, model, (), facts)
    handle.remove()
    features.check_again(inner, model, (), facts)
    rank = types.SimpleNamespace(models=[model], language_models=[inner])
    images = Images(PrefixConfig(), rank, Callbacks())
    images.check_model(0)
    model.config.context_parallel_size = 2
    with pytest.raises(CannotShare, match=r"run this model with .* share the images of a call"):
        images.check_model(0)
