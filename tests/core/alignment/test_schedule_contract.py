"""The function that stands in for Megatron's keeps its contract: arguments, hooks, gradients."""

import contextlib
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func as stock_schedule
from megatron.core.pipeline_parallel import schedules

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import CannotShare, UserError
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.megatron.scale_functions import own_scale_functions
from megatron_prefix.refusals.table import FORWARD_GRAPH
from megatron_prefix.run.rank import default_groups
from megatron_prefix.run.schedule import NEW_FUNCTION, PrefixSchedule, get_forward_backward_func
from tests.harness import steps
from tests.harness.one_group import assert_aligned, items, run, schedule_with
from tests.harness.one_rank import small_model
from tests.harness.steps import Contract

pytestmark = pytest.mark.usefixtures("on_one_rank")


def test_every_keyword_of_megatrons_schedules_is_taken():
    names = inspect.signature(stock_schedule()).parameters
    values = dict(
        decoder_seq_length=None, forward_only=False, collect_non_loss_data=False,
        first_val_step=None, adjust_tensor_shapes_fn=None, p2p_communicator=None,
        pg_collection=default_groups(), force_all_reduce=False,
    )  # fmt: skip
    model = small_model()
    required = {"forward_step_func", "data_iterator", "model", "num_microbatches", "seq_length"}
    assert set(names) == required | {"micro_batch_size"} | set(values)
    assert_aligned(run(schedule_with(), model, **values), model)


@pytest.mark.parametrize(("name", "fix"), [
    ("config", r"did you mean prefix_config\?"),
    ("prefix_confg", r"did you mean prefix_config\?"),
    ("sample", r"did you mean samples\?"),
    ("mode", r"a field of PrefixConfig: prefix_config=PrefixConfig\(mode=\.\.\.\)"),
    ("chunk_tokens", r"prefix_config=PrefixConfig\(chunk_tokens="),
    ("xyzzy", "known are .*prefix_config, trained"),
])  # fmt: skip
def test_the_factory_refuses_what_it_does_not_know(name, fix):
    """It would share in mode "on", whatever was asked for."""
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}': .*{fix}"):
        get_forward_backward_func(**{name: PrefixConfig(mode="off")})


def test_the_factory_takes_what_the_running_megatron_takes(monkeypatch):
    """pp_size and vp_size, by place or by name, and what later versions add."""
    for call in ((1, None), ()):
        made = get_forward_backward_func(*call, schedule_pg_collection=None)
        assert isinstance(made, PrefixSchedule) and made.config.mode == "on"

    def newer(pp_size=None, vp_size=None, *, of_2030=None): ...

    monkeypatch.setattr(schedules, "get_forward_backward_func", newer)
    assert isinstance(get_forward_backward_func(of_2030=1), PrefixSchedule)


@pytest.mark.parametrize("mode", ["on", "off"])
@pytest.mark.parametrize(("name", "fix"), [
    ("foward_only", r"did you mean forward_only\?"),
    ("seq_len", r"did you mean seq_length\?"),
    ("xyzzy", "known are forward_step_func, data_iterator, .*seq_length"),
])  # fmt: skip
def test_a_call_refuses_what_it_does_not_know(name, fix, mode):
    """It would run a backward that nobody wants."""
    with pytest.raises(TypeError, match=rf"PrefixSchedule\.__call__\(\) .*'{name}': {fix}"):
        run(schedule_with(mode=mode), small_model(), **{name: True})


def test_a_call_takes_what_the_running_megatrons_schedules_take(monkeypatch):
    stock = schedules.forward_backward_no_pipelining

    def newer(*, of_2030, **arguments):
        return stock(**arguments)

    monkeypatch.setattr(schedules, "forward_backward_no_pipelining", newer)
    model = small_model()
    assert_aligned(run(schedule_with(), model, of_2030=1), model)


