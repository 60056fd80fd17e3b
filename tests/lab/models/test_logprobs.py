"""Log-probabilities over a split vocabulary, against torch's on the whole one."""

import pytest
import torch

from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.logprobs import vocab_parallel_log_probs
from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.lab.runtime import Layout
from tests.harness.ranks import run_ranks

S, B, V = 7, 3, 24


def draw(dtype=torch.float64, scale=3.0):
    """logits [s, b, V], labels [b, s], and a gradient [b, s]."""
    generator = torch.Generator().manual_seed(5)
    logits = scale * torch.randn(S, B, V, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, V, (B, S), generator=generator)
    grad = torch.randn(B, S, generator=generator, dtype=torch.float64)
    return logits.to(dtype), labels, grad


def both(logits, labels, grad):
    """Ours, and [b, s] in float64 by torch, each with the gradient of the logits."""

    def plain(leaf):
        return leaf.double().log_softmax(-1).gather(-1, labels.t()[..., None])[..., 0].t()

    results = []
    for fn in (lambda leaf: vocab_parallel_log_probs(leaf, labels, None), plain):
        leaf = logits.clone().requires_grad_()
        out = fn(leaf)
        out.backward(grad.to(out.dtype))
        results.append((out.detach(), leaf.grad))
    return results


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float64, 0.1), (torch.float32, 50.0), (torch.bfloat16, 3.0)]
)
def test_equal_to_log_softmax(dtype, scale):
    logits, labels, grad = draw(dtype, scale)
    (out, d_logits), (expected, d_expected) = both(logits, labels, grad)
    assert out.shape == (B, S)
    assert out.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert d_logits.dtype == dtype
    assert_close(out, expected, V, out.dtype, "log-probs")
    assert_close(d_logits, d_expected, V, dtype, "gradient")


def test_a_certain_token_keeps_its_gradient_in_bfloat16():
    """At p = 1 - 6e-5 the gradient is 6e-5; 1 - p in bfloat16 would be 0 or 0.004."""
    logits = torch.zeros(1, 1, 2, dtype=torch.bfloat16)
    logits[..., 0] = 9.75
    logits.requires_grad_()
    vocab_parallel_log_probs(logits, torch.zeros(1, 1, dtype=torch.long)).sum().backward()
    p_other = 1 / (1 + torch.tensor(9.75, dtype=torch.float64).exp())
    expected = torch.stack([p_other, -p_other])
    assert_close(logits.grad.flatten(), expected, 2, torch.bfloat16)


def split(tp):
    """On each rank: log-probs and this rank's part of the gradient."""
    runtime.initialize(Layout(tp=tp))
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    logits, labels, grad = draw()
    part = logits.chunk(tp, -1)[group.rank()].clone().requires_grad_()
    out = vocab_parallel_log_probs(part, labels, group)
    out.backward(grad)
    return out.detach(), part.grad


def test_a_split_vocabulary_gives_what_the_whole_does():
    tp = 2
    (whole, d_whole), _ = both(*draw())
    results = run_ranks(tp, split, tp)
    for out, _ in results:
        assert_close(out, whole, V)
    assert_close(torch.cat([part for _, part in results], -1), d_whole, V)
