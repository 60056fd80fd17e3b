"""Classes of vision-language models that are taken, and what of them is refused."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import nn

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import CannotShare
from megatron_prefix.features.overlap import reductions as overlap
from megatron_prefix.features.vision import models
from megatron_prefix.features.vision.part import Images
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.layers import attention
from megatron_prefix.layers.kind import PATCHES
from megatron_prefix.megatron import families, features
from megatron_prefix.megatron.install import install, language_model, uninstall
from megatron_prefix.run.calls import Callbacks
from tests.harness.one_rank import one_rank, small_model


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


def named(full: str, *bases: type, **members: Any) -> type:
    """A class of that full name with a forward of its own."""
    module, _, name = full.rpartition(".")
    own = {"__module__": module, "__qualname__": name, **members}

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        return bases[0].forward(self, *args, **named)

    own.setdefault("forward", forward)
    return types.new_class(name, bases, {}, lambda space: space.update(own))


@pytest.mark.parametrize("line", families.FAMILIES, ids=lambda line: line.forward)
def test_known_language_models_are_taken(line: families.Family) -> None:
    model = small_model(wrap_ddp=False)
    model.__class__ = named(line.forward, type(model))
    assert families.family(model) is line
    install(model)
    uninstall(model)


def test_unknown_ones_are_not() -> None:
    model = small_model(wrap_ddp=False)
    model.__class__ = named("someone.elses.GPTModel", type(model))
    with pytest.raises(CannotShare, match="GPTModel, which has a forward of its own"):
        install(model)


@pytest.mark.parametrize("full", sorted(attention.FORWARDS - {attention.MEGATRON}))
def test_known_attention_is_taken(full: str) -> None:
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
def test_rotary_embeddings(known: bool) -> None:
    model = small_model(wrap_ddp=False)
    model.position_embedding_type = "mrope"
    full = sorted(models.ROTARY)[0] if known else "someone.elses.Rotary"
    model.rotary_pos_emb.__class__ = named(full, nn.Module)
    reasons = [reason.refusal.name for reason in models.rotary_refusals(model)]
    assert reasons == ([] if known else ["rotary embedding …"])


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "yarn"])
def test_tables_that_depend_on_the_length_of_a_call(kind: str) -> None:
    model = small_model(wrap_ddp=False)
    model.hf_rope_scaling = {"rope_type": kind}
    reasons = [reason.text for reason in features.rotary_refusals(model)]
    assert bool(reasons) == (kind != "yarn") and all(kind in one for one in reasons)


def test_a_forward_that_models_set_themselves() -> None:
    rotary = named("megatron.core.X", nn.Module)()
    assert not models.knows_rotary(rotary)

    def mrope_forward_thd_cp(self: Any) -> None:
        """As mbridge's Qwen2.5-VL sets it for packs."""

    mrope_forward_thd_cp.__module__ = "mbridge.models.qwen2_5_vl.rope_utils"
    rotary.forward = types.MethodType(mrope_forward_thd_cp, rotary)
    assert models.knows_rotary(rotary)
    mrope_forward_thd_cp.__module__ = "someone.elses"
    assert not models.knows_rotary(rotary)


REPLACED = {
    "core attention": (DotProductAttention, "layer 0's core attention"),
    "attention": (Attention, "layer 0's attention SelfAttention"),
    "rotary embedding": (RotaryEmbedding, "rotary embedding RotaryEmbedding"),
}


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("part", REPLACED)
def test_methods_put_into_classes_of_megatron(
    part: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By somebody who is not known to follow the same rule."""
    kind, refusal = REPLACED[part]
    stock = kind.forward

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **named: Any) -> Any:
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


@pytest.mark.parametrize("part", REPLACED)
def test_wrappers_in_classes_of_megatron(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's are what they wrap; somebody else's may change what that gives, and call themselves
    as it. What does not say who wrote it is refused, too."""
    kind, refusal = REPLACED[part]
    stock = kind.forward

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **named: Any) -> Any:
        return 2 * stock(self, *args, **named)

    model = small_model(wrap_ddp=False)
    for layer in model.decoder.layers:
        layer.self_attention.core_attention.__class__ = DotProductAttention
    own = (torch.compile(stock), torch._dynamo.disable(stock), torch.no_grad()(stock))
    for method in (*own, functools.lru_cache(stock)):
        monkeypatch.setattr(kind, "forward", method)
        install(model)
        uninstall(model)
    for method in (forward, torch.no_grad()(forward), functools.partial(stock), max):
        monkeypatch.setattr(kind, "forward", method)
        with pytest.raises(CannotShare, match=refusal):
            install(model)