def test_one_schedule_a_process_and_configuration():
    """Trainers ask for it every step; plans, kernels and pools of the first one must stay."""
    config = PrefixConfig(min_gain=3)
    made = get_forward_backward_func(prefix_config=config)
    assert get_forward_backward_func(1, None, prefix_config=PrefixConfig(min_gain=3)) is made
    assert get_forward_backward_func(prefix_config=PrefixConfig(min_gain=4)) is not made
    assert get_forward_backward_func(prefix_config=config, trained=str) is not made
    assert get_forward_backward_func() is get_forward_backward_func()


def test_a_function_made_anew_in_every_step_is_warned_of_once(caplog):
    def none(_):
        return None

    config = PrefixConfig(min_gain=3)
    for callback in (none, none, len, str, lambda _: None):  # as many codes as functions
        get_forward_backward_func(prefix_config=config, trained=callback)
        get_forward_backward_func(prefix_config=config, routes=callback)
    assert not caplog.records
    made = [
        get_forward_backward_func(prefix_config=config, trained=lambda _: None) for _ in range(3)
    ]
    assert len(set(map(id, made))) == 3
    assert [record.message for record in caplog.records] == [NEW_FUNCTION]


def test_a_configuration_is_given_by_name():
    with pytest.raises(UserError, match="by name: prefix_config=PrefixConfig"):
        get_forward_backward_func(PrefixConfig())


@pytest.mark.parametrize("mode", ["on", "observe"])
def test_models_and_iterators_may_come_in_lists(mode):
    def in_lists(*, model, data_iterator, **given):
        ours = schedule_with(mode=mode)
        return ours(model=[model], data_iterator=[data_iterator], **given)

    model = small_model()
    assert_aligned(run(in_lists, model), model)


def test_only_the_steps_microbatches_are_taken_from_the_iterator():
    source = iter(items(7))
    logs, _ = run(schedule_with(), small_model(), data_iterator=source)
    assert [log["uid"] for log in logs] == [0, 1, 2, 3, 4]
    assert [item["uid"] for item in source] == [5, 6]


class Recorder:
    """Timers that note what happens to them."""

    def __init__(self):
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, name, log_level=None):
        def start(barrier=False):
            self.calls.append((name, "start", log_level, barrier))

        return SimpleNamespace(start=start, stop=lambda: self.calls.append((name, "stop")))


@pytest.mark.parametrize("forward_only", [False, True])
def test_timers_are_megatrons(forward_only):
    model, twin = small_model(), small_model()
    calls = []
    for schedule, chunk in ((schedule_with(), model), (stock_schedule(), twin)):
        timers = Recorder()
        unwrap(chunk).config.timers = timers
        unwrap(chunk).config.barrier_with_L1_time = True
        run(schedule, chunk, forward_only=forward_only)
        wanted = ("forward-backward", "forward-compute")
        calls.append(sorted((c for c in timers.calls if c[0] in wanted), key=str))
    assert calls[0] == calls[1]
    assert len(calls[0]) == 2 + 2 * 5
    assert ("forward-backward", "start", 1, True) in calls[0]


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("force", [False, True])
def test_gradients_are_finished_once(per_token, force):
    model = small_model()
    config, calls = unwrap(model).config, []
    contract = Contract(per_token=per_token)
    contract.configure(model)
    groups = default_groups()

    def finish(models, num_tokens, **options):
        calls.append((models, num_tokens, options))

    config.finalize_model_grads_func = finish
    run(schedule_with(), model, contract, pg_collection=groups, force_all_reduce=force)
    ((models, num_tokens, options),) = calls
    assert models == [model]
    assert options == {"pg_collection": groups, "force_all_reduce": force}
    if per_token:
        assert num_tokens is not None and num_tokens.dtype == torch.int and num_tokens.dim() == 0
        assert num_tokens.item() == 5 * 4
    else:
        assert num_tokens is None


@pytest.mark.parametrize("as_list", [False, True])
def test_everything_runs_inside_no_sync_func(as_list):
    model, entered = small_model(), []

    @contextlib.contextmanager
    def no_sync():
        entered.append("in")
        yield
        entered.append("out")

    class Noting(Contract):
        def loss_func(self, batch):
            entered.append("loss")
            return super().loss_func(batch)

    config = unwrap(model).config
    config.no_sync_func = [no_sync] if as_list else no_sync
    config.finalize_model_grads_func = lambda *args, **kwargs: entered.append("finish")
    run(schedule_with(), model, Noting())
    assert entered == ["in", *["loss"] * 5, "out", "finish"]


