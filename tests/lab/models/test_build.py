"""Models from specs: the same in every layout, and trained by Megatron's stock schedule."""

import dataclasses
from typing import NamedTuple

import pytest
import torch

from megatron_prefix.errors import UserError
from megatron_prefix.lab import runtime
from megatron_prefix.lab.models import weights
from megatron_prefix.lab.models.build import build_model, build_optimizer, unwrap
from megatron_prefix.lab.models.config import alignment
from megatron_prefix.lab.models.presets import PRESETS, ModelSpec, resolve
from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.tree import cp_layout
from tests.harness import steps
from tests.harness.ranks import run_ranks

LENGTH, NUM_MICROBATCHES, VOCAB = 24, 4, 97


class RankResult(NamedTuple):
    """What one rank holds after a step; parameters by their name in the whole model.

    splits: the dimension along which tensor parallelism has cut a parameter, -1 if none.
    """

    losses: list[float]
    grads: dict[str, torch.Tensor]
    params: dict[str, torch.Tensor]
    splits: dict[str, int]
    tp_rank: int


def microbatches(layout):
    """This rank's microbatches of tokens [1, LENGTH + 1]; the world has NUM_MICROBATCHES."""
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(11)
    every = torch.randint(0, VOCAB, (NUM_MICROBATCHES, 1, LENGTH + 1), generator=generator)
    return list(every.chunk(layout.dp)[parallel_state.get_data_parallel_rank()])


def forward_backward(chunks, data):
    """Megatron's schedule over `data`; the losses, on the last stage.

    Of context-parallel ranks each runs its zig-zag slices; the first one has the losses.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    group = parallel_state.get_context_parallel_group()
    held = torch.from_numpy(cp_layout.rank_positions(LENGTH, group.rank(), group.size()))

    def loss_of(losses):
        loss = losses.sum() / LENGTH
        whole = loss.detach().clone()
        torch.distributed.all_reduce(whole, group=group)
        return loss, {"loss": whole}

    def forward_step(iterator, model):
        tokens = next(iterator)["tokens"]
        return model(tokens[:, held], held[None], None, labels=tokens[:, held + 1]), loss_of

    items = [{"tokens": tokens} for tokens in data]
    stock = get_forward_backward_func()
    logs = steps.run(stock, forward_step, chunks, items, seq_length=LENGTH).logs
    return [log["loss"].item() for log in logs if group.rank() == 0]


def named_parameters(chunks):
    """This rank's parameters by their name in the whole model."""
    return dict(pair for chunk in chunks for pair in weights.global_parameters(unwrap(chunk)))


def train_one_step(name, layout, *, overrides=None, **options):
    """Join the job, build the model, and do one step; `options` go to `build_model`."""
    runtime.initialize(layout)
    spec = resolve(name, **(overrides or {})).with_vocab(VOCAB)
    chunks = build_model(spec, layout=layout, **options)
    # A large eps, so that the update does not magnify the rounding of small gradients.
    optimizer = build_optimizer(chunks, lr=1e-3, eps=1e-3, clip_grad=0.0)
    losses = forward_backward(chunks, microbatches(layout))
    parameters = named_parameters(chunks)
    grads = {name: parameter.main_grad.clone() for name, parameter in parameters.items()}
    success, _, _ = optimizer.step()
    if not success:
        raise RuntimeError("the optimizer skipped the step")
    from megatron.core import parallel_state

    return RankResult(
        losses, grads, {name: parameter.detach().clone() for name, parameter in parameters.items()},
        {n: p.partition_dim if p.tensor_model_parallel else -1 for n, p in parameters.items()},
        parallel_state.get_tensor_model_parallel_rank(),
    )  # fmt: skip


TERMS = LENGTH * NUM_MICROBATCHES  # tokens behind one element of a weight gradient
# Data parallelism changes which tokens the auxiliary loss sees together, in stock Megatron too.
NO_AUX = {"moe_aux_loss_coeff": 0.0}
SP = {"sequence_parallel": True}
FIELDS = {field.name for field in dataclasses.fields(ModelSpec)}


_references = {}


