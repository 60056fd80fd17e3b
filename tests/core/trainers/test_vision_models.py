"""Vision-language models of trainers, from their own sources, under both schedules."""

from __future__ import annotations

import pytest

from megatron_prefix.lab.runtime import Layout
from tests.core.alignment.test_vision import PADDED, ROWS, Case, compare
from tests.core.trainers import vision_models
from tests.harness.cases import check_cases
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


def compare_model(name: str, layout: Layout) -> None:
    """A model under both schedules."""
    kind, make = vision_models.MODELS[name]
    form, splits = ROWS if layout.cp > 1 else PADDED, name in SPLITS
    with Kept():
        build = {"make": make, "num_layers": 3 * layout.pp}  # more than deepstack has
        build["freeze"] = splits and layout.cp > 1  # else it is refused
        compare(Case(form, kind, build, splits=splits), layout)


@pytest.mark.skipif(bool(WHY), reason=WHY)
@pytest.mark.parametrize("job", list(LAYOUTS))
def test_models_of_trainers(job: str) -> None:
    layout = LAYOUTS[job]
    names = [one for one in vision_models.MODELS if layout.cp == 1 or one not in WITHOUT_CP]
    check_cases(layout, dict(zip(names, names, strict=True)), compare_model)
