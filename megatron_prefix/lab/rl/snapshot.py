"""What a comparison of two schedules takes from a model: a snapshot to go back to, and copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_prefix.features.verify.judge import longest_sums
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.numerics.compare import Conditions


def named_parameters(chunks: list[Any]) -> Iterator[tuple[str, Any]]:
    """The parameters of this rank, named by chunk."""
    for number, chunk in enumerate(chunks):
        for name, parameter in unwrap(chunk).named_parameters():
            yield f"{number}.{name}", parameter


class Snapshot:
    """Weights and optimizer state of one rank, copied to host memory.

    Copies tensors, not state dicts: so it serves every optimizer of Megatron's, the distributed one
    and those with fp32 main parameters included, and going back is exact.
    """

    def __init__(self, chunks: list[Any], optimizer: Any) -> None:
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._inner = [o.optimizer for o in _optimizers(optimizer) if o.optimizer is not None]
        self._had_state: set[int] = set()
        for _, parameter in named_parameters(chunks):
            self._keep(parameter.data)
        for inner in self._inner:
            for group in inner.param_groups:
                self._groups.append((group, {n: v for n, v in group.items() if n != "params"}))
                for parameter in group["params"]:
                    self._keep(parameter.data)
                    state = inner.state.get(parameter)
                    if state:
                        self._had_state.add(id(parameter))
                        for value in state.values():
                            self._keep(value)

    def _keep(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._tensors.append((value, value.detach().to("cpu", copy=True)))

    @torch.no_grad()
    def restore(self) -> None:
        """Makes weights and optimizer what they were."""
        for tensor, copy in self._tensors:
            tensor.copy_(copy)
        for group, values in self._groups:
            group.update(values)
        for inner in self._inner:
            for parameter in [p for g in inner.param_groups for p in g["params"]]:
                if id(parameter) not in self._had_state:
                    inner.state.pop(parameter, None)


def _optimizers(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def gradients(chunks: list[Any]) -> dict[str, Tensor]:
    """Copies of the summed gradients."""
    return {n: p.main_grad.detach().to("cpu", copy=True) for n, p in named_parameters(chunks)}


def parameters(chunks: list[Any]) -> dict[str, Tensor]:
    """Copies of the weights."""
    return {n: p.detach().to("cpu", copy=True) for n, p in named_parameters(chunks)}


def losses(logs: Sequence[dict[str, Tensor]]) -> Tensor:
    """Mean loss of every microbatch, float64 [microbatches]."""
    rows = [log["loss"].double().cpu() for log in logs]
    table = torch.stack(rows) if rows else torch.zeros(0, 2, dtype=torch.float64)
    return table[:, 0] / table[:, 1].clamp(min=1)


def conditions(
    chunks: list[Any],
    items: Sequence[dict[str, Any]],
    *,
    tokens: int,
    lr: float,
    eps: float,
    kl_coeff: float = 0.0,
    may_vanish: bool = False,
) -> Conditions:
    """What the limits of a comparison of one update follow from.

    Near the reference the KL's gradient is a difference of nearly equal numbers, which rounding
    errors do not follow: that is the `cancellation`.

    Args:
        chunks: this rank's model chunks.
        items: this rank's microbatches.
        tokens, lr, eps, may_vanish: see Conditions.
        kl_coeff: see GrpoConfig.
    """
    loss, terms, sent, trained = 1.0, 0.0, 0.0, 0.0
    for item in items:
        advantages, mask = item["advantages"], item["loss_mask"]
        kl = kl_coeff * mask.double()
        terms += float((advantages.abs() + kl).sum())
        if "old_logprobs" in item:
            terms_of_loss = item["old_logprobs"].abs().clamp(min=1) * advantages.abs()
            loss = max(loss, float(terms_of_loss.sum() / mask.sum().clamp(min=1)))
        if "ref_logprobs" in item and "old_logprobs" in item:
            kl = kl * -torch.expm1(item["ref_logprobs"] - item["old_logprobs"])
        sent += float((kl - advantages).abs().sum())
        trained += float(mask.sum())
    config = unwrap(chunks[0]).config
    return Conditions(
        config.params_dtype, tokens, *longest_sums(config), lr, eps, loss,
        terms / max(trained, 1.0), terms / sent if sent else 1.0, may_vanish,
    )  # fmt: skip