def reference(name, **options):
    """The same step on one rank; computed once."""
    key = (name, repr(sorted(options.items())))
    if key not in _references:
        [_references[key]] = run_ranks(1, lambda: train_one_step(name, Layout(), **options))
    return _references[key]


def assert_same_step(steps, expected, layout, dtype, *, grads=True):
    """Every rank's gradients and parameters are its part of the single rank's."""
    seen = set()
    for step in steps:
        for name, param in step.params.items():
            pairs = [("param", param, expected.params[name])]
            if grads:
                pairs.append(("grad", step.grads[name], expected.grads[name]))
            pieces = 2 if "linear_fc1.weight" in name else 1
            for kind, ours, whole in pairs:
                dim = step.splits[name]
                if dim >= 0:
                    whole = weights.local_part(whole, dim, step.tp_rank, layout.tp, pieces)
                assert_close(ours, whole, TERMS, dtype, f"{kind} of {name}")
            seen.add(name)
    assert seen == set(expected.params)
    losses = torch.tensor([loss for step in steps if step.tp_rank == 0 for loss in step.losses])
    assert_close(losses, torch.tensor(expected.losses), VOCAB, torch.float32, "losses")


LAYOUTS = [
    ("tiny-qwen3", Layout(pp=2, vpp=2)), ("tiny-moe", Layout(tp=2, dp=2, ep=2, **SP)),
    ("tiny-deepseek", Layout(tp=2, **SP)),
]  # fmt: skip
"""Stages; columns, rows and experts; latents."""


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_float64_step_is_the_same_in_every_layout(name, layout):
    options = {"dtype": "float64"}
    if name == "tiny-moe":
        options["overrides"] = NO_AUX
    steps = run_ranks(layout.world_size, lambda: train_one_step(name, layout, **options))
    assert_same_step(steps, reference(name, **options), layout, torch.float64)


def test_narrower_dtypes_train_the_same_model():
    """Only the loss: what rounding does to gradients of a whole model has no simple bound."""
    exact, rounded = (reference("tiny-qwen3", dtype=dtype) for dtype in ("float64", "bfloat16"))
    assert {grad.dtype for grad in rounded.grads.values()} == {torch.float32}
    assert {param.dtype for param in rounded.params.values()} == {torch.bfloat16}
    losses, expected = torch.tensor(rounded.losses), torch.tensor(exact.losses)
    assert_close(losses, expected, VOCAB, torch.bfloat16)


def losses_of_both_kinds():
    runtime.initialize(Layout())
    spec = resolve("tiny-llama").with_vocab(VOCAB)
    tokens = microbatches(Layout())[0]
    losses = []
    for exact in (True, False):
        [chunk] = build_model(spec, dtype="float32", exact_loss=exact)
        position = torch.arange(LENGTH)[None]
        losses.append(chunk(tokens[:, :-1], position, None, labels=tokens[:, 1:]).detach())
    return losses


def test_exact_loss_is_megatrons_loss():
    [(ours, megatrons)] = run_ranks(1, losses_of_both_kinds)
    assert ours.shape == (1, LENGTH)
    assert_close(ours, megatrons, VOCAB)


def parameters(name, layout, seed):
    runtime.initialize(layout)
    spec = resolve(name).with_vocab(VOCAB)
    chunks = build_model(spec, layout=layout, seed=seed, wrap_ddp=False)
    return {n: p.detach().clone() for n, p in named_parameters(chunks).items()}


def test_weights_depend_on_seed_and_name_only():
    [one], [again], [other] = (
        run_ranks(1, parameters, "tiny-llama", Layout(), seed) for seed in (1, 1, 2)
    )
    assert all(torch.equal(again[name], value) for name, value in one.items())
    assert not any(torch.equal(other[name], value) for name, value in one.items())
    values = [value.flatten()[:64] for value in one.values()]
    for n, value in enumerate(values):
        assert not any(torch.equal(value, before) for before in values[:n])


def test_parameters_are_counted_right():
    name = "tiny-moe"
    [params] = run_ranks(1, parameters, name, Layout(), 1)
    built = sum(p.numel() for n, p in params.items() if not n.endswith("norm.weight"))
    spec = PRESETS[name].with_vocab(weights.padded_vocab(VOCAB, 1))
    assert built == spec.parameters()


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
