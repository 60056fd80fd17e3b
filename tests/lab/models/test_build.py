"""Models from specs, and log-probabilities over a split vocabulary: the same in every layout."""

import dataclasses
import functools
from typing import NamedTuple

import pytest
import torch

from megatron_prefix.errors import UserError
from megatron_prefix.lab import runtime
from megatron_prefix.lab.models import weights
from megatron_prefix.lab.models.build import build_model, build_optimizer, unwrap
from megatron_prefix.lab.models.config import alignment
from megatron_prefix.lab.models.logprobs import vocab_parallel_log_probs
from megatron_prefix.lab.models.presets import ModelSpec, resolve
from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.layers.releases import is_since
from tests.harness import steps
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


LENGTH, NUM_MICROBATCHES, VOCAB = 24, 4, 97


class Step(NamedTuple):
    """What one rank holds after a step, by the name in the whole model: a gradient, the parameter,
    and the dimension along which tensor parallelism has cut both, -1 if none."""

    losses: list[float]
    held: dict[str, tuple[torch.Tensor, torch.Tensor, int]]
    tp_rank: int


def microbatches(layout):
    """This rank's microbatches of tokens [1, LENGTH + 1]; the world has NUM_MICROBATCHES."""
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(11)
    every = torch.randint(0, VOCAB, (NUM_MICROBATCHES, 1, LENGTH + 1), generator=generator)
    return list(every.chunk(layout.dp)[parallel_state.get_data_parallel_rank()])


def forward_backward(chunks, data):
    """Megatron's schedule over `data`; the losses, on the last stage."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def loss_of(losses):
        loss = losses.sum() / LENGTH
        return loss, {"loss": loss.detach().clone()}

    def forward_step(iterator, model):
        tokens = next(iterator)["tokens"]
        places = torch.arange(LENGTH)[None]
        return model(tokens[:, :-1], places, None, labels=tokens[:, 1:]), loss_of

    items = [{"tokens": tokens} for tokens in data]
    stock = get_forward_backward_func()
    logs = steps.run(stock, forward_step, chunks, items, seq_length=LENGTH).logs
    return [log["loss"].item() for log in logs]


def named_parameters(chunks):
    """This rank's parameters by their name in the whole model."""
    return dict(pair for chunk in chunks for pair in weights.global_parameters(unwrap(chunk)))


def train_one_step(name, layout, dtype):
    runtime.initialize(layout)
    # Data parallelism changes which tokens an auxiliary loss sees together, in Megatron too.
    overrides = {"moe_aux_loss_coeff": 0.0} if name == "tiny-moe" else {}
    spec = resolve(name, **overrides).with_vocab(VOCAB)
    chunks = build_model(spec, layout=layout, dtype=dtype)
    # A large eps, so that the update does not magnify the rounding of small gradients.
    optimizer = build_optimizer(chunks, lr=1e-3, eps=1e-3, clip_grad=0.0)
    losses = forward_backward(chunks, microbatches(layout))
    parameters = named_parameters(chunks)
    grads = {name: parameter.main_grad.clone() for name, parameter in parameters.items()}
    success, _, _ = optimizer.step()
    assert success
    from megatron.core import parallel_state

    dims = {n: p.partition_dim if p.tensor_model_parallel else -1 for n, p in parameters.items()}
    held = {n: (grads[n], p.detach().clone(), dims[n]) for n, p in parameters.items()}
    return Step(losses, held, parallel_state.get_tensor_model_parallel_rank())


TERMS = LENGTH * NUM_MICROBATCHES  # tokens behind one element of a weight gradient
SP = {"sequence_parallel": True}
OLDER = pytest.mark.skipif(is_since("0.19"), reason="megatron-core 0.19 has it")
FIELDS = {field.name for field in dataclasses.fields(ModelSpec)}


@functools.cache
def reference(name, dtype="float64"):
    return run_ranks(1, train_one_step, name, Layout(), dtype)[0]


LAYOUTS = [
    ("tiny-qwen3", Layout(pp=2, vpp=2)), ("tiny-moe", Layout(tp=2, dp=2, ep=2, **SP)),
    ("tiny-deepseek", Layout(tp=2, **SP)),
]  # fmt: skip
"""Stages; columns, rows and experts; latents."""


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_float64_step_is_the_same_in_every_layout(name, layout):
    """Every rank's gradients and parameters are its part of the single rank's."""
    expected = reference(name)
    steps = run_ranks(layout.world_size, train_one_step, name, layout, "float64")
    for step in steps:
        for name, (*ours, dim) in step.held.items():
            pieces = 2 if "linear_fc1.weight" in name else 1
            for one, whole in zip(ours, expected.held[name][:2], strict=True):
                if dim >= 0:
                    whole = weights.local_part(whole, dim, step.tp_rank, layout.tp, pieces)
                assert_close(one, whole, TERMS, torch.float64, name)
    assert set().union(*(step.held for step in steps)) == set(expected.held)
    losses = torch.tensor([loss for step in steps if step.tp_rank == 0 for loss in step.losses])
    assert_close(losses, torch.tensor(expected.losses), VOCAB, torch.float32, "losses")


