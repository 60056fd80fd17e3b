"""Whether a step shares.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_prefix.config import PrefixConfig
from megatron_prefix.tree import Pairs
from megatron_prefix.tree.beginnings import most_saved


@dataclass(frozen=True)
class Decision:
    """Whether a step runs the prefix schedule, and why, in one line."""

    share: bool
    reason: str
    fallback: bool  # the stock schedule runs although the user wanted sharing
    predicted_speedup: float  # of sharing over the stock schedule
    over_limit: bool = False  # sharing would take more memory than it may


def decide(config: PrefixConfig, speedup: float) -> Decision:
    """Whether a step shares: mode "on" always, "auto" where the predicted speedup pays, "observe"
    and "off" never."""
    if config.mode != "auto":
        return Decision(config.mode == "on", f"mode {config.mode}", False, speedup)
    if speedup >= config.min_speedup:
        return Decision(True, f"predicted speedup {speedup:.2f}", False, speedup)
    reason = f"predicted speedup {speedup:.2f} is below min_speedup {config.min_speedup:.2f}"
    return Decision(False, reason, True, speedup)


def kept_to_limit(config: PrefixConfig, decision: Decision, peak: float, limit: float) -> Decision:
    """The decision, unless mode "auto" would share and exceed the limit. Mode "on" shares in any
    case, and the reason names a budget that is exceeded. `peak` (of the rank with most) and `limit`
    are bytes besides weights and gradients.
    """
    budget = config.memory_budget_gb
    if not decision.share or peak <= limit or (config.mode == "on" and not budget):
        return decision
    most = (
        f"memory_budget_gb is {budget:g}"
        if budget
        else f"the limit, the stock schedule's peak and 5 %, is {limit / 2**30:.3g} GiB"
    )
    reason = f"sharing would take {peak / 2**30:.3g} GiB beside the weights, and {most}"
    is_on = config.mode == "on"
    return Decision(is_on, reason, not is_on, decision.predicted_speedup, over_limit=True)


def without_sharing(
    config: PrefixConfig, rollouts: Sequence[Pairs], align: int, head: float = 0.0
) -> bool:
    """Whether the first positions already show that mode "auto" will not share; builds no tree.

    A shared position is computed at least once, so sharing S of R positions is at most R / (R - S)
    times as fast; and the output layer runs at least on the T trained ones. Positions after a
    rollout's last loss are not computed: the first N of its L positions take at least N^2 / L of
    its time, as the cost of attention grows with the position. `align`: see TreeOptions; `head`:
    the output layer's share of a position's FLOPs, 0 to 1.
    """
    if config.mode != "auto":
        return False
    if not rollouts:
        return config.min_speedup > 1
    raw = sum(map(len, rollouts))
    trained = sum(int(np.count_nonzero(rollout.trained)) for rollout in rollouts)
    stock_cost = raw - head * (raw - trained)
    needed = sum(rollout.num_needed**2 / len(rollout) for rollout in rollouts)
    enough = needed - raw * raw / (config.min_speedup * stock_cost) if stock_cost else 0.0
    return enough > 0 and most_saved(rollouts, config.tree_options(align), enough) < enough


def unshared(config: PrefixConfig) -> Decision:
    """The decision for steps in which `without_sharing` holds."""
    reason = (
        "the rollouts share too few first positions for a speedup of"
        f" {config.min_speedup:.2f} (min_speedup)"
    )
    return Decision(False, reason, True, 1.0)
