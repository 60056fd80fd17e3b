"""Hooks on a model: installing and taking them back, and that nothing else changes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.language_module import language_module
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import nn

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.layers.attention import Attention
from megatron_prefix.layers.blocks.kernels import KERNELS
from megatron_prefix.megatron import install as installing
from megatron_prefix.megatron.install import install, uninstall
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness import steps
from tests.harness.calls import ROWS, Trainer, run_step
from tests.harness.one_rank import one_rank, small_model
from tests.harness.steps import Contract, Microbatch

CONFIG = PrefixConfig(min_gain=0, kernel="math")


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


def items(seed: int = 0, num: int = 4) -> list[Microbatch]:
    """One group of rollouts with a common prompt."""
    return steps.group(seed, num)


def run(schedule: Any, model: Any, data: list[Microbatch] | None = None) -> Any:
    """A step's logs and gradients."""
    steps.zero_gradients(model)
    logs = steps.call(schedule, Contract().step, model, data or items())
    return logs, steps.gradients(model)


def stock(model: Any, data: list[Microbatch] | None = None) -> Any:
    return run(get_forward_backward_func(), model, data)


def assert_bitwise(found: Any, expected: Any) -> None:
    assert [log["loss"].item() for log in found[0]] == [log["loss"].item() for log in expected[0]]
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(found[1][name], gradient) for name, gradient in expected[1].items())


def state_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Everything a module object holds, by module; dictionaries one level deep."""
    return {
        name: {
            key: dict(value) if isinstance(value, dict) else value
            for key, value in vars(module).items()
        }
        for name, module in model.named_modules()
    }


def assert_same_objects(found: Any, expected: Any) -> None:
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


# --- What stays as it is --------------------------------------------------------------------------


def test_checkpoint_keys_stay() -> None:
    model = small_model("tiny-qwen3")
    before = list(model.state_dict()), list(unwrap(model).sharded_state_dict())
    assert before[0] and before[1]
    install(model)
    assert (list(model.state_dict()), list(unwrap(model).sharded_state_dict())) == before
    run(PrefixSchedule(CONFIG), model)
    assert (list(model.state_dict()), list(unwrap(model).sharded_state_dict())) == before
    model.load_state_dict(model.state_dict())


def test_no_module_is_added_or_replaced() -> None:
    model = small_model()
    before = list(model.named_modules())
    install(model)
    assert [(n, id(m)) for n, m in model.named_modules()] == [(n, id(m)) for n, m in before]


@pytest.mark.parametrize("runs", [False, True], ids=["unused", "after a step"])
def test_uninstall_restores_everything(runs: bool) -> None:
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


def test_an_override_that_was_there_comes_back() -> None:
    model = small_model()
    mlp = unwrap(model).decoder.layers[1].mlp
    calls = []

    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return type(mlp).forward(mlp, *args, **kwargs)

    mlp.forward = theirs
    install(model, "math")
    assert mlp.forward is not theirs
    stock(model)
    assert len(calls) == 4
    run(PrefixSchedule(CONFIG), model)
    assert len(calls) > 4
    uninstall(model)
    assert vars(mlp)["forward"] is theirs


@pytest.mark.parametrize(
    "place", ["rotary_pos_emb", "decoder.layers.0.self_attention.core_attention"]
)
def test_an_override_that_segments_would_leave_out_is_refused(place: str) -> None:
    model = small_model()
    module = unwrap(model).get_submodule(place)
    module.forward = functools.partial(type(module).forward, module)
    with pytest.raises(UserError, match=type(module).__name__):
        install(model)


def test_what_somebody_has_put_over_a_hook_stays() -> None:
    model = small_model()
    install(model)
    core = unwrap(model).decoder.layers[0].self_attention.core_attention
    hooked = core.forward

    def over(*args: Any, **kwargs: Any) -> Any:
        return hooked(*args, **kwargs)

    core.forward = over
    uninstall(model)
    assert core.forward is over
    assert "forward" not in vars(unwrap(model).decoder.layers[1].self_attention.core_attention)
    stock(model)


def test_installing_twice_is_installing_once() -> None:
    model = small_model()
    plain = state_of(model)
    hooks = install(model, "math")
    before = state_of(model)
    assert install(model, "math") is hooks
    assert_same_objects(state_of(model), before)
    uninstall(model)
    uninstall(model)
    assert_same_objects(state_of(model), plain)
    assert install(model, "math") is not hooks


def test_a_second_install_may_change_the_kernel() -> None:
    model = small_model(dtype=torch.float32)
    assert install(model, "flash_cpu").kernels[None] is KERNELS["flash_cpu"]
    assert install(model, "math").kernels[None] is KERNELS["math"]
    assert install(model, "auto").kernels[None] is KERNELS["flash_cpu"]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "group"),
    [(32, 8, 1, 4), (32, 8, 4, 4), (32, 2, 4, 8), (16, None, 2, 1), (28, 4, 2, 7)],
)
def test_kernels_are_probed_with_the_heads_of_a_rank(
    heads: int, kv_heads: int | None, ranks: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        installing,
        "choose_kernel",
        lambda *how, **window: asked.append((*how, window)) or KERNELS["math"],
    )
    config = SimpleNamespace(
        kv_channels=16, num_attention_heads=heads, num_query_groups=kv_heads,
        tensor_model_parallel_size=ranks,
    )  # fmt: skip
    model = SimpleNamespace(config=config, parameters=lambda: iter([torch.zeros(1)]))
    installing._kernel_for("auto", model, 3, 64)
    found = ("auto", torch.device("cpu"), torch.float32, 16, 16, 3, group, {"window": 64})
    assert asked == [found]


def test_a_failed_install_leaves_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    before = state_of(model)
    with monkeypatch.context() as patch:
        patch.setattr(Attention, "overrides", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            install(model)
    assert_same_objects(state_of(model), before)


def test_megatrons_schedule_is_bitwise_equal_on_a_hooked_model() -> None:
    model, twin = small_model(), small_model()
    install(model, "math")
    assert_bitwise(stock(model), stock(twin))
    run(PrefixSchedule(CONFIG), model)
    assert_bitwise(stock(model), stock(twin))


def test_two_models_at_once() -> None:
    """A policy and a reference: neither sees the other's segments."""
    models = small_model(), small_model(seed=7)
    alone = [run(PrefixSchedule(CONFIG), model) for model in models]
    assert alone[0][0][0]["loss"] != alone[1][0][0]["loss"]
    one, two = install(models[0]), install(models[1])
    assert one is not two

    class Interrupting(Contract):
        def loss_func(self, batch: Microbatch) -> Any:
            if batch["uid"] == 2:  # in the middle of the first model's step
                found.append(run(PrefixSchedule(CONFIG), models[1]))
            return super().loss_func(batch)

    found: list[Any] = []
    steps.zero_gradients(models[0])
    logs = steps.call(PrefixSchedule(CONFIG), Interrupting().step, models[0], items())
    assert_bitwise((logs, steps.gradients(models[0])), alone[0])
    assert_bitwise(found[0], alone[1])


