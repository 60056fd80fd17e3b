"""`train`, `align` and `bench` with --load-hf: the checkpoint's weights are those that run."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_prefix.models.build import unwrap
from megatron_prefix.models.hf_weights import HFWeights
from megatron_prefix.models.presets import resolve
from megatron_prefix.models.weights import VOCAB_MULTIPLE
from megatron_prefix.rl.job import ModelOptions
from megatron_prefix.runtime import Layout
from tests.harness import hf_checkpoints
from tests.harness.command_line import failure, result, row, run
from tests.harness.one_rank import one_rank
from tests.harness.ranks import run_ranks  # noqa: F401  # applies the CPU platform


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory) -> str:
    """Two groups of three rollouts with a prompt of 40 of the checkpoint's tokens."""
    draw = random.Random(3)
    path = tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl"
    lines = []
    for group in "ab":
        prompt = draw.choices(range(VOCAB_MULTIPLE), k=40)
        for uid in "012":
            tokens = prompt + draw.choices(range(VOCAB_MULTIPLE), k=16)
            fields = dict(prompt_len=40, loss=[[40, 56]], reward=float(uid))
            lines.append(row(group=group, uid=uid, tokens=tokens, **fields))
    path.write_text("".join(lines), encoding="utf-8")
    return str(path)


def save(folder: Path, family: str, **options: Any) -> None:
    """A checkpoint whose vocabulary needs no padding, which would be warned of."""
    with mock.patch.dict(hf_checkpoints.COMMON, vocab_size=VOCAB_MULTIPLE):
        hf_checkpoints.make(folder, family, **options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    made = {}
    for family in ("qwen3", "qwen2-tied", "moe"):
        made[family] = tmp_path_factory.mktemp(family)
        save(made[family], family)
    return made


@pytest.fixture
def fills():
    """Counts the model chunks that get a checkpoint's weights in this process."""
    with mock.patch.object(HFWeights, "fill", autospec=True, side_effect=HFWeights.fill) as spy:
        yield spy


@pytest.mark.parametrize("family", ["qwen3", "qwen2-tied", "moe"])
def test_align_in_fp32(capsys, fills, folders, rollouts, family):
    options = ("--rollouts", rollouts, "--load-hf", str(folders[family]), "--dtype", "float32")
    assert result(capsys, "align", *options, "--min-gain", "8")["passed"]
    assert fills.call_count == 1


def test_align_in_16_bit_against_the_same_weights(capsys, fills, folders, rollouts):
    options = ("--rollouts", rollouts, "--load-hf", str(folders["qwen3"]), "--dtype", "bfloat16")
    told = result(capsys, "align", *options, "--set", "num_layers=2", "--min-gain", "8")
    assert told["passed"] and told["grad_error_ratio_max"] > 0
    assert fills.call_count == 1  # the reference copies them


def test_the_16_bit_reference_has_the_rounded_weights(folders):
    folder = str(folders["qwen3"])
    with one_rank():
        spec = resolve(folder)
        options = ModelOptions(folder, "bfloat16", load_hf=folder)
        chunks = options.build(spec, Layout())
        [exact] = options.reference(spec, Layout(), chunks)()
        ours, theirs = (dict(unwrap(one).named_parameters()) for one in (exact, chunks[0]))
        assert all(torch.equal(ours[name], theirs[name].float()) for name in theirs)


def test_train_compares_and_resumes_with_the_same_weights_alone(
    capsys, fills, folders, rollouts, tmp_path
):
    folder = folders["qwen3"]
    options = ["train", rollouts, "--load-hf", str(folder), "--output", str(tmp_path / "run")]
    options += ["--compare", "--save-every", "1", "--min-gain", "8", "--kl-coeff", "0.1"]
    told = result(capsys, *options, "--steps", "1")
    assert told["passed"]
    assert fills.call_count == 2  # the actor and the reference
    assert result(capsys, *options, "--steps", "2", "--resume")["last_step"] == 2
    other = tmp_path / folder.name
    save(other, "qwen3", seed=6)
    options[3] = str(other)
    assert "hf_weights" in failure(capsys, *options, "--steps", "3", "--resume")


def test_bench_says_which_weights(capsys, fills, folders, rollouts):
    options = ("--rollouts", rollouts, "--groups", "2", "--repeats", "1", "--dtype", "float32")
    code, out, _ = run(capsys, "bench", "--load-hf", str(folders["moe"]), *options, "--json")
    told = json.loads(out)
    assert code == 0
    assert told["weights"] == told["model"] == str(folders["moe"])
    assert told["alignment"]["passed"]
    assert fills.call_count == 2  # of few layers to align, then whole