def test_multimodal_positions_of_latent_attention_are_plain() -> None:
    model = small_model(wrap_ddp=False)
    assert not families.has_mrope(model)
    model.position_embedding_type = "mrope"
    assert families.has_mrope(model)
    model.config.multi_latent_attention = True
    assert not families.has_mrope(model)


class Wrapper(nn.Module):
    """As vision-language models are: a tower and a language model."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.language_model = small_model(wrap_ddp=False)
        self.config, self.vision_model = self.language_model.config, tower

    @property
    def decoder(self) -> Any:
        """The language model's."""
        return self.language_model.decoder


def test_towers_are_found_by_their_class() -> None:
    full = "transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionModel"
    tower = named(full, nn.Linear)(2, 2)
    model = Wrapper(tower)
    assert models.vision_tower(model) is tower
    assert language_model(model) is unwrap(model.language_model)
    model = Wrapper(nn.Linear(2, 2))
    assert models.vision_tower(model) is None


@pytest.mark.parametrize("where", ["module", "number", "config", "nowhere", "not in training"])
def test_towers_that_drop_at_random_are_not_run_twice(where: str) -> None:
    full = "transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionModel"
    tower = named(full, nn.Sequential)(nn.Linear(2, 2), nn.Dropout(0.1 * (where == "module")))
    tower[0].attention_dropout = 0.1 if where in ("number", "not in training") else 0.0
    tower.config = types.SimpleNamespace(hidden_dropout=0.1 if where == "config" else 0.0)
    tower.train(where != "not in training")
    found = models.vision_tower(Wrapper(tower))
    assert found is (tower if where in ("nowhere", "not in training") else None)


def test_nothing_is_looked_for_inside_the_language_model() -> None:
    """A model of thousands of modules is not walked through in every step."""
    model = Wrapper(nn.Linear(2, 2))
    found = [*models.around(model, model.language_model)]
    assert found == [model, model.vision_model]


def test_what_changes_around_the_language_model_is_seen() -> None:
    model = Wrapper(nn.Linear(2, 2).requires_grad_(False))
    model.__class__ = named(sorted(models.SPLIT_BY_RANKS)[0], Wrapper)
    inner = model.language_model
    facts: Any = types.SimpleNamespace(refused=[], looks_ahead=False)
    features.check_again(inner, model, (), facts)
    handle = model.vision_model.requires_grad_().weight.register_hook(lambda one: one.clamp(-1, 1))
    with pytest.raises(CannotShare, match=r"hooks on the gradient of vision_model\.weight"):
        features.check_again(inner, model, (), facts)
    handle.remove()
    features.check_again(inner, model, (), facts)
    rank: Any = types.SimpleNamespace(models=[model], language_models=[inner])
    images = Images(PrefixConfig(), rank, Callbacks())
    images.check_model(0)
    model.config.context_parallel_size = 2
    with pytest.raises(CannotShare, match=r"run this model with .* share the images of a call"):
        images.check_model(0)


def own_model() -> Any:
    """A language model that has a tower itself, as ROLL's."""
    full = next(line.forward for line in families.FAMILIES if line.calls_parent)
    model = small_model(wrap_ddp=False)
    model.__class__ = named(full, type(model))
    tower = "transformers.models.qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel"
    model.vision_model = named(tower, nn.Linear)(2, 2)
    return model


def test_a_model_that_is_its_own_language_model() -> None:
    model = own_model()
    assert language_model(model) is model and models.has_images(model, model)
    assert models.vision_tower(model) is models.own_tower(model) is model.vision_model
    assert [*models.around(model, model)] == [model.vision_model]
    places = overlap.places_of(model, model)
    assert {places[one] for one in model.vision_model.parameters()} == {-1}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2)])
def test_images_that_all_ranks_of_a_model_share(frozen: bool, ranks: tuple[int, int]) -> None:
    model = own_model()
    model.vision_model.requires_grad_(not frozen)
    tp, cp = ranks
    model.config.tensor_model_parallel_size, model.config.context_parallel_size = tp, cp
    refused = [reason.text for reason in models.refusals(model, model)]
    assert bool(refused) == (tp * cp > 1 and not frozen)
    assert all("tensor- and context-parallel ranks share" in one for one in refused)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_images_that_ranks_share_without_adding_up(frozen: bool, size: int) -> None:
    model = Wrapper(nn.Linear(2, 2).requires_grad_(not frozen))
    model.__class__ = named(sorted(models.SPLIT_BY_RANKS)[0], Wrapper)
    model.config.context_parallel_size = size
    refused = [reason.text for reason in models.refusals(model, model.language_model)]
    assert bool(refused) == (size > 1 and not frozen)
    assert all("context-parallel ranks share the images of a call" in one for one in refused)
