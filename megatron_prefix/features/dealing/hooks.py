"""[pure] Which functions of trainers deal rollouts to data-parallel ranks, and what hooks them."""

from __future__ import annotations

from megatron_prefix.auto.after_import import AfterImport
from megatron_prefix.features.dealing import areal, nemo_rl, roll, slime, verl

HOOKS = {
    **dict.fromkeys(verl.PLACES, verl.deal_whole_groups),
    "slime.utils.dp_schedule": slime.deal_whole_groups,
    "miles.utils.dp_schedule": slime.deal_whole_groups,
    "nemo_rl.distributed.batched_data_dict": nemo_rl.deal_whole_groups,
    "roll.utils.functionals": roll.deal_whole_groups,
    areal.DATA: areal.take_parts,
    **dict.fromkeys(areal.PLACES, areal.deal_whole_groups),
}
"""By module what is called with it, as soon as it is imported."""


def deal_after_import() -> None:
    """Lets every trainer of the table deal whole groups."""
    for module, hook in HOOKS.items():
        AfterImport(module, hook).begin()
