"""A forward step on packed (THD) microbatches, by the stock and by the prefix schedule, on the CPU.

    python examples/packed_forward_step.py

A trainer packs rollouts one after the other and tells the model with `PackedSeqParams` where each
begins. None of that changes: the schedule finds what rollouts share, within a pack and across
packs, runs that once, and gives the forward step an output as long as its pack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.numerics import relative_error, tolerance
from megatron_prefix.lab.runtime import Layout

PROMPT, ANSWERS, VOCAB = 96, (16, 40, 24, 32, 8, 28), 500
PACKS = ((0, 1), (2, 3, 4, 5))
Pack = dict[str, torch.Tensor]


def packs() -> list[Pack]:
    """Six answers to one prompt in two packs, [1, positions of all]; the answers are trained."""
    prompt = torch.randint(VOCAB, (PROMPT,))
    rollouts = [torch.cat([prompt, torch.randint(VOCAB, (length,))]) for length in ANSWERS]
    found = []
    for members in PACKS:
        mine = [rollouts[member] for member in members]
        lengths = torch.tensor([0, *(len(tokens) - 1 for tokens in mine)])
        positions = torch.cat([torch.arange(len(tokens) - 1) for tokens in mine])
        found.append(
            {
                "tokens": torch.cat([tokens[:-1] for tokens in mine])[None],
                "labels": torch.cat([tokens[1:] for tokens in mine])[None],
                "position_ids": positions[None],  # from 0 in every rollout
                "loss_mask": (positions >= PROMPT - 1).float()[None],
                "cu_seqlens": lengths.cumsum(0).to(torch.int32),
            }
        )
    return found


def forward_step(iterator: Iterator[Pack], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    """As trainers on Megatron-Core have it: a pack through the model, and its loss function."""
    from megatron.core.packed_seq_params import PackedSeqParams

    batch = next(iterator)
    ends, longest = batch["cu_seqlens"], int(batch["cu_seqlens"].diff().max())
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        packed_seq_params=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
    )

    def loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
        return mean, {"loss": mean.detach().clone()}  # Megatron scales `mean` in place

    return losses, loss


def step(model: Any, batches: list[Pack], schedule: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """Runs forward and backward of all packs; returns the gradient of every parameter by name."""
    model.zero_grad_buffer()
    results = schedule(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=model,
        num_microbatches=len(batches),
        seq_length=max(batch["tokens"].shape[1] for batch in batches),
        micro_batch_size=1,
    )
    print("losses", [round(float(result["loss"]), 6) for result in results])
    return {name: value.main_grad.clone() for name, value in model.named_parameters()}


def main() -> None:
    """Compares the gradients of both schedules."""
    runtime.initialize(Layout(), device="cpu")  # selects the CPU before Megatron is imported
    from megatron.core.pipeline_parallel import get_forward_backward_func as megatron_schedule

    from megatron_prefix.run.schedule import get_forward_backward_func as prefix_schedule

    (model,) = build_model(resolve("tiny-qwen3", vocab_size=VOCAB))
    batches = packs()
    stock = step(model, batches, megatron_schedule())
    prefix = prefix_schedule(prefix_config=PrefixConfig(mode="on"))
    shared = step(model, batches, prefix)

    largest = max(relative_error(shared[name], gradient) for name, gradient in stock.items())
    forest = prefix.report.forest
    print(f"tokens {forest.raw_tokens}, executed {forest.executed_tokens}")
    print(f"largest difference of a gradient, relative: {largest:.1e}")
    limit = tolerance(torch.float32, forest.raw_tokens)
    if not largest <= limit:
        raise SystemExit(f"the schedules differ by more than {limit:.1e}")
    runtime.shutdown()


if __name__ == "__main__":
    main()
