"""Multi-token prediction in a newer Megatron-Core: among its rows those that the suite's own
release lacks: calls without labels, detached heads, repeated layers, hybrid models.

Run as a script it prints what is not as rows say, in whatever release is installed.
"""

import sys
from itertools import chain

if __name__ == "__main__":
    from tests.core.trainers import stand_ins

    stand_ins.for_megatron()

import megatron.core
import pytest

from megatron_prefix.features.mtp.methods import WithoutLabels, without_labels
from tests import judge
from tests.cases import FAMILIES, FURTHER, row
from tests.core.trainers.registry import printed_by_newer
from tests.test_cases import MTP, WEIGHED

CROSSED = {"tree": "on_all_ranks"}
LATER = [each for each in MTP if FAMILIES[each.values["model"]].since > "0"]
EARLIER = [each for each in MTP if "keyword" in each.values["model"]]
"""As slime and miles change Megatron, which is before 0.17."""
OTHERS = [
    each
    for each in MTP
    if each not in LATER + EARLIER and each.values.get("scale") != "by_microbatch"
]
"""Megatron 0.19 asks a function of scales without a loss."""
# Of weights that are whole numbers Megatron's share of what is left is fp32 since 0.17.
ROWS = [*OTHERS[::9], *LATER, row("mtp 3 mla", "chunks of 2", **FURTHER)]
ON_RANKS = {
    "dp2": [
        row("mtp detached", "across_ranks", "crossed", labels="absent", **CROSSED),
        row("mtp detached", "across_ranks", "crossed", loss_mask="weighed", **CROSSED),
        row("mtp 2 repeated experts", "across_ranks", "crossed", **CROSSED),
        row("mtp 5 mamba repeated", "across_ranks", "crossed", **WEIGHED | CROSSED),
    ],
    "pp2": [row("mtp 2 mamba", "recompute"), row("mtp 5 mamba repeated", "small", **WEIGHED)],
}


@pytest.mark.slow
def test_steps_are_the_stock_schedules():
    assert without_labels() is WithoutLabels.FAILS, "the suite's release"
    said = printed_by_newer("tests.core.layers.test_mtp_newer")
    assert said == f"0.19.2: {len(ROWS)} rows and more"


def main():
    """See the top of the file."""
    assert all(map(judge.is_possible, (*ROWS, *chain(*ON_RANKS.values()))))
    every = {"one": ROWS, **ON_RANKS}
    lines = [line for layout, rows in every.items() for line in judge.run(layout, rows)]
    release = megatron.core.__version__.partition("+")[0]
    told = f"{release}: {len(ROWS)} rows and more"
    sys.stdout.write("\n".join([*lines, "not as they say" if lines else told]) + "\n")


if __name__ == "__main__":
    main()
