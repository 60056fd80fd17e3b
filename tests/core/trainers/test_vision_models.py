"""Vision-language models of trainers, from their own sources, under both schedules."""

from __future__ import annotations

import traceback

import pytest

from megatron_prefix.lab import runtime
from megatron_prefix.lab.runtime import Layout
from tests.core.alignment.test_vision import PADDED, ROWS, Case, compare
from tests.core.trainers import vision_models
from tests.harness.ranks import run_ranks
from tests.harness.vision import Kept

WHY = vision_models.missing()
LAYOUTS = {
    "one rank": Layout(),
    "TP2 SP": Layout(tp=2, sequence_parallel=True),
    "PP2": Layout(pp=2),
    "CP2": Layout(cp=2),
}
SPLITS = {"mbridge, Qwen3.5"}
"""Models whose tensor- and context-parallel ranks share the images of a call."""
WITHOUT_CP = {"mbridge, GLM-4V"}
"""Models that refuse context parallelism themselves."""


def run_models(layout: Layout, names: list[str]) -> dict[str, str]:
    """What went wrong with each model; "" for nothing."""
    runtime.initialize(layout)
    found = {}
    for name in names:
        kind, make = vision_models.MODELS[name]
        try:
            form = ROWS if layout.cp > 1 else PADDED
            with Kept():
                build = {"make": make, "num_layers": 3 * layout.pp}  # more than deepstack has
                splits = name in SPLITS
                build["freeze"] = splits and layout.cp > 1  # else it is refused
                compare(Case(form, kind, build, splits=splits), layout)
            found[name] = ""
        except Exception:  # noqa: BLE001  # the next one tells its own story
            found[name] = traceback.format_exc()
    runtime.shutdown()
    return found


@pytest.mark.skipif(bool(WHY), reason=WHY)
@pytest.mark.parametrize("job", list(LAYOUTS))
def test_models_of_trainers(job: str) -> None:
    layout = LAYOUTS[job]
    names = [one for one in vision_models.MODELS if layout.cp == 1 or one not in WITHOUT_CP]
    size = layout.tp * layout.pp * layout.cp
    failures = [
        f"{name}, rank {rank}:\n{text}"
        for rank, found in enumerate(run_ranks(size, run_models, layout, names))
        for name, text in found.items()
        if text
    ]
    assert not failures, "\n".join(failures)
