"""Core attention of local layers: other ways to the same numbers."""

import pytest
import torch

from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.numerics import assert_close
from tests.harness.one_rank import one_rank

VOCAB, LENGTHS = 64, (11, 17, 4)
TERMS = 64
"""The largest number of terms of any sum: the width; samples have fewer positions."""
NAMES = ["tiny-qwen3", "tiny-deepseek", "tiny-gpt-oss"]


@pytest.fixture(scope="module", autouse=True)
def world():
    with one_rank():
        yield


def model(name, **options):
    # An auxiliary loss sees a pack's samples together.
    spec = resolve(name, moe_aux_loss_coeff=0.0).with_vocab(VOCAB)
    [chunk] = build_model(spec, dtype="float64", wrap_ddp=False, **options)
    return chunk


def samples():
    """[1, length] each."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCAB, (1, length), generator=generator) for length in LENGTHS]


def outputs(chunk, tokens, positions, **packed):
    """Logits [1, length, VOCAB], and the gradients of their squares' sum."""
    chunk.zero_grad(set_to_none=True)
    logits = chunk(tokens, positions, None, **packed)
    logits.square().sum().backward()
    return logits.detach(), {name: one.grad.clone() for name, one in chunk.named_parameters()}


def summed(found):
    return {name: sum(grads[name] for grads in found) for name in found[0]}


@pytest.mark.parametrize("name", NAMES)
def test_a_pack_is_its_samples(name):
    """Also where keys and values differ in width, and in windows with sinks."""
    from megatron.core.packed_seq_params import PackedSeqParams

    chunk, rows = model(name), samples()
    alone = [outputs(chunk, row, torch.arange(row.shape[1])[None]) for row in rows]
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=max(LENGTHS),
        max_seqlen_kv=max(LENGTHS),
    )  # fmt: skip
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    logits, grads = outputs(chunk, torch.cat(rows, 1), positions, packed_seq_params=packed)
    assert_close(logits, torch.cat([one for one, _ in alone], 1), TERMS, what="logits")
    for parameter, wanted in summed([grads for _, grads in alone]).items():
        assert_close(grads[parameter], wanted, TERMS, what=parameter)


@pytest.mark.parametrize("name", NAMES[:2])
def test_torchs_attention_is_megatrons(name):
    row = samples()[1]
    positions = torch.arange(row.shape[1])[None]
    (logits, grads), (others, more) = (
        outputs(model(name, sdpa=sdpa), row, positions) for sdpa in (False, True)
    )
    assert_close(others, logits, TERMS, what="logits")
    for parameter, wanted in grads.items():
        assert_close(more[parameter], wanted, TERMS, what=parameter)
