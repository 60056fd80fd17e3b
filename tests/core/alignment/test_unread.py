"""Outputs that no loss looks at are not computed, and everything else is as if they were."""

import contextlib
from collections import Counter

import numpy as np
import pytest

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.megatron.install import install
from tests.harness import steps
from tests.harness.one_rank import one_rank, small_model

CONFIG = PrefixConfig(min_gain=0, kernel="math", mode="on")


@pytest.fixture
def rank():
    with one_rank():
        yield


def items():
    """Groups that begin to train inside of a shared prompt, and a rollout that shares nothing."""
    found = [*steps.group(0, 3), *steps.group(1, 1), *steps.group(2, 2)]
    for item in found[::2]:
        item["loss_mask"][:, 13:15] = 0.0  # as an answer of a tool in the middle of a response
    found[1]["loss_mask"][:, 5] = 1.0  # of a prompt that the others share and do not train
    return [{**item, "uid": uid} for uid, item in enumerate(found)]


@contextlib.contextmanager
def counted(model):
    """Counts the positions that go through the MLPs' first products and the output layer."""
    seen: Counter[str] = Counter()
    inner, undo = unwrap(model), []
    modules = {f"mlp {i}": layer.mlp for i, layer in enumerate(inner.decoder.layers)}
    modules = {name: getattr(mlp, "linear_fc1", mlp) for name, mlp in modules.items()}
    for name, module in [*modules.items(), ("output", inner.output_layer)]:

        def hook(_, args, __, name=name):
            seen[name] += args[0].shape[0] * args[0].shape[1]

        undo.append(module.register_forward_hook(hook).remove)
    try:
        yield seen
    finally:
        for one in undo:
            one()


def num_read(forest):
    """Positions that carry loss in any rollout, at least two a segment with loss."""
    trained = [pairs.trained for item in items() for pairs in steps.pairs_of(item)]
    found = 0
    for segment in forest.segments:
        read = sum(
            int(np.any([trained[one][span.start : span.end] for one in span.rollouts], 0).sum())
            for span in segment.spans
        )
        found += min(max(read, 2), segment.padded_length) if segment.scored else 0
    return found


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize(
    ("contract", "options", "recompute"),
    [(steps.Contract(), {}, "none"), (steps.Contract(logits=True), {}, "full"),
     (steps.Contract(logits=True), {"segment_tokens": 8, "chunk_tokens": 4}, "none"),
     (steps.Contract(), {"memory": "recompute"}, "full")],
)  # fmt: skip
def test_only_what_is_read_is_computed(contract, options, recompute):
    model = small_model(recompute=recompute, wrap_ddp=False)
    expected = steps.plain(model, contract, items())
    schedule = PrefixSchedule(PrefixConfig(**{**vars(CONFIG), **options}))
    with counted(model) as seen:
        found = steps.run(schedule, contract.step, model, items()).gradients
    forest = schedule.report.forest
    steps.assert_gradients(found, expected, forest.raw_tokens)
    times = 2 if recompute == "full" else 1
    assert num_read(forest) < 0.8 * forest.executed_tokens
    if "memory" not in options:
        assert seen["mlp 0"] == times * forest.executed_tokens
        assert seen["mlp 1"] == times * num_read(forest)
        assert seen["output"] == num_read(forest)


@pytest.mark.usefixtures("rank")
def test_routers_see_all_positions():
    """Their losses count positions of the last layer, too; the output layer runs on fewer."""
    model = small_model("tiny-moe", wrap_ddp=False)
    schedule = PrefixSchedule(CONFIG)
    with counted(model) as seen:
        steps.run(schedule, steps.Contract().step, model, items())
    forest = schedule.report.forest
    assert seen["mlp 1"] == seen["mlp 0"] == forest.executed_tokens
    assert seen["output"] == num_read(forest)


@pytest.mark.usefixtures("rank")
def test_a_layer_with_a_forward_of_its_own_runs_to_its_end():
    """It may add up other streams than Megatron's (hyper-connections)."""
    for own in ({}, {"forward": lambda self, *given: given}):
        model = small_model(wrap_ddp=False)
        layer = unwrap(model).decoder.layers[-1]
        layer.__class__ = type("Own", (type(layer),), own)
        assert install(model).keys_only == (None if own else 1)
