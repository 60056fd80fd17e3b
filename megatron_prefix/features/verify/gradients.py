"""Gradients of a rank, kept while the other schedule makes its own, and compared with those.

They are kept as they are where there is room beside the step, else on the host, else as sketches:
sums of all elements with random signs, by which the 2-norm of a difference is known within some
20 % (D. Achlioptas: "Database-friendly random projections", section 1). Sketches of ranks can be
added up, so they also serve where a trainer reduces gradients after the call.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_prefix.features.verify.step_state import bucket_groups
from megatron_prefix.run.rank import Rank

SIGNS = 16
"""Sums a sketch has."""
PART = 1 << 24
"""Elements that are looked at together."""
ROOM = 1.1
"""Times the gradients' bytes that have to be free on the device, beside the highest peak so far."""
_EXPERT = re.compile(r"\bexperts\.(local_experts\.)?\d+\.|(?<=\bweight)\d+$")


class Difference(NamedTuple):
    """How far a parameter's gradient is from the stock schedule's; NaN where either is not finite.

    Attributes:
        name: of the parameter; of all experts of a layer together where norms are compared.
        error: the largest difference of an element, or the 2-norm of all differences.
        size: the same of the stock schedule's gradient.
    """

    name: str
    error: float
    size: float


class KeptGradients:
    """Gradients of one schedule.

    Args:
        rank: whose gradients they are, reduced unless the trainer does so after the call.
        by_norm: compare 2-norms instead of largest elements: in 16 bit single elements say little.
    """

    def __init__(self, rank: Rank, *, by_norm: bool) -> None:
        self._rank = rank
        self._summed = _left_to_sum(rank)
        place = "sketch" if self._summed is not None else place_for(rank)
        self.by_norm = by_norm or place == "sketch"
        self._sketched = place == "sketch"
        device = torch.device("cpu") if place == "host" else rank.device
        self._values = [
            _sketch(values, number) if self._sketched else values.detach().to(device, copy=True)
            for number, (_, values) in enumerate(gradients(rank))
        ]

    def differences(self) -> list[Difference]:
        """From the gradients that are there now; the host waits for the device."""
        names, rows = [], []
        for number, (name, gradient) in enumerate(gradients(self._rank)):
            names.append(name)
            rows.append(self._row(self._values[number], gradient, number))
        table = torch.stack(rows).tolist() if rows else []
        if not self.by_norm:
            return [Difference(name, *row) for name, row in zip(names, table, strict=True)]
        pooled: dict[str, tuple[float, float]] = {}
        for name, (error, size) in zip(names, table, strict=True):
            before = pooled.get(name := _EXPERT.sub("*", name), (0.0, 0.0))
            pooled[name] = math.hypot(before[0], error), math.hypot(before[1], size)
        return [Difference(name, *row) for name, row in pooled.items()]

    def _row(self, saved: Tensor, gradient: Tensor, number: int) -> Tensor:
        """Error and size of one parameter, float64 [2], on the device."""
        if self._sketched:
            pair = torch.stack([saved, _sketch(gradient, number)])
            if self._summed is not None:
                dist.all_reduce(pair, group=self._summed)
            ours, stock = pair
            return torch.stack([ours - stock, stock]).square().mean(1).sqrt()
        of = torch.linalg.vector_norm
        order = 2 if self.by_norm else math.inf
        parts = [
            torch.stack([of(ours.double() - stock.double(), order), of(stock.double(), order)])
            for stock, ours in zip(
                gradient.reshape(-1).split(PART),
                saved.to(gradient.device).reshape(-1).split(PART),
                strict=True,
            )
        ]  # fmt: skip
        return of(torch.stack(parts), order, dim=0)


def _left_to_sum(rank: Rank) -> Any | None:
    """The group over which gradients are still to be summed when the call is over; None: over none,
    so that each rank's own gradients are the stock schedule's."""
    by_trainer = not all(map(bucket_groups, rank.models))
    is_left = rank.config.finalize_model_grads_func is None or by_trainer
    group = rank.data_ranks
    # Where nobody is known to reduce, what differs between ranks stays different.
    return group if is_left and rank.reduces and group is not None and group.size() > 1 else None


def gradients(rank: Rank) -> Iterator[tuple[str, Tensor]]:
    """By name what this rank knows of its parameters' gradients, in the same order every time.

    Of the distributed optimizer's buffers that is the rank's own part: reduced gradients are
    nowhere else.
    """
    has_chunks = len(rank.models) > 1
    for chunk, model in enumerate(rank.models):
        names = {
            parameter: f"chunk {chunk}: {name}" if has_chunks else name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        inside: set[Any] = set()
        for group in bucket_groups(model):
            for bucket in group.buckets:
                inside.update(bucket.params_list)
                yield from _of_bucket(group, bucket, names)
        for parameter, name in names.items():
            if parameter not in inside:
                yield name, _of_parameter(parameter)


def _of_parameter(parameter: Any) -> Tensor:
    """Its gradient; zeros if it has none."""
    values: Tensor | None = getattr(parameter, "main_grad", None)
    values = parameter.grad if values is None else values
    return parameter.new_zeros(()).expand(parameter.shape) if values is None else values


def _of_bucket(group: Any, bucket: Any, names: dict[Any, str]) -> Iterator[tuple[str, Tensor]]:
    """The gradients of a bucket that are this rank's."""
    flat, begin = bucket.grad_data, 0
    end = flat.numel()
    if group.ddp_config.use_distributed_optimizer:
        share = end // group.intra_distributed_optimizer_instance_size
        begin = share * group.intra_distributed_optimizer_instance_rank
        end = begin + share
    for parameter in bucket.params_list:
        first, last = (  # the later one where a release pads in between
            max(bucket.param_to_index[parameter][0], begin),
            min(bucket.param_to_index[parameter][1], end),
        )
        if first < last and parameter in names:
            yield names[parameter], flat[first:last]


def _sketch(values: Tensor, seed: int) -> Tensor:
    """Sums of elements with random signs, float64 [SIGNS]; equal seeds give equal signs."""
    draw = torch.Generator(values.device).manual_seed(seed)
    total = torch.zeros(SIGNS, dtype=torch.float64, device=values.device)
    for part in values.detach().reshape(-1).split(PART // SIGNS):
        bits = torch.randint(
            0, 2, (SIGNS, len(part)), generator=draw, device=part.device, dtype=torch.int8
        )
        total += (bits.to(part.dtype) * 2 - 1).double() @ part.double()
    return total


def place_for(rank: Rank) -> str:
    """Where there is room for this rank's gradients: "device", "host" or "sketch"."""
    requested = ROOM * sum(values.numel() * values.element_size() for _, values in gradients(rank))
    if rank.device.type == "cuda":
        total = torch.cuda.get_device_properties(rank.device).total_memory
        if total - torch.cuda.max_memory_reserved(rank.device) > requested:
            return "device"
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return "host" if free > 2 * requested * ranks else "sketch"


def largest_gradient(differences: Sequence[Difference]) -> float:
    """The size of the largest gradient; 0 without any."""
    return max((difference.size for difference in differences), default=0.0)
