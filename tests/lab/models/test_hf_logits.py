"""Hugging Face weights in Megatron's models: transformers' logits, in every layout; and in `train`,
`align` and `bench` with --load-hf."""

import json
import math
import re
from functools import partial
from typing import NamedTuple
from unittest import mock

import pytest
import torch

from megatron_prefix.device.tolerance import relative_error
from megatron_prefix.lab import runtime
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.data.rollouts import write_rollouts
from megatron_prefix.lab.models import hf, weights
from megatron_prefix.lab.models.build import build_model, unwrap
from megatron_prefix.lab.models.hf_weights import HFWeights
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.models.shards import Shards
from megatron_prefix.lab.models.weights import VOCAB_MULTIPLE
from megatron_prefix.lab.rl.job import ModelOptions
from megatron_prefix.lab.runtime import Layout
from tests.harness import hf_checkpoints, steps
from tests.harness.command_line import captured
from tests.harness.hf_checkpoints import FAMILIES, LENGTH, VOCAB
from tests.harness.one_rank import one_rank
from tests.harness.ranks import run_ranks

LIMIT = 1e-5
"""In float32, absolute, of logits whose standard deviation is about 1."""
TP_PP = Layout(tp=2, pp=2)
TP_PP_EP = Layout(tp=2, pp=2, dp=2, ep=2, sequence_parallel=True)


class Part(NamedTuple):
    """What one rank has computed: [2, LENGTH, V / tp] on a last stage, else None."""

    tp_rank: int
    logits: torch.Tensor | None


def logits(chunks):
    """Of Megatron's own schedule, without labels."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(iterator, model):
        output = model(next(iterator)["tokens"], torch.arange(LENGTH)[None], None)
        return output, lambda found, non_loss_data: found

    items = [{"tokens": row} for row in hf_checkpoints.tokens().split(1)]
    options = {"forward_only": True, "collect_non_loss_data": True}
    with torch.no_grad():
        found = steps.call(get_forward_backward_func(), forward_step, chunks, items, **options)
    return torch.cat(found) if found else None


def on_rank(folder, layout):
    from megatron.core import parallel_state

    runtime.initialize(layout)
    chunks = build_model(hf.load(folder), layout=layout, load_hf=str(folder), wrap_ddp=False)
    return Part(parallel_state.get_tensor_model_parallel_rank(), logits(chunks))


LAYOUTS = [
    *((family, Layout()) for family in FAMILIES), ("qwen3-tied", TP_PP), ("moe", TP_PP_EP),
    ("moonlight", Layout(tp=2, sequence_parallel=True)),
]  # fmt: skip
"""Of other families each rank's weights are those of one rank, whose logits are held here."""


@pytest.mark.parametrize(("family", "layout"), LAYOUTS)
def test_logits_are_those_of_transformers(tmp_path, family, layout):
    expected = hf_checkpoints.logits_of(hf_checkpoints.make(tmp_path, family))
    assert 0.5 < expected.std() < 5
    parts = run_ranks(layout.world_size, partial(on_rank, tmp_path, layout))
    last = [part for part in parts if part.logits is not None]
    assert len(last) == layout.world_size // layout.pp
    for first in range(0, len(last), layout.tp):
        group = last[first : first + layout.tp]
        assert [part.tp_rank for part in group] == [*range(layout.tp)]
        found = torch.cat([part.logits for part in group], -1)
        assert not found[..., VOCAB:].any()  # the padding
        error = (found[..., :VOCAB] - expected).abs().max()
        assert error <= LIMIT, (
            f"{error:.2e}, relative {relative_error(found[..., :VOCAB], expected)}"
        )


class Held(NamedTuple):
    """A rank's parameters and biases of experts, each with the dimension that tensor parallelism
    cuts (-1: none), and how many elements were read from files."""

    tp_rank: int
    parameters: dict[str, tuple[int, torch.Tensor]]
    num_read: int


def held(folder, layout):
    from megatron.core import parallel_state

    runtime.initialize(layout)
    read, sizes = Shards.read, []

    def count(*args):
        sizes.append((found := read(*args)).numel())
        return found

    with mock.patch.object(Shards, "read", count):
        chunks = build_model(hf.load(folder), layout=layout, load_hf=str(folder))
    found = {}
    for model in map(unwrap, chunks):
        own = model.named_parameters()
        tensors = [(weights.global_name(model, name), one) for name, one in own]
        for name, one in [*tensors, *weights.expert_biases(model)]:
            dim, _, size = weights.tensor_split(model, name, one)
            found[name] = (dim if size > 1 else -1, one.detach().clone())
    return Held(parallel_state.get_tensor_model_parallel_rank(), found, sum(sizes))


@pytest.mark.parametrize(("family", "layout"), [
    ("qwen2", Layout(tp=2, cp=2)), ("qwen3-tied", Layout(pp=2, vpp=2)), ("qwen3-next", TP_PP_EP),
    ("gpt-oss", Layout(dp=2, ep=2)),
    ("nemotron-h-moe", Layout(tp=2, ep=2, dp=2, sequence_parallel=True)),
])  # fmt: skip
def test_every_rank_reads_its_part_of_the_whole_and_no_more(tmp_path, family, layout):
    hf_checkpoints.make(tmp_path, family)
    spec = hf.load(tmp_path)
    [(_, whole, _)] = run_ranks(1, partial(held, tmp_path, Layout()))
    seen = set()
    for tp_rank, found, num_read in run_ranks(layout.world_size, partial(held, tmp_path, layout)):
        num = sum(one.numel() for _, one in found.values())
        assert num - 2 * 64 * (256 - VOCAB) <= num_read <= num  # less the padding of two tables
        for name, (dim, mine) in found.items():
            _, full = whole[name]
            if dim >= 0 and full.shape != mine.shape:
                pieces = weights.pieces_of(spec, name)
                full = weights.local_part(full, dim, tp_rank, layout.tp, pieces)
            assert torch.equal(mine, full), name
            seen.add(name)
    assert seen == set(whole)


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
