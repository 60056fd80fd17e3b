"""What memory and cost models, and a step that may be made again, are told of a model."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_prefix.device.modules import modules_of
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.predict.execution import Execution
from megatron_prefix.lab.predict.model import footprint_of
from megatron_prefix.lab.predict.peak_memory import predict_memory
from megatron_prefix.layers.model import cost_of
from megatron_prefix.megatron.features import pattern_of
from megatron_prefix.plan.joint_forest import joint_forest
from megatron_prefix.plan.planner import best_plan
from megatron_prefix.run.execute.memory_control import longest_segments
from megatron_prefix.tree import TreeOptions, build
from tests.harness import steps
from tests.harness.one_rank import small_model
from tests.harness.trees import flat_rollouts
from tests.lab.predict.test_peak_memory import VOCAB

pytestmark = pytest.mark.usefixtures("on_one_rank")


def groups(num):
    """Groups of four rollouts, many of them in a segment."""
    rollouts, owners = flat_rollouts(119, 100, 4, num)
    options = TreeOptions(min_gain=0, segment_tokens=4096)
    return build(rollouts, owners, options, list(range(len(rollouts))))


@pytest.mark.parametrize("place", [0, 1])
def test_parallel_pipelines_are_predicted_with_all_spans(place):
    """Recurrent layers keep a state a span: of as many as the rank with most has."""
    forests = [groups(30), groups(24)]
    microbatches = [list(range(len(forest.num_positions))) for forest in forests]
    joint = joint_forest(forests, microbatches, place)
    longest = longest_segments(joint)
    assert [(segment.padded_length, len(segment.spans)) for segment in longest] == [*joint.most]
    assert max(spans for _, spans in joint.most) > 20
    footprint = footprint_of(resolve("qwen3-next-80b-a3b"), Execution())
    mine = joint.forest
    plan = best_plan(
        mine, microbatches=tuple(range(len(mine.num_positions))), num_ranks=1, num_chunks=1,
        run_ahead=None, group_size=None,
    )  # fmt: skip
    bound, real = (
        predict_memory(replace(plan, segments=segments), footprint)[0]
        for segments in (longest, mine.segments)
    )
    assert bound.peak >= real.peak and bound.cache_peak >= real.cache_peak


def test_full_recomputation_holds_the_largest_layer():
    """Of a pattern, whose layers are unlike; their mean would be less."""
    spec = resolve("tiny-nemotron-h", ffn_hidden_size=4096)
    ways = Execution(), Execution(recompute="full")
    none, full = (footprint_of(spec, how) for how in ways)
    assert full.again + full.inner > 2 * none.wave
    plain = resolve("tiny-llama")
    none, full = (footprint_of(plain, how) for how in ways)
    assert full.again + full.inner == pytest.approx(none.wave)


def test_every_stage_knows_all_layers():
    """0.16's ratios: the decoder of a stage names its own layers only."""
    for own in ("MM", "M*"):
        stage = SimpleNamespace(
            hybrid_override_pattern=None, hybrid_attention_ratio=0.25, hybrid_mlp_ratio=0.25,
            config=SimpleNamespace(num_layers=8), decoder=SimpleNamespace(layer_type_list=own),
        )  # fmt: skip
        found = pattern_of(stage)
        assert len(found) == 8 and found.count("*") == 2 and found.count("-") == 2
    given = SimpleNamespace(hybrid_override_pattern="M*|M-/MM", hybrid_attention_ratio=0.0)
    assert pattern_of(given) == "M*M-/MM"
    assert pattern_of(SimpleNamespace(decoder=SimpleNamespace())) == ""


def test_no_module_is_passed_over_when_a_step_begins():
    """Neither one that several hold, nor one whose length is 0."""

    class Empty(torch.nn.Linear):
        def __len__(self):
            return 0

    shared = torch.nn.Linear(1, 1)
    model = torch.nn.Sequential(Empty(2, 2), shared, torch.nn.Sequential(shared))
    model.register_module("none", None)
    found = list(modules_of(model))
    assert len(found) == len({*map(id, found)}) and {*found} == {*model.modules()}


def flops(spec, length):
    """Of one forward, as torch counts the products of matrices."""
    model = unwrap(small_model(vocab=VOCAB, spec=spec, wrap_ddp=False, dtype=torch.float32))
    [item] = steps.group(1, 1)
    tokens = item["tokens"].repeat(1, -(-length // item["tokens"].shape[1]))[:, :length]
    places = torch.arange(length)[None]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(tokens, places, None, labels=tokens, loss_mask=torch.ones_like(tokens))
    return int(counter.get_total_flops())


def test_flops_of_the_layer_its_projection_and_its_output():
    length = 16
    both = [flops({"mtp_num_layers": num}, length) for num in (None, 1)]
    specs = [resolve("tiny-llama", num_layers=2, mtp_num_layers=num) for num in (None, 1)]
    padded = unwrap(small_model(vocab=VOCAB)).output_layer.weight.shape[0]
    without, with_it = (cost_of(spec, padded).forward for spec in specs)
    more = [a - b for a, b in zip(with_it, without, strict=True)]
    # Megatron's local attention computes all pairs.
    assert both[1] - both[0] == length * (more[0] + more[1]) + length**2 * more[2]
    assert with_it.scored == 2 * without.scored
    assert all(number > 0 for number in more[:3])


def test_the_layer_is_on_the_last_stage():
    spec = resolve("llama3-8b", mtp_num_layers=1)
    plain = replace(spec, mtp_num_layers=None)
    form = Execution(num_stages=4)
    found, before = footprint_of(spec, form), footprint_of(plain, form)
    assert [len(stage) for stage in found.payloads] == [8, 8, 8, 9]
    assert [len(stage) for stage in before.payloads] == [8] * 4
    for policy in ("retain", "offload", "recompute"):
        for inner in (True, False):
            ends = (policy, inner, 0.5)
            assert found.kept(*ends, True, False) == before.kept(*ends, True, False)
            more = found.kept(*ends, False, True) - before.kept(*ends, False, True)
            assert (more > 0) == (policy != "recompute")
    assert found.kept("retain", True, 0.0, False, True) > before.kept(
        "retain", True, 0.0, False, True
    )
