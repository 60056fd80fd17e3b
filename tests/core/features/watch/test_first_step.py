"""What the first step of a kind tells, and leaves alone; rows of odd trainers:
tests/test_cases_of_trainers.py."""

import contextlib
import sys
from functools import partial
from types import ModuleType

import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func as stock_schedule
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_prefix.errors import CannotShare
from megatron_prefix.features.watch.traces import CallGraph, next_number
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.refusals import table
from megatron_prefix.run.calls import Callbacks
from tests.harness import one_group, steps
from tests.harness.one_rank import small_model
from tests.harness.steps import Contract, assert_bitwise

pytestmark = pytest.mark.usefixtures("on_one_rank")


class Trainer:
    """Its forward step and loss keep what they share in attributes."""

    last, log = 0.0, ()

    def step(self, iterator, model):
        batch = next(iterator)
        output = model(
            batch["tokens"], batch["position_ids"], None, labels=batch["labels"],
            loss_mask=batch["loss_mask"],
        )  # fmt: skip
        return output, partial(self.loss, batch)

    def loss(self, batch, output):
        return Contract().loss_func(batch)(output)


def watching(mode="auto"):
    return one_group.schedule_with(looks_first=True, mode=mode, min_speedup=0.01)


def two_steps(schedule, trainer):
    model = small_model()
    return [one_group.run(schedule, model, trainer) for _ in range(2)]


def test_mode_auto_gives_untried_fp8_to_the_stock_schedule(monkeypatch):
    monkeypatch.setattr("megatron_prefix.run.route.is_untried", lambda config: True)
    schedule, wanted = watching(), two_steps(stock_schedule(), Trainer())
    for mine, its in zip(two_steps(schedule, Trainer()), wanted, strict=True):
        assert_bitwise(mine, its)
    assert schedule.report.decision.reason.endswith(table.FP8_UNTRIED.fix)


@pytest.mark.parametrize(("mode", "line"), [
    ("on", "prefix sharing is on: rank 0 computes {:,} of {:,} tokens ({:.1f}x predicted)"),
    (
        "observe",
        "prefix sharing is observed: rank 0 would compute {:,} of {:,} tokens ({:.1f}x"
        " predicted)",
    ),
])  # fmt: skip
def test_what_is_shared_is_logged_once(mode, line, caplog):
    schedule = watching(mode)
    two_steps(schedule, Trainer())
    forest = schedule.report.forest
    assert 0 < forest.executed_tokens < forest.raw_tokens
    predicted = schedule.report.decision.predicted_speedup
    expected = line.format(forest.executed_tokens, forest.raw_tokens, predicted)
    assert [text for text in caplog.messages if "prefix sharing is" in text] == [expected]


class OwnInfo(Trainer):
    """Its loss sets a number for itself; its forward step has the name for another, and not now."""

    def __init__(self):
        self.info = {}

    def step(self, iterator, model):
        batch = next(iterator)
        if self.last:
            batch = {**batch, "scale": batch["batch_num_tokens"]}
        return super().step(iter([batch]), model)

    def loss(self, batch, output):
        self.info["batch_num_tokens"] = batch["tokens"].numel()
        return super().loss(batch, output)


@pytest.mark.parametrize("version", ["", "0.9.1", "0.9.2"])
def test_what_verls_losses_set_for_themselves_is_in_nobodys_way(monkeypatch, version):
    """Of versions that were tried; elsewhere a name that both have may be read."""
    if version:
        monkeypatch.setitem(sys.modules, "verl", ModuleType("verl"))
        monkeypatch.setattr(sys.modules["verl"], "__version__", version, raising=False)
    schedule = watching()
    two_steps(schedule, OwnInfo())
    decision = schedule.report.decision
    assert decision.share == (version == "0.9.1")
    assert decision.share or decision.reason.endswith(table.LOSS_LEAVES.fix)


class Touchy(Trainer):
    """What looking must not touch: a property that raises, and a tensor without strides."""

    def __init__(self):
        self.sparse = torch.eye(3).to_sparse()

    @property
    def world(self):
        raise RuntimeError("not before the job has begun")

    def loss(self, batch, output):
        return (self.world, self.sparse) if self.log else super().loss(batch, output)


def test_looking_ends_no_step():
    schedule = watching()
    first, _ = two_steps(schedule, Touchy())
    assert_bitwise(first, two_steps(stock_schedule(), Touchy())[0])
    assert schedule.report.decision.share


class Unmasked(Trainer):
    """A loss that looks at positions that the call's loss_mask leaves out."""

    def loss(self, batch, output):
        return super().loss({**batch, "loss_mask": torch.ones_like(batch["loss_mask"])}, output)


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_a_mask_over_tokens_leaves_out_no_position(mode):
    """ROLL's: its losses have masks of their own, over the positions that predict these tokens."""
    schedule = watching(mode)
    schedule.callbacks = Callbacks(masks_tokens=True)
    *_, (_, found) = two_steps(schedule, Unmasked())
    *_, (_, wanted) = two_steps(stock_schedule(), Unmasked())
    assert schedule.report.decision.share
    steps.assert_gradients(found, wanted, 1000)


