"""[pure] Importing this module lets verl deal whole groups to data-parallel ranks.

For `VERL_USE_EXTERNAL_MODULES`; see trainers/verl_dealing.py. Without it verl deals as ever.
"""

from __future__ import annotations

from megatron_prefix.auto.after_import import AfterImport
from megatron_prefix.trainers.verl_dealing import PLACES, deal_whole_groups

for _module in PLACES:
    AfterImport(_module, deal_whole_groups).begin()
