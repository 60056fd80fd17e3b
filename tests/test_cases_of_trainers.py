"""Rows of odd trainers: those that another order of forward steps and losses would change keep the
stock schedule's steps bit for bit, and are told why; others are shared from their second step."""

from dataclasses import replace

import pytest

from megatron_prefix.refusals import table
from tests import judge
from tests.cases import auto_row, row
from tests.oracle.model import SETS

pytestmark = pytest.mark.usefixtures("on_one_rank")
ODD = [
    auto_row(table.TWO_CALLS.fix, calls="twice"),
    auto_row(table.NO_CALL.fix, calls="not_at_all", ddp="none"),
    auto_row(table.CALL_IN_LOSS.fix, calls="reference_in_loss"),
    auto_row(table.BESIDE_LOGITS.fix, model="switched", calls="reference_before", labels="absent"),
    auto_row(table.SWITCHED.fix, model="switched", calls="adapters_off"),
    auto_row(table.TORCH_MODES.fix, around="function_mode"),
    auto_row(table.CALL_IN_BACKWARD.fix, around="reentrant"),
    auto_row(table.OTHER_SHAPE.fix, head="shortened"),
    auto_row(table.OTHER_FORWARD.fix, wrapper="super_derived"),
    *(
        auto_row(table.OVERWRITTEN.fix, batch=batch, lengths="equal")
        for batch in ("static_copy", "static_data", "static_numpy")
    ),
    auto_row(table.OVERWRITTEN.fix, writes="list_item"),
    *(
        auto_row(table.RANDOM_IN_BOTH.fix, draws=draws)
        for draws in ("both", "python both", "numpy both")
    ),
    auto_row(table.LOSS_LEAVES.fix, leaves="next_step"),
    auto_row(table.DRAWN_AGAIN.fix, batch="dict_refilled"),
    auto_row(table.STRAY_GRADIENT.fix, reads="all"),
    auto_row("copies of a prompt would drop different values", dropout="hidden", draws="step"),
    # Random numbers that the model draws: by name of the generator.
    *(
        auto_row(f"random numbers ({generator}", hook=hook)
        for hook, generator in {
            "noise": "torch)", "noise of attention": "torch)", "functional_dropout": "torch)",
            "draws of the tracker": "Megatron's model-parallel-rng)",
            "draws of Python": "Python's random)", "draws of NumPy": "NumPy)",
            "draws of a module": "noise of TransformerLayer",
        }.items()
    ),
    # State of a microbatch, as a segment serves several: by name of the place.
    *(auto_row(path, sets=name) for name, (_, path) in SETS.items() if path),
    auto_row("config.moe_z_loss_coeff", model="z_loss", sets="z_loss_coeff"),
    auto_row("is overwritten by a later forward step", scale="tensor"),
]  # fmt: skip
ORDINARY = [
    auto_row("", False, True, draws="step"),
    auto_row("", False, True, draws="python"),
    auto_row("", False, True, hook="forks for nothing"),
    auto_row("", False, True, wrapper="decoder_property"),
    *(
        auto_row("", False, True, True, session=session)
        for session in ("scale_changed", "inv_freq_changed")
    ),
    auto_row("", False, True, sets="once"),
    *(
        auto_row("", False, True, model="switched", calls=calls, loss="preference", ddp="none")
        for calls in ("reference_before", "reference_after")
    ),
    *(auto_row("", False, True, writes=where) for where in ("closure", "module_global")),
]
KEPT = [
    row("gqa", "small", writes=where)
    for where in ("self_attribute", "closure", "dict_item", "module_global")
]
"""What a forward step keeps for its loss: suspended steps have each their own."""
UNDONE = (False, True, True, False, False, False)
"""What a trainer does from its fourth step on is met while that runs."""
LATE = [
    auto_row(table.TWO_CALLS.fix, *UNDONE, late="second_call", draws="python"),
    auto_row(table.TWO_CALLS.fix, *UNDONE, late="second_call", batch="get_next"),
    auto_row(table.TWO_CALLS.fix, *UNDONE, late="second_call", session="evaluate_long"),
    auto_row(
        table.TWO_CALLS.fix, *UNDONE, late="second_call", labels="absent", in_place="div",
        draws="loss",
    ),
    auto_row(table.TWO_CALLS.fix, *UNDONE, late="second_call", model="expert_bias"),
    auto_row(table.STRAY_GRADIENT.fix, *UNDONE, late="outside_mask", draws="numpy"),
    auto_row(table.STRAY_GRADIENT.fix, *UNDONE, late="outside_mask", ddp="none"),
    auto_row(table.STRAY_GRADIENT.fix, *UNDONE, late="outside_mask", model="expert_bias"),
    *(
        auto_row(table.SWITCHED.fix, *UNDONE, late="sets", sets=name)
        for name in ("number", "buffer", "dict", "class", "global", "hook", "parameter")
    ),
    auto_row("", *UNDONE[:5], True, late="sets midway", sets="slot"),
    replace(
        auto_row("final_layernorm.weight", *UNDONE[1:], late="sets midway", sets="parameter"),
        expects="ends", shares=(False, True, True, True),
    ),
]  # fmt: skip
SEEN_IN_FIRST_STEPS = {
    "buffer's data", "weight's data", "draws of Python", "draws of NumPy", "draws of a module",
}  # fmt: skip
"""What no step sees in which segments run; nor is a scale seen that is written in place."""


def in_mode(each, mode, **changes):
    return judge.complaints(replace(each, mode=mode, shares=(), **changes))


@pytest.mark.parametrize("each", ODD, ids=str)
def test_an_odd_trainer_keeps_the_stock_schedule(each):
    """And mode on refuses it by name; mode observe changes nothing."""
    assert judge.complaints(each) == []
    if not {*each.values.values()} & SEEN_IN_FIRST_STEPS and "scale" not in each.values:
        says = table.NO_CALL.fix if "reentrant" in str(each) else each.says
        assert in_mode(each, "on", expects="refused", says=says) == []
    if "sets" not in each.values and "hook" not in each.values:
        assert in_mode(each, "observe") == []


@pytest.mark.parametrize("each", ORDINARY, ids=str)
def test_an_ordinary_trainer_shares_from_its_second_step(each):
    assert judge.complaints(each) == []
    assert in_mode(each, "observe", expects="fallback") == []


@pytest.mark.parametrize("each", [*KEPT, *LATE], ids=str)
def test_a_later_step_and_its_kind_are_the_stock_schedules(each):
    assert judge.complaints(each) == []
