"""A training loop on plain Megatron-Core, and the one line that shares prompts.

    python examples/existing_megatron_loop.py

The line is the import of `get_forward_backward_func`. Everything else is the trainer's own and does
not change: data iterator, forward step, loss, DDP, optimizer. Each microbatch has two rollouts of
one prompt. The schedule is not told so: it compares their tokens. Without the line,
`python -m megatron_prefix.run examples/existing_megatron_loop.py` shares them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from megatron_prefix.lab.platforms import cpu

cpu.enable()  # lets Megatron-Core run without a GPU; leave this line out if you have one

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402

# To share prompts, this line becomes
#     from megatron_prefix import get_forward_backward_func
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

VOCAB, PROMPT, ANSWER = 512, 120, 40
NUM_MICROBATCHES, MICRO_BATCH_SIZE, NUM_STEPS = 4, 2, 3


def initialize() -> None:
    """Process groups of one rank; under torchrun `init_process_group()` alone."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)


def build() -> tuple[DistributedDataParallel, Any]:
    """A small GPT in Megatron's DDP, and its optimizer."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        pipeline_dtype=torch.float32,
    )
    length = PROMPT + ANSWER
    model = GPTModel(
        config, get_gpt_layer_local_spec(), VOCAB, length, position_embedding_type="rope"
    )
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, min_lr=1e-3), [ddp])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return ddp, optimizer


def batches() -> Iterator[dict[str, torch.Tensor]]:
    """Endless microbatches [rollouts, positions]: a prompt, and answers that are trained."""
    while True:
        prompt = torch.randint(VOCAB, (1, PROMPT)).expand(MICRO_BATCH_SIZE, -1)
        for _ in range(NUM_MICROBATCHES):
            answers = torch.randint(VOCAB, (MICRO_BATCH_SIZE, ANSWER))
            tokens = torch.cat([prompt, answers], dim=1)
            trained = (torch.arange(1, tokens.shape[1]) >= PROMPT).expand(MICRO_BATCH_SIZE, -1)
            yield {
                "tokens": tokens[:, :-1],
                "labels": tokens[:, 1:],
                "loss_mask": trained.float(),
                "position_ids": torch.arange(tokens.shape[1] - 1).expand(MICRO_BATCH_SIZE, -1),
            }


def loss_func(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """Mean over the trained tokens of a microbatch."""
    mean = (losses * mask).sum() / mask.sum()
    return mean, {"loss": mean.detach().clone()}


def forward_step(iterator: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[Any, Callable]:
    """Megatron's contract: a microbatch through the model, and its loss function."""
    batch = next(iterator)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"])


def main() -> None:
    """Trains a few steps and prints their losses."""
    initialize()
    model, optimizer = build()
    iterator = batches()
    forward_backward = get_forward_backward_func()
    for step in range(NUM_STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        results = forward_backward(
            forward_step_func=forward_step,
            data_iterator=iterator,
            model=model,
            num_microbatches=NUM_MICROBATCHES,
            seq_length=PROMPT + ANSWER - 1,
            micro_batch_size=MICRO_BATCH_SIZE,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        loss = sum(float(result["loss"]) for result in results) / len(results)
        print(f"step {step + 1}: loss {loss!r}, gradient norm {norm!r}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
