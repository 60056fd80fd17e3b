"""`train`, `align` and `bench` with --load-hf: the checkpoint's weights are those that run."""

import json
import math
import re
from typing import NamedTuple
from unittest import mock

import pytest
import torch

from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.data.rollouts import write_rollouts
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.models.hf_weights import HFWeights
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.models.weights import VOCAB_MULTIPLE
from megatron_prefix.lab.rl.job import ModelOptions
from megatron_prefix.lab.runtime import Layout
from tests.harness import hf_checkpoints
from tests.harness.command_line import captured
from tests.harness.one_rank import one_rank
from tests.harness.ranks import run_ranks


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    """Two groups of three rollouts with a prompt of 40 of the checkpoint's tokens."""
    path = tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl"
    write_rollouts(path, generate(2, 40, 16, 3, vocab_size=VOCAB_MULTIPLE))
    return str(path)


def save(folder, family, **options):
    """A checkpoint whose vocabulary needs no padding, which would be warned of."""
    with mock.patch.dict(hf_checkpoints.COMMON, vocab_size=VOCAB_MULTIPLE):
        hf_checkpoints.make(folder, family, **options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for family in ("qwen3", "moe"):
        made[family] = tmp_path_factory.mktemp(family)
        save(made[family], family)
    return made


class Told(NamedTuple):
    """What a command line said on one rank, and how many chunks got a checkpoint's weights."""

    code: int
    out: str
    err: str
    num_filled: int

    @property
    def result(self):
        assert self.code == 0, self.err
        return json.loads(self.out)


def told(*arguments, num_ranks=1):
    """A command line in processes of its own, as torchrun starts them; the first rank's answer."""

    def on_rank():
        fill = mock.patch.object(HFWeights, "fill", autospec=True, side_effect=HFWeights.fill)
        with fill as spy:
            said = captured(*arguments, "--json")
        return Told(*said, spy.call_count)

    return run_ranks(num_ranks, on_rank)[0]


@pytest.mark.parametrize(
    ("family", "layout"), [("qwen3", "--tp=2 --pp=2"), ("moe", "--ep=2 --dp=2")]
)
def test_align_in_fp32(folders, rollouts, family, layout):
    options = ("--rollouts", rollouts, "--load-hf", str(folders[family]), "--dtype", "float32")
    num_ranks = math.prod(int(size) for size in re.findall(r"--(?:tp|pp|dp)=(.)", layout))
    answer = told("align", *options, "--min-gain", "8", *layout.split(), num_ranks=num_ranks)
    assert answer.result["passed"] and answer.num_filled == 1


def test_the_16_bit_reference_has_the_rounded_weights(folders):
    folder = str(folders["qwen3"])
    with one_rank():
        spec = resolve(folder)
        options = ModelOptions(folder, "bfloat16", load_hf=folder)
        chunks = options.build(spec, Layout())
        [exact] = options.reference(spec, Layout(), chunks)()
        ours, theirs = (dict(unwrap(one).named_parameters()) for one in (exact, chunks[0]))
        assert all(torch.equal(ours[name], theirs[name].float()) for name in theirs)


def test_train_compares_and_resumes_with_the_same_weights_alone(folders, rollouts, tmp_path):
    folder = folders["qwen3"]
    options = ["train", rollouts, "--load-hf", str(folder), "--output", str(tmp_path / "run")]
    options += ["--compare", "--save-every", "1", "--min-gain", "8", "--kl-coeff", "0.1"]
    answer = told(*options, "--steps", "1")
    assert answer.result["passed"]
    assert answer.num_filled == 2  # the actor and the reference
    assert told(*options, "--steps", "2", "--resume").result["last_step"] == 2
    other = tmp_path / folder.name
    save(other, "qwen3", seed=6)
    options[3] = str(other)
    refused = told(*options, "--steps", "3", "--resume")
    assert refused.code == 2 and "was made with another model (hf_weights" in refused.err