class Slots(Trainer):
    """Its forward step sets something of the model, before its call or by another call."""

    def __init__(self, beside):
        self.beside = beside

    def step(self, iterator, model):
        batch = next(iterator)
        if not self.beside:
            unwrap(model).slot = int(batch["uid"])
        else:
            with torch.no_grad():
                model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        return super().step(iter([batch]), model)


@pytest.mark.parametrize("beside", [True, False])
def test_what_a_call_beside_sets_is_no_forward_steps(beside):
    model, schedule = small_model(), watching()
    layer = unwrap(model).decoder.layers[0]
    layer.register_forward_pre_hook(
        lambda *_: setattr(layer, "seen", vars(layer).get("seen", 0) + 1)
    )
    one_group.run(schedule, model, Slots(beside))
    assert schedule.report.decision.reason.endswith(table.SWITCHED.fix) is not beside


# Whether a loss reads what a model has computed inside --------------------------------------------


class Model(nn.Module):
    """Two layers; `inside` is what a hook on the first one keeps."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)
        self.inside = torch.zeros(())

    def forward(self, x):
        self.inside = self.first(x)
        return self.second(self.inside.tanh())


def reads_inside(loss, forward=Model.forward):
    model, x = Model(), torch.ones(4, 3)
    begin, output = next_number(), forward(model, x)
    graph = CallGraph.of(begin, output)
    return graph.is_read_inside(loss(model, output))


OUTPUT_ONLY = {
    "sum": lambda model, output: output.sum(),
    "cast by a wrapper": lambda model, output: output.double().sum(),
    "written in place": lambda model, output: output.div_(2.0).exp().sum(),
    "two views": lambda model, output: (output[:2].t() @ output[2:]).sum(),
    "a norm of weights": lambda model, output: output.sum() + model.first.weight.norm(),
    "detached": lambda model, output: output.sum() + model.inside.detach().sum(),
    "no graph": lambda model, output: torch.zeros(()),
}
INSIDE = {
    "alone": lambda model, output: model.inside.sum(),
    "beside the output": lambda model, output: output.sum() + 1e-6 * model.inside.pow(2).mean(),
    "as a factor": lambda model, output: (output * model.inside[:, :2]).sum(),
}


@pytest.mark.parametrize("name", [*OUTPUT_ONLY, *INSIDE])
def test_the_output_may_be_read_and_what_is_inside_is_noticed(name):
    assert reads_inside((OUTPUT_ONLY | INSIDE)[name]) == (name in INSIDE)


def test_outputs_may_be_trees_and_recomputed():
    def tree(model, x):
        return {"logits": checkpoint(model.forward, x, use_reentrant=False), "name": "x"}

    assert not reads_inside(lambda model, output: output["logits"].sum(), tree)
    assert reads_inside(lambda model, output: output["logits"].sum() + model.inside.sum(), tree)


@pytest.mark.parametrize("shape", [(4, 1), (1, 4)])
def test_a_view_that_is_returned_may_be_written(shape):
    """Megatron's logits of one sample are a transposed view, and verl divides them in place."""

    def viewed(model, x):
        return model.forward(x).unflatten(0, shape).transpose(0, 1).contiguous()

    def divided(model, output):
        return output.div_(0.9).logsumexp(-1).sum()

    assert not reads_inside(divided, viewed)
    assert reads_inside(lambda model, output: divided(model, output) + model.inside.sum(), viewed)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_read(context):
    with context():
        assert not reads_inside(INSIDE["alone"])


def test_what_was_computed_before_or_after_is_the_trainers():
    before = torch.ones(4, 2, requires_grad=True).exp()
    assert not reads_inside(lambda model, output: (output * before).sum())
    assert not reads_inside(lambda model, output: output.sum() + model.second.weight.exp().sum())


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_a_scale_of_losses_that_is_written_in_place_is_seen(mode):
    model, schedule, factor = small_model(), watching(mode), torch.ones(())

    class Scales(Trainer):
        def step(self, iterator, model):
            batch = next(iterator)
            factor.fill_(1 + batch["uid"] % 3)
            return super().step(iter([batch]), model)

    unwrap(model).config.grad_scale_func = lambda loss: loss * factor
    refused = pytest.raises(CannotShare, match="factor of microbatch 0 is overwritten")
    with refused if mode == "on" else contextlib.nullcontext():
        two = [one_group.run(schedule, model, Scales()) for _ in range(2)]
        assert len(two) == 2 and not schedule.report.decision.share
