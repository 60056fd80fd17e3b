"""What memory and cost models, and a step that may be made again, are told of a model."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_prefix.device.modules import modules_of
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.predict.execution import Execution
from megatron_prefix.lab.predict.model import footprint_of
from megatron_prefix.lab.predict.peak_memory import predict_memory
from megatron_prefix.megatron.features import pattern_of
from megatron_prefix.plan.joint_forest import joint_forest
from megatron_prefix.plan.planner import best_plan
from megatron_prefix.run.execute.memory_control import longest_segments
from megatron_prefix.tree import Pairs, TreeOptions, build


def groups(num, seed):
    """Groups of four rollouts, many of them in a segment."""
    draw = np.random.default_rng(seed)
    samples, owners = [], []
    for group in range(num):
        prompt = draw.integers(0, 1000, 120)
        for _ in range(4):
            tokens = np.concatenate([prompt, draw.integers(0, 1000, 100)])
            trained = np.arange(len(tokens) - 1) >= 119
            samples.append(Pairs(tokens[:-1], tokens[1:], trained))
            owners.append(group)
    options = TreeOptions(min_gain=0, segment_tokens=4096)
    return build(samples, owners, options, list(range(len(samples))))


@pytest.mark.parametrize("place", [0, 1])
def test_parallel_pipelines_are_predicted_with_all_spans(place):
    """Recurrent layers keep a state a span: of as many as the rank with most has."""
    forests = [groups(30, 0), groups(24, 1)]
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
    assert pattern_of(given) == "M*M-"
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
