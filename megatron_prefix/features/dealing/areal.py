"""[pure] AReaL deals whole groups to the mini-batches of its actor and its critic.

Its controller keeps a group on one data-parallel rank. The rank's actor then cuts what it has into
`ppo_n_minibatches` mini-batches, by length: `split_padded_tensor_dict_into_mb_list` takes them from
`allocate_balanced_mbs_synced`, which gets ours instead. Every mini-batch is an update whose losses
are divided by numbers of all its ranks; models and losses where that is not so keep its own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from megatron_prefix.features.dealing.microbatches import OwnDealing
from megatron_prefix.features.dealing.own import or_own, wrapped
from megatron_prefix.features.dealing.rollouts import Rollouts

DATA = "areal.utils.data"
PLACES = ("areal.trainer.ppo.actor", "areal.trainer.ppo.critic")
NAME, PARAMETERS = "split_padded_tensor_dict_into_mb_list", "data, mb_spec, group"
ALLOCATION, ALLOCATION_PARAMETERS = "allocate_balanced_mbs_synced", "mb_spec, lens, group"
Parts = list[list[int]]

_PARTS: ContextVar[Parts | None] = ContextVar("_PARTS", default=None)
"""Rollouts of every mini-batch while these are made; None: AReaL allocates."""


def take_parts(module: ModuleType) -> None:
    """Lets `areal.utils.data` take parts from what `deal_whole_groups` has changed."""
    wrapped(module, ALLOCATION, ALLOCATION_PARAMETERS, _allocating)


def deal_whole_groups(module: ModuleType) -> None:
    """Lets one of the modules in `PLACES` deal whole groups."""
    wrapped(module, NAME, PARAMETERS, _dealing)


def _allocating(stock: Callable[..., Parts]) -> Callable[..., Parts]:
    @functools.wraps(stock)
    def allocate_balanced_mbs_synced(mb_spec: Any, lens: Any, group: Any = None) -> Parts:
        own = stock(mb_spec, lens, group)  # ranks wait for one another in there
        parts = _PARTS.get()
        return own if parts is None or len(parts) != len(own) else parts

    return allocate_balanced_mbs_synced


def _dealing(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def split_padded_tensor_dict_into_mb_list(data: Any, mb_spec: Any, group: Any = None) -> Any:
        if (mb_spec.n_mbs or 1) == 1:
            return stock(data, mb_spec, group)
        owner = sys._getframe(1).f_locals.get("self")  # its configuration is no argument
        deals = functools.partial(_parts, data, mb_spec.n_mbs, owner)
        token = _PARTS.set(or_own("AReaL", deals, None))
        try:
            return stock(data, mb_spec, group)
        finally:
            _PARTS.reset(token)

    return split_padded_tensor_dict_into_mb_list


def _parts(data: Any, num: int, owner: Any) -> Parts:
    """Raises: OwnDealing."""
    if why := depends_on_microbatches(owner):
        raise OwnDealing(why)
    rollouts = Rollouts.of_masks(data["input_ids"], data["attention_mask"], data["loss_mask"])
    size = len(rollouts.groups)
    parts = rollouts.dealt(num, equal=size % num == 0)
    if not all(parts):
        raise OwnDealing(f"{size} rollouts of a rank are too few for {num} mini-batches")
    return parts


def depends_on_microbatches(owner: Any) -> str:
    """Why a loss is another one where microbatches are; "" for those that are not.

    Args:
        owner: AReaL's actor or critic.
    """
    model = getattr(getattr(owner, "engine", None), "tf_config", None)
    if model is None:
        return "its engine has no configuration of Megatron"
    if getattr(owner, "m2_threshold", None) is not None:
        return "m2_threshold: its mask is of each microbatch"
    if getattr(model, "mtp_num_layers", None):
        return "mtp_num_layers: its loss is a mean over the tokens of each microbatch"
    coefficients = getattr(model, "moe_aux_loss_coeff", 0)
    is_weighed = any(coefficients) if isinstance(coefficients, list) else bool(coefficients)
    is_balanced = model.moe_router_load_balancing_type not in ("none", ["none"])
    if model.num_moe_experts and ((is_balanced and is_weighed) or model.moe_z_loss_coeff):
        return "moe_aux_loss_coeff, moe_z_loss_coeff: these losses are of each microbatch"
    return ""
