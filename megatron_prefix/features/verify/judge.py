"""Whether two schedules agree on a step, by the numerics policy (device/tolerance.py).

Every difference is told in units of what rounding allows it to be: 1 is the limit.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from megatron_prefix.device.tolerance import FLOOR, tolerance
from megatron_prefix.features.verify.gradients import Difference, largest_gradient
from megatron_prefix.features.verify.logs import Distance, relative
from megatron_prefix.layers import table
from megatron_prefix.run.rank import Rank

KINDS = ("losses", "outputs", "gradients", "auxiliary losses", "expert biases")
"""What is compared, in the order in which it is told."""


class Worst(NamedTuple):
    """The largest difference of a kind.

    Attributes:
        units: over what rounding allows; infinite for NaN and for what one schedule lacks.
        name: of what.
    """

    units: float
    name: str = ""


class Limits:
    """What rounding allows in a step.

    Args:
        rank: with the model.
        tokens: positions of the step's rollouts on this rank.
        num_microbatches: of the trainer on this rank.
    """

    def __init__(self, rank: Rank, tokens: int, num_microbatches: int) -> None:
        dtype = rank.config.params_dtype
        ranks = rank.data_ranks.size() if rank.data_ranks is not None else 1
        width, depth = longest_sums(rank.config)
        self.is_coarse = dtype.itemsize < 4  # so that single elements say little
        self._sizes = max(tokens * ranks, 1), width, depth
        self.relative = tolerance(dtype, *self._sizes)
        # A sum over a microbatch is as good as its terms, however much of it cancels.
        terms = max(1.0, tokens / max(num_microbatches, 1))
        self.least_loss = math.sqrt(terms) if self.is_coarse else 1.0

    def of(self, distance: Distance | None) -> Worst | None:
        """A difference in units of its limit; None if there was nothing to compare."""
        if distance is None:
            return None
        error, size, name = distance
        return Worst(relative(error, size) / self.relative, name)

    def of_logged(self, distance: Distance | None) -> Worst | None:
        """The same of losses that layers log, which Megatron keeps in fp32 for every dtype."""
        scale = self.relative / max(self.relative, tolerance(torch.float32, *self._sizes))
        worst = self.of(distance)
        return None if worst is None else worst._replace(units=worst.units * scale)

    def of_gradients(self, differences: list[Difference]) -> Worst | None:
        """The worst parameter; None where every gradient is zero: nothing was compared.

        A gradient far below the largest is judged as if it were FLOOR of that: if a sum cancels,
        its rounding does not.
        """
        most = largest_gradient(differences)
        if most == 0 and all(difference.error == 0 for difference in differences):
            return None
        bounds = (
            Worst(relative(error, max(size, FLOOR * most)) / self.relative, name)
            for name, error, size in differences
        )
        return max(bounds, default=None)


def described(worst: dict[str, Worst]) -> str:
    """Differences on one line."""
    parts = []
    for kind in KINDS:
        if kind in worst:
            units, name = worst[kind]
            parts.append(f"{kind} {units:.2g}" + (f" ({name})" if name and units else ""))
    return ", ".join(parts)


def failure(worst: dict[str, Worst]) -> str:
    """What is outside, the largest first; "" if nothing is."""
    outside = sorted(
        ((units, name or "values", kind) for kind, (units, name) in worst.items() if units > 1),
        reverse=True,
    )
    return "; ".join(f"{kind}: {name} {units:.3g}" for units, name, kind in outside)


def longest_sums(config: Any) -> tuple[int, int]:
    """Width and depth of a model: the longest sum in a layer, and the number of layers, the output
    layer included; see device/tolerance.py."""
    experts = config.moe_router_topk * (config.moe_ffn_hidden_size or 0)
    of = table.heads(config)
    heads = config.num_attention_heads * max(of.width, of.value_width)
    return max(config.hidden_size, config.ffn_hidden_size, heads, experts), config.num_layers + 1
