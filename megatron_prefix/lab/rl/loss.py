"""The GRPO loss as a Megatron forward step.

The model's output is -log p(label) of every position, so entropy is not available here: it needs
the whole distribution.

PPO-clip: "Proximal Policy Optimization Algorithms", section 3. Two clip ranges: "DAPO: An Open-
Source LLM Reinforcement Learning System at Scale", section 3.1 (clip-higher). KL to a reference:
"DeepSeekMath", section 4.1.1, equation 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_prefix.lab.rl import routes
from megatron_prefix.lab.rl.packing import packed_seq_params
from megatron_prefix.lab.rl.settings import GrpoConfig

LossFunction = Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]
ForwardStep = Callable[[Iterator[dict[str, Any]], Any], tuple[Tensor, LossFunction]]

_PER_POSITION = (
    "tokens",
    "labels",
    "loss_mask",
    "position_ids",
    "advantages",
    "old_logprobs",
    "ref_logprobs",
)


def forward_step(config: GrpoConfig, *, weight: float = 1.0) -> ForwardStep:
    """A forward step over the microbatches of `batches.microbatch`, or packs of them.

    Its loss function returns Megatron's triple: the loss summed over trained tokens, their number
    (int32, on the device), and logs, each a [2] tensor of a sum over trained tokens and their
    number, so that sums over microbatches and ranks give means: `loss`, `ratio` (new over old
    probability), `clip_frac`, `approx_kl` (to the old policy, "k3" as `kl`), `weighted_logprob`
    (advantage times log-prob), and with kl_coeff > 0 `kl` (to the reference). The host does not
    wait for the device.

    Args:
        weight: factor of the loss but not of its log; for ranks with unequal numbers of rollouts.
    """

    def step(data_iterator: Iterator[dict[str, Any]], model: Any) -> tuple[Tensor, LossFunction]:
        item = next(data_iterator)
        batch = _on_device(item, model)

        def loss_func(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            if config.kl_coeff and "ref_logprobs" not in batch:
                raise ValueError("kl_coeff is above 0 but the microbatch has no ref_logprobs")
            terms = _terms(config, batch, -output)
            num_tokens = batch["loss_mask"].sum().to(torch.int32)
            count = num_tokens.to(output.dtype)
            logs = {n: torch.stack([v.detach().sum(), count]) for n, v in terms.items()}
            return terms["loss"].sum() * weight, num_tokens, logs

        return _output(model, batch, item), loss_func

    return step


def trained(call: Any) -> Any:
    """Which positions of a model call carry loss, in passes without gradients, too."""
    return call["loss_mask"]


def logprob_step() -> ForwardStep:
    """A forward step for passes with `forward_only`: the log-probs are the log `logprobs`.

    They are [positions]; `batches.trained_logprobs` picks the trained ones. The prefix schedule
    computes no others. The loss is zero.
    """

    def loss_func(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        num_tokens = torch.ones([], dtype=torch.int32, device=output.device)
        return output.new_zeros([]), num_tokens, {"logprobs": -output.detach()[0]}

    def step(data_iterator: Iterator[dict[str, Any]], model: Any) -> tuple[Tensor, LossFunction]:
        item = next(data_iterator)
        return _output(model, _on_device(item, model), item), loss_func

    return step


def _on_device(item: dict[str, Any], model: Any) -> dict[str, Tensor]:
    device = next(model.parameters()).device
    return {n: item[n].to(device, non_blocking=True) for n in _PER_POSITION if n in item}


def _output(model: Any, batch: dict[str, Tensor], item: dict[str, Any]) -> Tensor:
    packing = packed_seq_params(item, batch["tokens"].device)
    routes.give(model, item)
    return model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],  # the prefix schedule skips what carries no loss
        **({} if packing is None else {"packed_seq_params": packing}),
    )


def _terms(config: GrpoConfig, batch: dict[str, Tensor], logprobs: Tensor) -> dict[str, Tensor]:
    """Loss and logs of every position, [1, positions], zero if it is not trained."""
    mask = batch["loss_mask"].to(logprobs.dtype)
    advantages = batch["advantages"].to(logprobs.dtype)
    old = batch["old_logprobs"].to(logprobs.dtype) if "old_logprobs" in batch else logprobs.detach()
    # Masked before exp, which could overflow on untrained positions and give inf * 0.
    log_ratio = (logprobs - old) * mask
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    terms = {
        "loss": -surrogate * mask,
        "ratio": ratio * mask,
        "clip_frac": (clipped * advantages < ratio * advantages) * mask,
        "approx_kl": _k3(-log_ratio) * mask,
        "weighted_logprob": advantages * logprobs * mask,
    }
    if config.kl_coeff:
        terms["kl"] = _k3((batch["ref_logprobs"].to(logprobs.dtype) - logprobs) * mask)
        terms["loss"] = terms["loss"] + config.kl_coeff * terms["kl"]
    return terms


def _k3(log_ratio: Tensor) -> Tensor:
    """exp(r) - r - 1, the KL estimate that is never negative; r = log p_other - log p_sampled."""
    return torch.expm1(log_ratio) - log_ratio
