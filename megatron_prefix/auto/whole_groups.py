"""[pure] Importing this module lets verl deal whole groups to data-parallel ranks.

For `VERL_USE_EXTERNAL_MODULES`. Without it verl deals as ever.
"""

from __future__ import annotations

from megatron_prefix import features

features.load(features.DEALING)()
