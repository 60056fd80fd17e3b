"""What frozen layers beside adapters cost; steps with adapters are rows of the table of cases."""

from unittest import mock

import pytest

from megatron_prefix.features.measure.cost_meter import key_of
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.plan.cost import NUM_FEATURES
from megatron_prefix.run.rank import Rank
from tests.harness import steps
from tests.harness.one_group import items, schedule_with
from tests.harness.one_rank import one_rank, small_model
from tests.oracle.model import AROUND


def test_frozen_weights_cost_half_a_backward_and_get_no_gradient():
    """A frozen weight has no gradient: its backward is one product, and not two."""
    with one_rank(), AROUND["adapted"](mock.Mock()):
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
    with one_rank(), AROUND["adapted"](mock.Mock()):
        for schedule, recompute in ((stock_schedule(), "none"), (schedule_with(), "full")):
            model = small_model(recompute=recompute)
            steps.run(schedule, steps.Contract().step, model, items())
            named = unwrap(model).named_parameters()
            found.append({name: one.main_grad for name, one in named if one.requires_grad})
        stock, own = found
        assert any(one.any() for one in stock.values())
        steps.assert_gradients(own, stock, 100)
