"""What a model says: read once, and again where an option changes; it keeps no model."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import FrozenInstanceError, fields

import pytest
from torch import nn

from megatron_prefix.config import PrefixConfig
from megatron_prefix.features.vision import models
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.costs import Costs
from megatron_prefix.run.parts_of_call import chosen
from megatron_prefix.run.rank import Rank
from megatron_prefix.run.request import Request, StepKind
from tests.core.megatron.test_families import Wrapper, named
from tests.harness.one_rank import one_rank, small_model


def test_numbers_are_made_once_until_an_option_changes() -> None:
    with one_rank():
        model = small_model()
        first, again = Rank.of([model]), Rank.of([model], forward_only=True)
        assert again.model.cost is first.model.cost and again.model.payloads is first.model.payloads
        dropped = first.act
        assert dropped > 0
        first.config.recompute_granularity = "full"
        first.config.recompute_method, first.config.recompute_num_layers = "uniform", 1
        assert Rank.of([model]).act == 0
        first.config.recompute_granularity, first.config.recompute_modules = "selective", []
        assert Rank.of([model]).act == dropped
        first.config.recompute_modules.append("mlp")  # in place
        assert Rank.of([model]).act == 0


def test_other_chunks_have_numbers_of_their_own() -> None:
    with one_rank():
        model, other = small_model(), small_model()
        assert Rank.of([model, other]).model.cost is not Rank.of([model]).model.cost


def test_a_tower_that_comes_later_is_seen() -> None:
    with one_rank():
        model = Wrapper(nn.Linear(2, 2))
        assert not chosen(PrefixConfig(), Rank.of([model]), Callbacks())
        model.vision_model = named(next(iter(models.TOWERS)), nn.Linear)(2, 2)
        (images,) = chosen(PrefixConfig(), Rank.of([model]), Callbacks())
        assert images.runs_outside


def test_numbers_do_not_keep_a_model() -> None:
    with one_rank():
        model = small_model()
        gone = weakref.ref(model)
        assert Rank.of([model]).payloads
        del model
        gc.collect()
        assert gone() is None


def test_what_is_refused_of_options_is_that_of_now() -> None:
    with one_rank():
        model = small_model()
        config = Rank.of([model]).config
        assert Rank.of([model]).model.refused == [] and Rank.of([model]).model.other_steps is None
        for name, value in (("flash_decode", True), ("quant_recipe", object())):
            before = getattr(config, name, None)
            setattr(config, name, value)
            (reason,) = Rank.of([model]).model.refused
            assert reason.text.startswith(name)
            setattr(config, name, before)
            assert Rank.of([model]).model.refused == []
        config.delay_wgrad_compute = True
        assert Rank.of([model]).model.other_steps is not None


def test_what_is_around_a_language_model_has_options_of_its_own() -> None:
    with one_rank():
        model = small_model()
        model.config = copy.copy(model.config)
        model.config.hidden_dropout = 0.1
        rank = Rank.of([model])
        assert rank.config.hidden_dropout and rank.model.refused == []
        rank.language_models[0].config.hidden_dropout = 0.1
        assert len(Rank.of([model]).model.refused) == 1


def test_a_request_and_its_rank_are_frozen() -> None:
    with one_rank():
        rank = Rank.of([small_model()])
        for made in (rank.model, rank, Request({}, rank, StepKind(None), Callbacks(), Costs(rank))):
            for field in fields(made):
                with pytest.raises(FrozenInstanceError):
                    setattr(made, field.name, getattr(made, field.name))
