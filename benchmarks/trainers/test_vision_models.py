"""Vision-language models of trainers, from their own sources, under both schedules."""

import dataclasses

import pytest

from benchmarks.trainers import vision_models, vision_sources
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.layers.releases import is_since
from tests.core.alignment.test_vision import PADDED, ROWS, SINGLE, Case, compare
from tests.harness.ranks import check_cases
from tests.harness.vision import Kept

WHY = vision_sources.missing()
LAYOUTS = {
    "one rank": Layout(), "TP2 SP": Layout(tp=2, sequence_parallel=True), "PP2": Layout(pp=2),
    "CP2": Layout(cp=2), "DP2": Layout(dp=2),
}  # fmt: skip


FURTHER = {
    "fields": {"mtp_num_layers": 2}, "mtp_loss_scaling_factor": 3.0,
    "calculate_per_token_loss": True,
}  # fmt: skip
"""Options of multi-token prediction; the loss of every weight counts, or 0.16 divides by zero."""


def compare_model(given, layout):
    """A model under both schedules; "NAME + MTP": with multi-token prediction."""
    name, _, further = given.partition(" + ")
    model = vision_models.MODELS[name]
    form = PADDED if layout.cp == 1 else SINGLE if model.alone else ROWS
    # In packs mbridge's models leave it to the caller which ends labels move by.
    is_row = model.rows or (further and name.startswith("mbridge") and layout.cp == 1)
    form = dataclasses.replace(PADDED, packed=False) if is_row else form
    with Kept():
        build = {"num_layers": 3 * layout.pp, **model.build}  # more than deepstack has
        build |= {"make": model.make, "spec": model.spec, **(FURTHER if further else {})}
        shares = model.shares and layout.tp * layout.cp > 1
        build["freeze"] = shares or (model.splits and layout.cp > 1)  # else it is refused
        across = {"across_ranks": "on"} if layout.dp > 1 else {}
        case = Case(
            form, model.kind, build, across, cuts_labels=model.cuts_labels,
            splits=model.splits or shares or form is SINGLE,  # its tower also runs without an image
        )  # fmt: skip
        compare(case, layout)


@pytest.mark.skipif(bool(WHY), reason=WHY)
@pytest.mark.parametrize("job", list(LAYOUTS))
def test_models_of_trainers(job):
    layout = LAYOUTS[job]
    models = {name: one for name, one in vision_models.MODELS.items() if not one.heard}
    names = [name for name, model in models.items() if layout.cp == 1 or model.takes_cp]
    names += [f"{name} + MTP" for name in names if is_since(models[name].further or "99")]
    check_cases(layout, dict(zip(names, names, strict=True)), compare_model)