def test_narrower_dtypes_train_the_same_model():
    """Only the loss: what rounding does to gradients of a whole model has no simple bound."""
    exact, rounded = (reference("tiny-qwen3", dtype) for dtype in ("float64", "bfloat16"))
    assert {gradient.dtype for gradient, *_ in rounded.held.values()} == {torch.float32}
    assert {parameter.dtype for _, parameter, _ in rounded.held.values()} == {torch.bfloat16}
    losses, expected = torch.tensor(rounded.losses), torch.tensor(exact.losses)
    assert_close(losses, expected, VOCAB, torch.bfloat16)


@pytest.mark.usefixtures("on_one_rank")
def test_exact_loss_is_megatrons_loss():
    spec = resolve("tiny-llama").with_vocab(VOCAB)
    tokens, places = microbatches(Layout())[0], torch.arange(LENGTH)[None]
    chunks = (build_model(spec, dtype="float32", exact_loss=exact)[0] for exact in (True, False))
    ours, megatrons = (one(tokens[:, :-1], places, None, labels=tokens[:, 1:]) for one in chunks)
    assert ours.shape == (1, LENGTH)
    assert_close(ours, megatrons, VOCAB)


@pytest.mark.usefixtures("on_one_rank")
def test_weights_depend_on_seed_and_name_only():
    spec = resolve("tiny-llama").with_vocab(VOCAB)
    one, again, other = (
        named_parameters(build_model(spec, seed=seed, wrap_ddp=False)) for seed in (1, 1, 2)
    )
    assert all(torch.equal(again[name], value) for name, value in one.items())
    assert not any(torch.equal(other[name], value) for name, value in one.items())
    values = [value.flatten()[:64] for value in one.values()]
    for n, value in enumerate(values):
        assert not any(torch.equal(value, before) for before in values[:n])


@pytest.mark.parametrize(("name", "layout", "options", "message"), [
    ("tiny-llama", Layout(pp=3), {}, "4 layers, which 3 pipeline stages"),
    ("tiny-llama", Layout(pp=2, vpp=4), {}, "which 8 pipeline stages .pp 2 . vpp 4."),
    ("tiny-llama", Layout(tp=4), {}, "2 key/value heads, which --tp 4"),
    ("tiny-llama", Layout(dp=2, ep=2), {}, "no experts; leave --ep 2 out"),
    ("tiny-moe", Layout(dp=3, ep=3), {}, "8 experts, which --ep 3"),
    ("tiny-moe", Layout(tp=2), {}, "add --sequence-parallel"),
    ("tiny-deepseek", Layout(tp=2), {"num_moe_experts": None, "moe_layer_freq": 1},
     "latent attention and --tp is 2: .* wrong gradients"),
    ("tiny-gpt-oss", Layout(tp=2, **SP), {}, "experts with biases, .* leave --tp 2 out"),
    ("tiny-gpt-oss", Layout(), {"sdpa": True}, "neither windows nor learned sinks"),
    ("tiny-llama", Layout(), {"dtype": "float16"}, "'float16' is not supported"),
    ("tiny-llama", Layout(), {"recompute": "some"}, "recompute 'some' is not known"),
    ("tiny-llama", Layout(), {"layer_spec": "te"}, "needs transformer-engine, a GPU"),
    ("tiny-llama", Layout(), {"layer_spec": "best"}, "layer spec 'best' is not known"),
    ("tiny-llama", Layout(), {"hidden_size": 10**8},
     r"GiB per rank do not fit in the [\d.]+ GiB of this machine"),
    ("tiny-moe", Layout(), {"num_moe_experts": 1, "moe_router_topk": 1},
     r"tiny-moe.: Megatron-Core refuses .*topk is 1"),
    pytest.param("tiny-llama", Layout(), {"mtp_num_layers": 1, "mtp_detach_heads": True},
     "Megatron-Core has no mtp_detach_heads", marks=OLDER),
])  # fmt: skip
def test_what_cannot_be_built_is_refused(name, layout, options, message):
    fields = {key: value for key, value in options.items() if key in FIELDS}
    options = {key: value for key, value in options.items() if key not in FIELDS}
    spec = resolve(name, **fields).with_vocab(VOCAB)
    with pytest.raises(UserError, match=message) as caught:
        build_model(spec, layout=layout, **options)
    assert "\n" not in str(caught.value)


def test_fp8_needs_a_gpu_and_lengths_of_whole_blocks():
    spec = resolve("tiny-llama", fp8="hybrid", fp8_recipe="mxfp8").with_vocab(64)
    with pytest.raises(UserError, match="fp8 hybrid needs transformer-engine, a GPU and bfloat16"):
        build_model(spec, dtype="bfloat16")
    assert alignment(spec, Layout(tp=2, sequence_parallel=True)) == 64
    assert alignment(spec, Layout(cp=2)) == 64
    assert alignment(resolve("tiny-llama"), Layout(cp=2)) == 4