# --- Wrappers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap_ddp", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["plain", "Float16Module"])
def test_wrapped_models(wrap_ddp: bool, dtype: torch.dtype) -> None:
    model = small_model(dtype=dtype, wrap_ddp=wrap_ddp)
    depth = int(wrap_ddp) + int(dtype == torch.bfloat16)
    wrapped, levels = model, 0
    while hasattr(wrapped, "module"):
        wrapped, levels = wrapped.module, levels + 1
    assert levels == depth
    expected, found = stock(model), run(PrefixSchedule(CONFIG), model)
    assert install(model) is install(unwrap(model))
    for log, wanted in zip(found[0], expected[0], strict=True):
        assert_close(log["loss"], wanted["loss"], 18, dtype)
    if dtype == torch.float64:
        for name, gradient in expected[1].items():
            assert_close(found[1][name], gradient, 192, what=name)
    else:  # two roundings of 16 bit each way: tests/gpu has the comparison with fp32
        for name, gradient in expected[1].items():
            assert found[1][name].dtype == gradient.dtype
            error = (found[1][name] - gradient).float().norm() / gradient.float().norm()
            assert error < 0.05, name


# --- Transformer engine ---------------------------------------------------------------------------


def test_transformer_engine_hears_that_no_backward_is_first() -> None:
    class Layer(nn.Module):
        is_first_microbatch = True

    model = small_model()
    layers = [Layer(), Layer()]
    layers[1].is_first_microbatch = False
    unwrap(model).decoder.layers[0].mlp.extra = nn.ModuleList(layers)
    seen = []
    layers[0].register_forward_pre_hook(lambda *args: seen.append(layers[0].is_first_microbatch))
    hooks = install(model)
    hooks.prepare(0)
    assert [layer.is_first_microbatch for layer in layers] == [False, False]
    layers[0].is_first_microbatch = True
    mlp = unwrap(model).decoder.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda *a, **k: (seen.append(layers[0].is_first_microbatch), forward(*a, **k))[1]
    run(PrefixSchedule(CONFIG), model)
    assert seen and not any(seen)


def test_the_cross_entropy_of_a_segment_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformer-engine's, here in name only, is told that it may be captured in a CUDA graph."""
    capturable: list[bool] = []

    def cross_entropy(logits: Any, labels: Any, _: Any, is_cg_capturable: bool = False) -> Any:
        capturable.append(is_cg_capturable)
        return language_module.tensor_parallel.vocab_parallel_cross_entropy(logits, labels)

    monkeypatch.setattr(language_module, "te_parallel_cross_entropy", cross_entropy)
    model = small_model(dtype=torch.float32)
    model.config.cross_entropy_loss_fusion = True
    model.config.cross_entropy_fusion_impl = "te"
    trainer = Trainer(ROWS, 0, Layout())
    _, expected = run_step(get_forward_backward_func(), trainer, [model])
    assert capturable == [False] * trainer.num
    capturable.clear()
    _, found = run_step(PrefixSchedule(CONFIG), trainer, [model])
    assert capturable and all(capturable)
    for name, gradient in expected.items():
        assert_close(found[name], gradient, 64, dtype=torch.float32, what=name)
    capturable.clear()
    run_step(get_forward_backward_func(), trainer, [model])
    assert capturable == [False] * trainer.num
    uninstall(model)
    assert "compute_language_model_loss" not in vars(unwrap(model))
