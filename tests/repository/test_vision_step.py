"""`benchmarks.vision_step` with a tiny model on the CPU: both schedules agree, and the tower runs
once for each image."""

import json

import pytest

from benchmarks import vision_step
from benchmarks.vision_model import SIZES, Sizes
from megatron_prefix.lab.runtime import Layout
from tests.harness.one_rank import one_rank

TINY = "--device cpu --dtype float64 --model tiny-qwen3 --tower tiny --prompt 160 --answer 16"
TINY += " --image-tokens 12 --rollouts 4 --pack-tokens 400 --warm-up-calls 1 --repeats 1"


def test_both_schedules_agree_and_the_tower_runs_once_an_image(capsys):
    with one_rank():
        found = vision_step.measured(vision_step.parse_arguments(TINY.split()), Layout())
    verdict, row = found["alignment"], found["row"]
    assert verdict["passed"] and verdict["executed_tokens"] < verdict["raw_tokens"]
    # Two groups of four rollouts with two images each; with gradients a second time.
    assert row["images"] == {"stock": 16, "prefix": 2 * 4}
    assert row["shared_steps"] == 1 and row["executed_tokens"] < row["raw_tokens"] / 2
    assert row["of_bound"] == pytest.approx(row["speedup"] / row["bound"])
    assert "aligned: True" in capsys.readouterr().out


def test_several_ranks_agree(tmp_path, capsys):
    found = tmp_path / "found.json"
    options = f"{TINY} --groups 1 --layers 4 --json {found} --tp 2 --sequence-parallel"
    assert vision_step.main(options.split()) == 0, capsys.readouterr()
    result = json.loads(found.read_text("utf-8"))
    assert result["alignment"]["passed"] and result["row"]["images"] == {"stock": 8, "prefix": 4}


def test_the_bound_counts_the_tower_once_an_image():
    given = vision_step.parse_arguments(TINY.split())
    options = vision_step.Options("tiny-qwen3", tower=SIZES["tiny"])
    spec = options.spec().with_vocab(2048)
    groups = vision_step.GroupShape(160, 16, 4).groups(2, 2048, 1)
    whole, twice = vision_step.bounds(options, spec, given, groups)
    heavy = vision_step.Options("tiny-qwen3", tower=SIZES["tiny"]._replace(hidden=1 << 20))
    found = vision_step.bounds(heavy, spec, given, groups)
    assert found == pytest.approx((4, 3), rel=1e-3)  # four rollouts; 3 instead of 3 + 1 forwards
    none = vision_step.Options("tiny-qwen3", tower=Sizes(0, 0, 1, 0, 0, ()))
    text, same = vision_step.bounds(none, spec, given, groups)
    assert text == same and twice < whole and 4 < whole < text


def test_flops_of_a_tower():
    """Two layers, four patches, no deepstack: counted by hand."""
    sizes = Sizes(2, 8, 2, 16, 12, ())
    linear = 4 * 2 * (12 * 8 + 2 * (4 * 8 * 8 + 2 * 8 * 16))
    attention = 2 * 2 * 2 * 4 * 4 * 8
    assert sizes.flops(4, 24) == linear + attention + 2 * (32 * 32 + 32 * 24)


def test_positions_of_a_prompt():
    """Text counts on, an image has rows and columns, and what follows begins behind the larger."""
    given = vision_step.parse_arguments([*TINY.split(), "--images", "1"])
    groups = vision_step.GroupShape(10, 4, 2).groups(1, 64, 1)
    prompts = vision_step.Prompts.of(given, groups, 6)
    assert prompts.grid == (4, 6) and prompts.pixels[groups[0].name].shape == (24, 12)
    positions, images = prompts.positions(13)
    assert images.nonzero()[:, 0].tolist() == [2, 3, 4, 5, 6, 7]
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8, 9],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 9],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 9],
    ]
