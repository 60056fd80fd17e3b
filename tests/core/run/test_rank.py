"""Numbers of a model: made once, and again where an option changes; they keep no model."""

from __future__ import annotations

import copy
import gc
import weakref

from torch import nn

from megatron_prefix.config import PrefixConfig
from megatron_prefix.features.vision import models
from megatron_prefix.parts import chosen
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.rank import Rank
from tests.core.megatron.test_families import Wrapper, named
from tests.harness.one_rank import one_rank, small_model


def test_numbers_are_made_once_until_an_option_changes() -> None:
    with one_rank():
        model = small_model()
        first, again = Rank([model]), Rank([model], forward_only=True)
        assert again.cost is first.cost and again.footprints is first.footprints
        kept = first.footprint(False, 0)
        assert again.footprint(False, 0) is kept
        first.config.recompute_granularity = "full"
        first.config.recompute_method, first.config.recompute_num_layers = "uniform", 1
        assert Rank([model]).footprint(False, 0) != kept
        first.config.recompute_granularity, first.config.recompute_modules = "selective", []
        nothing = Rank([model]).footprint(False, 0)
        first.config.recompute_modules.append("core_attn")  # in place
        assert Rank([model]).footprint(False, 0) != nothing


def test_other_chunks_have_numbers_of_their_own() -> None:
    with one_rank():
        model, other = small_model(), small_model()
        assert Rank([model, other]).cost is not Rank([model]).cost


def test_a_tower_that_comes_later_is_seen() -> None:
    with one_rank():
        model = Wrapper(nn.Linear(2, 2))
        assert not chosen(PrefixConfig(), Rank([model]), Callbacks())
        model.vision_model = named(next(iter(models.TOWERS)), nn.Linear)(2, 2)
        (images,) = chosen(PrefixConfig(), Rank([model]), Callbacks())
        assert images.runs_outside


def test_numbers_do_not_keep_a_model() -> None:
    with one_rank():
        model = small_model()
        gone = weakref.ref(model)
        Rank([model]).footprint(False, 0)
        del model
        gc.collect()
        assert gone() is None


def test_what_is_refused_of_options_is_that_of_now() -> None:
    with one_rank():
        model = small_model()
        config = Rank([model]).config
        assert Rank([model]).refused == [] and Rank([model]).other_steps is None
        for name, value in (("flash_decode", True), ("quant_recipe", object())):
            before = getattr(config, name, None)
            setattr(config, name, value)
            (reason,) = Rank([model]).refused
            assert reason.text.startswith(name)
            setattr(config, name, before)
            assert Rank([model]).refused == []
        config.delay_wgrad_compute = True
        assert Rank([model]).other_steps is not None


def test_what_is_around_a_language_model_has_options_of_its_own() -> None:
    with one_rank():
        model = small_model()
        model.config = copy.copy(model.config)
        model.config.hidden_dropout = 0.1
        rank = Rank([model])
        assert rank.config.hidden_dropout and rank.refused == []
        rank.language_models[0].config.hidden_dropout = 0.1
        assert len(Rank([model]).refused) == 1
