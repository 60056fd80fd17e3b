"""What a step leaves besides gradients: what the call returns, logged losses, experts' biases."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor
from torch.utils import (
    _pytree as pytree,  # torch's own; torch.utils.pytree is not public before 2.9
)

from megatron_prefix.features import has_indexer_loss
from megatron_prefix.megatron.logged_losses import logged_losses
from megatron_prefix.run.rank import Rank

Distance = tuple[float, float, str]
"""The largest difference, what it is relative to, and of what."""


def logged_ahead() -> dict[str, Tensor]:
    """Megatron's logs of multi-token prediction and of sparse attention; its own tensors."""
    tracker = MTPLossLoggingHelper.tracker
    name = "values" if "values" in tracker else "loss_values"  # the latter since 0.19
    module = sys.modules.get("megatron.core.transformer.experimental_attention_variant.dsa")
    of_indexer = {} if module is None else module.DSAIndexerLossLoggingHelper.tracker
    logs = ("mtp_loss", tracker.get(name)), ("indexer_loss", of_indexer.get("values"))
    return {name: values for name, values in logs if values is not None}


def auxiliary(rank: Rank) -> dict[str, Tensor]:
    """Logged losses of layers, summed over the ranks that share them, float64; all ranks that make
    a training step together call this."""
    logged = dict(logged_losses()) if rank.model.has_experts else {}
    # Another model of the process may have logged.
    in_model = {
        "mtp_loss": rank.model.looks_ahead,
        "indexer_loss": has_indexer_loss(rank.config),
    }
    logged |= {name: values for name, values in logged_ahead().items() if in_model[name]}
    # Parts of a span may be another data-parallel rank's.
    groups = [] if rank.forward_only else [rank.groups.tp, rank.data_ranks or rank.groups.cp]
    sums = {}
    for name in sorted(logged):
        sums[name] = logged[name].detach().double().clone()
        for group in groups:
            if group.size() > 1:
                dist.all_reduce(sums[name], group=group)
    return sums


def buffers(rank: Rank) -> dict[str, Tensor]:
    """Copies of the modules' buffers of numbers (experts' biases), by name."""
    return {
        f"chunk {chunk}: {name}" if len(rank.models) > 1 else name: values.detach().clone()
        for chunk, model in enumerate(rank.models)
        for name, values in model.named_buffers()
        if values.is_floating_point()
    }


def distance(ours: Mapping[str, Tensor], stock: Mapping[str, Tensor]) -> Distance | None:
    """Between two dicts of tensors; None if both are empty."""
    worst: Distance | None = None
    for name in {**stock, **ours}:
        a, b = ours.get(name), stock.get(name)
        if a is None or b is None or a.shape != b.shape:
            return math.inf, 1.0, name
        if a.numel():
            error, size = (a.double() - b.double()).abs().max(), b.double().abs().max()
            worst = _larger(worst, (float(error), float(size), name))
    return worst


def moved(
    ours: Mapping[str, Tensor], stock: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> Distance | None:
    """Between two ways in which buffers went, by 2-norms of all together; None if none moved."""
    error = size = 0.0
    name = ""
    for key, start in before.items():
        if not (torch.equal(ours[key], start) and torch.equal(stock[key], start)):
            part = float(torch.linalg.vector_norm((ours[key] - stock[key]).double()))
            error, name = math.hypot(error, part), name if part <= error else key
            size = math.hypot(size, float(torch.linalg.vector_norm((stock[key] - start).double())))
    return (error, size, name) if error or size else None


def stores(ours: Any, stock: Any, least: float) -> Distance | None:
    """Between what two schedules returned: Megatron's `forward_data_store`.

    Args:
        ours, stock: lists with one entry a microbatch, of dicts or whatever the trainer returns.
        least: what differences are relative to where values are smaller.
    """
    pairs = [dict(_leaves(value)) for value in (ours, stock)]
    if pairs[0].keys() != pairs[1].keys():
        return math.inf, 1.0, "what is returned"
    worst: Distance | None = None
    for path, theirs in pairs[1].items():
        local = pairs[0][path]
        if isinstance(theirs, Tensor) != isinstance(local, Tensor):
            return math.inf, 1.0, path
        if isinstance(theirs, Tensor):
            worst = _larger(worst, (*_difference(local, theirs, least), path))
        elif isinstance(theirs, float):
            worst = _larger(worst, (abs(local - theirs), max(least, abs(theirs)), path))
        elif isinstance(theirs, bool | int | str) and local != theirs:
            return math.inf, 1.0, path
    return worst


def _difference(ours: Tensor, stock: Tensor, least: float) -> tuple[float, float]:
    """Of tensors: of one number, or of one per position, of which ours may lack what no loss
    reads."""
    if ours.is_nested and stock.is_nested:  # verl's, of rollouts; each has a shape of its own
        ours, stock = ours.values(), stock.values()
    if ours.shape != stock.shape or ours.dtype != stock.dtype:
        return math.inf, 1.0
    a, b = ours.detach().double(), stock.detach().double()
    if a.numel() > 1:
        a, b = a[a != 0], b[a != 0]
    if not a.numel():
        return 0.0, least
    equal = (a == b) | (a.isnan() & b.isnan())
    return float((a - b).masked_fill(equal, 0.0).abs().max()), max(least, float(b.abs().max()))


def _leaves(value: Any) -> Iterator[tuple[str, Any]]:
    for path, leaf in pytree.tree_flatten_with_path(value)[0]:
        yield pytree.keystr(path), leaf


def _larger(so_far: Distance | None, further: Distance) -> Distance:
    """The relatively larger; a NaN wins."""
    if so_far is None or relative(*further[:2]) > relative(*so_far[:2]):
        return further
    return so_far


def relative(error: float, size: float) -> float:
    """Error over size; infinite for NaN, and for an error where the size is zero."""
    if math.isnan(error) or math.isnan(size):
        return math.inf
    return error / size if size else math.inf if error else 0.0
