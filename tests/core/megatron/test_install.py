"""Hooks on a model: installing and taking them back, and that nothing else changes."""

import functools
from types import SimpleNamespace

import pytest
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.errors import UserError
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.layers.attention import Attention
from megatron_prefix.megatron import parents
from megatron_prefix.megatron.install import give_back, install, uninstall
from tests.harness import steps
from tests.harness.one_group import items, run
from tests.harness.one_rank import small_model
from tests.harness.steps import Contract, assert_bitwise

pytestmark = pytest.mark.usefixtures("on_one_rank")

CONFIG = PrefixConfig(min_gain=0, kernel="math")


def stock(model):
    return run(get_forward_backward_func(), model)


def state_of(model):
    """Everything a module object holds, by module; dictionaries one level deep."""
    return {
        name: {
            key: dict(value) if isinstance(value, dict) else value
            for key, value in vars(module).items()
        }
        for name, module in model.named_modules()
    }


def assert_same_objects(found, expected):
    assert found.keys() == expected.keys()
    for name, members in expected.items():
        assert found[name].keys() == members.keys(), name
        for key, value in members.items():
            other = found[name][key]
            if isinstance(value, dict):
                assert other.keys() == value.keys(), (name, key)
                assert all(other[k] is v for k, v in value.items()), (name, key)
            else:
                assert other is value or other == value, (name, key)


def test_checkpoint_keys_stay():
    model = small_model("tiny-qwen3")
    before = list(model.state_dict()), list(unwrap(model).sharded_state_dict())
    assert before[0] and before[1]
    install(model)
    assert (list(model.state_dict()), list(unwrap(model).sharded_state_dict())) == before
    run(PrefixSchedule(CONFIG), model)
    assert (list(model.state_dict()), list(unwrap(model).sharded_state_dict())) == before
    model.load_state_dict(model.state_dict())


@pytest.mark.parametrize("runs", [False, True], ids=["unused", "after a step"])
def test_uninstall_restores_everything(runs):
    model, twin = small_model(), small_model()
    stock(model), stock(twin)  # Megatron notes things on its modules in a first step
    before = state_of(model)
    install(model, "math")
    assert state_of(model) != before
    if runs:
        run(PrefixSchedule(CONFIG), model)
        unwrap(model).set_input_tensor(None)
    uninstall(model)
    after = state_of(model)
    if runs:
        for state in (before, after):  # the last microbatch's number, by Megatron's schedule
            for members in state.values():
                members.pop("current_microbatch", None)
                members.pop("input_tensor", None)
    assert_same_objects(after, before)
    assert_bitwise(stock(model), stock(twin))


def test_an_override_that_was_there_comes_back():
    model = small_model()
    mlp, calls = unwrap(model).decoder.layers[1].mlp, []

    def theirs(*args, **kwargs):
        calls.append(1)
        return type(mlp).forward(mlp, *args, **kwargs)

    mlp.forward = theirs
    install(model, "math")
    assert mlp.forward is not theirs
    stock(model)
    assert len(calls) == len(items())
    run(PrefixSchedule(CONFIG), model)
    assert len(calls) > len(items())
    uninstall(model)
    assert vars(mlp)["forward"] is theirs


@pytest.mark.parametrize(
    "place", ["rotary_pos_emb", "decoder.layers.0.self_attention.core_attention"]
)
def test_an_override_that_segments_would_leave_out_is_refused(place):
    model = small_model()
    module = unwrap(model).get_submodule(place)
    module.forward = functools.partial(type(module).forward, module)
    with pytest.raises(UserError, match=type(module).__name__):
        install(model)


def test_a_failed_install_leaves_no_hook(monkeypatch):
    model = small_model()
    before = state_of(model)
    with monkeypatch.context() as patch:
        patch.setattr(Attention, "overrides", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            install(model)
    assert_same_objects(state_of(model), before)


def test_two_models_at_once():
    """A policy and a reference: neither sees the other's segments."""
    models = small_model(), small_model(seed=7)
    alone = [run(PrefixSchedule(CONFIG), model) for model in models]
    assert alone[0][0][0]["loss"] != alone[1][0][0]["loss"]
    one, two = install(models[0]), install(models[1])
    assert one is not two

    class Interrupting(Contract):
        def loss_func(self, batch):
            if batch["uid"] == 2:  # in the middle of the first model's step
                found.append(run(PrefixSchedule(CONFIG), models[1]))
            return super().loss_func(batch)

    found = []
    assert_bitwise(
        steps.run(PrefixSchedule(CONFIG), Interrupting().step, models[0], items()), alone[0]
    )
    assert_bitwise(found[0], alone[1])


# The forward of a parent class, replaced for one instance -----------------------------------------


class Parent:
    """Of the model."""

    def forward(self, x):
        return x + 1


class Mixed:
    """Another parent."""

    def forward(self, x):
        raise AssertionError


class Model(Parent, Mixed):
    """It calls its parent's."""

    def forward(self, x):
        return 10 * super().forward(x)


class Derived(Model):
    """It has no forward of its own."""


def times(factor, stock):
    return lambda *args, **kwargs: factor * stock(*args, **kwargs)


@pytest.mark.parametrize("kind", [Model, Derived])
def test_one_instance_has_another_parent(kind):
    model, other = kind(), kind()
    with parents.replaced(model, Model, times(2, parents.forward(model, Model))):
        assert (model.forward(1), other.forward(1)) == (40, 20)
        assert isinstance(model, kind) and type(model).__name__ == kind.__name__
        with parents.replaced(model, Model, times(3, parents.forward(model, Model))):
            assert model.forward(x=1) == 120
        assert (model.forward(1), parents.forward(model, Model)(1)) == (40, 4)
    assert (model.forward(1), type(model), vars(model)) == (20, kind, {})


def test_what_has_no_memory_stays_beside_the_stock_schedule(monkeypatch):
    """What torch has cached, too: less of it would look as if others used the device."""
    emptied = []
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: emptied.append(1))
    model = small_model()
    hooks = install(model)
    for size in (0, 8):
        hooks.keep(size, SimpleNamespace(device_bytes=size, give_back=lambda: None))
        give_back(model)
        assert [*hooks.kept] == [0] and len(emptied) == bool(size)