def test_an_optimizers_own_scale_is_not_the_trainers():
    """Which may say something else for every microbatch, and holds back some ways of sharing."""
    model = small_model()
    for scale in (None, 2.0):
        Contract(scale=scale).configure(model)
        assert own_scale_functions(unwrap(model).config) == ()
    unwrap(model).config.grad_scale_func = torch.neg
    assert own_scale_functions(unwrap(model).config) == (torch.neg,)


def test_forward_only_touches_no_gradient():
    model = small_model()
    run(schedule_with(), model)
    before, config = steps.gradients(model), unwrap(model).config
    config.finalize_model_grads_func = config.no_sync_func = lambda *args, **kwargs: 1 / 0
    for context in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
        with context():
            logs = steps.call(schedule_with(), Contract().step, model, items(), forward_only=True)
        assert len(logs) == 5 and not any(log["loss"].requires_grad for log in logs)
        assert all(torch.equal(g, before[n]) for n, g in steps.gradients(model).items())


def test_a_step_without_a_loss_function_returns_outputs():
    """Megatron's schedules append the model's output then; ours is zero in front of the loss."""

    def step(data_iterator, chunk):
        return Contract().step(data_iterator, chunk)[0], None

    found = steps.call(schedule_with(), step, small_model(), items(), forward_only=True)
    twin = small_model(wrap_ddp=False)
    expected = steps.call(stock_schedule(), step, twin, items(), forward_only=True)
    for output, whole, item in zip(found, expected, items(), strict=True):
        first = int(item["loss_mask"][0].nonzero()[0])
        assert output.shape == whole.shape
        assert_close(output[:, first:], whole[:, first:], whole.shape[1])


# Calls with forward_only in which gradients are enabled: Megatron's schedule disables none --------


def auto():
    return schedule_with(looks_first=True, mode="auto", min_speedup=0.01)


class Attached(Contract):
    """A trainer that keeps losses with their graph, and notes whether gradients are enabled."""

    def loss_func(self, batch):
        stock = super().loss_func(batch)

        def loss_func(output):
            loss, num_tokens, logs = stock(output)
            return loss, num_tokens, logs | {"graph": loss, "enabled": torch.is_grad_enabled()}

        return loss_func


def results(schedule, model):
    return steps.call(schedule, Attached().step, model, items(), forward_only=True)


def test_results_that_keep_their_graph_are_the_stock_schedules():
    schedule, model, twin = auto(), small_model(wrap_ddp=False), small_model(wrap_ddp=False)
    for one, chunk in ((schedule, model), (stock_schedule(), twin)):
        for _ in range(2):
            chunk.zero_grad(set_to_none=True)
            torch.stack([log["graph"] for log in results(one, chunk)]).sum().backward()
    assert schedule.report.decision.reason.startswith(FORWARD_GRAPH.name)
    expected = steps.gradients(twin)
    assert all(torch.equal(one, expected[name]) for name, one in steps.gradients(model).items())


def test_their_backward_is_refused_where_they_are_shared():
    model = small_model(wrap_ddp=False)
    logs = results(schedule_with(), model)
    assert all(log["enabled"] and log["graph"].requires_grad for log in logs)
    with pytest.raises(CannotShare, match=FORWARD_GRAPH.name):
        logs[0]["graph"].backward()
    with torch.no_grad():
        logs = results(schedule_with(), model)
    assert not any(log["enabled"] or log["graph"].requires_grad for log in logs)


def test_results_of_frozen_weights_have_no_graph():
    model = small_model(wrap_ddp=False).requires_grad_(False)
    for schedule in (stock_schedule(), schedule_with()):
        assert not any(log["graph"].requires_grad for log in results(schedule, model))
