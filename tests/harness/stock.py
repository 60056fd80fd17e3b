"""One training step of a named model with Megatron's stock schedule, in any layout."""

from typing import NamedTuple

import torch

from megatron_prefix.lab import runtime
from megatron_prefix.lab.models import weights
from megatron_prefix.lab.models.build import build_model, build_optimizer, unwrap
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.tree import cp_layout

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
        tokens = next(iterator)
        return model(tokens[:, held], held[None], None, labels=tokens[:, held + 1]), loss_of

    for chunk in chunks:
        if hasattr(chunk, "zero_grad_buffer"):
            chunk.zero_grad_buffer()
        # After a step in float32 `grad` is the buffer itself: backward would add to it twice.
        chunk.zero_grad(set_to_none=True)
    iterators = [iter(data) for _ in chunks]
    interleaved = len(chunks) > 1
    results = get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iterators if interleaved else iterators[0],
        model=chunks if interleaved else chunks[0], num_microbatches=len(data), seq_length=LENGTH,
        micro_batch_size=1, forward_only=False,
    )  # fmt: skip
    return [result["loss"].item() for result in results if group.rank() == 0]


def named_parameters(chunks):
    """This rank's parameters by their name in the whole model."""
    models = [unwrap(chunk) for chunk in chunks]
    return {
        weights.global_name(model, name): parameter
        for model in models
        for name, parameter in model.named_parameters()
    }


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
