"""One step of a Megatron-Core GPTModel by the stock and by the prefix schedule, on the CPU.

A trainer has to change only the last argument of `step`: the rest is Megatron's own contract.

Run it with the package installed: python examples/share_a_prompt.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.numerics import relative_error, tolerance
from megatron_prefix.lab.runtime import Layout

PROMPT, ANSWER, NUM_ROLLOUTS, VOCAB = 192, 32, 6, 500
Microbatch = dict[str, Any]


def microbatches() -> list[Microbatch]:
    """One group, one rollout per microbatch: one prompt, six answers, loss on the answers."""
    prompt = torch.randint(VOCAB, (1, PROMPT))
    found = []
    for _ in range(NUM_ROLLOUTS):
        tokens = torch.cat([prompt, torch.randint(VOCAB, (1, ANSWER))], dim=1)
        mask = torch.arange(1, tokens.shape[1])[None] >= PROMPT
        found.append({"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask.float()})
    return found


def forward_step(iterator: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    """As in any trainer on Megatron-Core. It does not know that prompts are shared."""
    batch = next(iterator)
    positions = torch.arange(batch["tokens"].shape[1])[None]
    losses = model(batch["tokens"], positions, None, labels=batch["labels"])

    def loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
        return mean, {"loss": mean.detach().clone()}  # Megatron scales `mean` in place

    return losses, loss


def step(model: Any, batches: list[Microbatch], schedule: Callable[..., Any]) -> dict[str, Any]:
    """Runs forward and backward of all microbatches; returns the gradients by parameter name."""
    model.zero_grad_buffer()
    results = schedule(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=model,
        num_microbatches=len(batches),
        seq_length=PROMPT + ANSWER - 1,
        micro_batch_size=1,
    )
    print("mean loss", float(torch.stack([result["loss"] for result in results]).mean()))
    return {name: value.main_grad.clone() for name, value in model.named_parameters()}


def main() -> None:
    """Compares the gradients of both schedules."""
    runtime.initialize(Layout(), device="cpu")  # selects the CPU before Megatron is imported
    from megatron.core.pipeline_parallel import get_forward_backward_func as megatron_schedule

    from megatron_prefix.run.schedule import get_forward_backward_func as prefix_schedule

    (model,) = build_model(resolve("tiny-qwen3", vocab_size=VOCAB))
    batches = microbatches()
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
