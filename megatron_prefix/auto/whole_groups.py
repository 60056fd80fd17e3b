"""[pure] Importing this module lets trainers deal whole groups to data-parallel ranks.

For verl's `VERL_USE_EXTERNAL_MODULES`, and a line in others. Without it they deal as ever.
"""

from __future__ import annotations

from megatron_prefix import features

features.load(features.DEALING)()
