"""Hugging Face weights in Megatron's models: transformers' logits, in every layout."""

from functools import partial
from typing import NamedTuple
from unittest import mock

import pytest
import torch

from megatron_prefix.device.tolerance import relative_error
from megatron_prefix.lab import runtime
from megatron_prefix.lab.models import hf, weights
from megatron_prefix.lab.models.build import build_model, unwrap
from megatron_prefix.lab.models.shards import Shards
from megatron_prefix.lab.runtime import Layout
from tests.harness import hf_checkpoints, steps
from tests.harness.hf_checkpoints import FAMILIES, LENGTH, VOCAB
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
