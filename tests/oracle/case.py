"""A case: what a trainer, its model and its layout are like, drawn from a seed.

An axis has plain values, of which every trainer has one, and odd ones, of which a case has few:
what breaks a step should be seen alone. `settle` takes back what does not go together, always in
the same order, so a seed means one case for ever.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import make_dataclass, replace
from typing import NamedTuple

from tests.cases import FAMILIES, LAYOUTS


class Axis(NamedTuple):
    """Values of one field of a case; the first plain one is the simplest. More values that only
    rows have (tests/cases.py) are not drawn: a seed means one case for ever."""

    plain: tuple[str, ...]
    odd: tuple[str, ...] = ()

    @property
    def values(self) -> tuple[str, ...]:
        return (*self.plain, *self.odd)


def _axis(plain: str, odd: str = "") -> Axis:
    """Of values that are words."""
    return Axis(tuple(plain.split()), tuple(odd.split()))


AXES: dict[str, Axis] = {
    # The model.
    "model": _axis("gqa dense qk_norm mla windows",
        "aux_loss seq_aux_loss z_loss record replay_forward gated_delta_net expert_bias mtp"),
    "dtype": _axis("float64 float32"),
    # "bare": ranks without a wrapper that reduces, each of which looks at its own gradients.
    "ddp": _axis("none wrapped", "bare overlapped"),
    "recompute": _axis("none full"),
    "dropout": _axis("none", "hidden attention"),
    # How the model is wrapped, and what it returns.
    "wrapper": _axis("none",
        "owns owns_derived decoder_property decoder_derived no_decoder super_plain super_derived"
        " instance_forward embedding_property"),
    "head": _axis("none", "dict tuple dataclass n_minus_1 scalar log_probs value"),
    # Batches.
    "form": _axis("rows one thd thd_padded"),
    "lengths": _axis("varied equal"),
    "tree": _axis("groups shuffled turns copies", "unshared on_all_ranks"),
    "batch": _axis("fresh",
        "dict_refilled list_refilled slots_refilled object_refilled static_copy static_data"
        " static_numpy tensordict index get_next"),
    "static": _axis("all", "tokens labels loss_mask packing masks weight"),
    "mask": _axis("none", "causal causal_cut pad_2d padding_mask future future_one"),
    "positions": _axis("none given"),
    "arguments": _axis("keyword", "positional mixed"),
    "context": _axis("none", "empty_dict empty_list object"),
    # The loss.
    "labels": _axis("given absent"), "loss_mask": _axis("given absent"),
    "loss": _axis("token_mean token_sum", "per_sample sequence entropy preference last distil"),
    "in_place": _axis("no", "div masked_fill"), "returns": _axis("two three per_token"),
    "reads": _axis("masked", "all_detached all"),
    # What is written where.
    "writes": _axis("nothing self_attribute",
        "closure dict_item list_item object_in_list tensor class_attribute model_attribute"
        " module_global global_in_helper deque"),
    "leaves": _axis("nothing list", "dict counter tensor next_step ema"),
    "draws": _axis("nothing", "step loss both python numpy"),
    "calls": _axis(
        "once", "reference_before reference_in_loss other_before other_in_loss twice not_at_all",
    ),
    "around": _axis(
        "none", "reentrant checkpoint autocast autocast_off saved_hooks function_mode grad_switch",
    ),
    "hook": _axis("none", "clip regulariser activation_read output_scale noise functional_dropout"),
    "session": _axis("train evaluate evaluate_then_train train_thrice",
        "scale_changed inv_freq_changed train_eval_mixed mode_in_step uneven"
        " evaluate_with_gradients train_long"),
    "exchange": _axis("none", "in_loss in_step"),
    "raises": _axis("none", "before_call after_call in_loss data_ends"),
    # What a forward step sets on the model for its microbatch, and what its loss is scaled by.
    "sets": _axis("nothing", "slot number flag tensor buffer dict list object z_loss_coeff"),
    "scale": _axis("none", "constant by_microbatch by_list_item"),
    # What a trainer does from its fourth step on.
    "late": _axis("nothing", "second_call outside_mask"),
    # Ours.
    "options": _axis("small whole recompute light", "across_ranks"),
}  # fmt: skip
DRAWN_LAYOUTS = {1: ("one",), 2: ("tp2", "tp2_sp", "pp2", "cp2", "dp2", "ep2")}
"""By number of ranks."""
EXPERTS = tuple(name for name, family in FAMILIES.items() if family.preset == "tiny-moe")
"""Models with experts."""
_LAST = {name: axis.plain[0] for name, axis in AXES.items()}
_FIELDS = [("seed", int), ("layout", str, "one"), *((n, str, v) for n, v in _LAST.items())]


class Case(make_dataclass("Fields", _FIELDS, frozen=True)):
    """One trainer; every field but the first two is an axis."""

    def __str__(self) -> str:
        """Seed, layout, and what is not the simplest."""
        changed = [f"{name}={value}" for name, value in self.changes().items()]
        return " ".join([f"seed {self.seed}", self.layout, *changed])

    def changes(self) -> dict[str, str]:
        found = {name: getattr(self, name) for name in AXES}
        return {name: value for name, value in found.items() if value != _LAST[name]}

    def without(self, name: str) -> Case:
        """The same with one axis at its simplest."""
        return settle(replace(self, **{name: _LAST[name]}))

    @property
    def ranks(self) -> int:
        return LAYOUTS[self.layout].world_size

    @property
    def packed(self) -> bool:
        return self.form.startswith("thd")


def draw(seed: int, ranks: int = 1, odd: int | None = None, **fixed: str) -> Case:
    """The case of a seed.

    Args:
        odd: how many axes have an odd value; None: one to three.
        fixed: values that axes have.
    """
    rng = random.Random(f"{seed} {ranks}")
    layout = rng.choice(DRAWN_LAYOUTS[ranks])
    values = {name: rng.choice(axis.plain) for name, axis in AXES.items()}
    if rng.random() < 0.8:
        values["dtype"] = "float64"
    number = odd if odd is not None else rng.choice((1, 1, 1, 2, 2, 3))
    with_odd = [name for name, axis in AXES.items() if axis.odd]
    for name in rng.sample(with_odd, min(number, len(with_odd))):
        values[name] = rng.choice(AXES[name].odd)
    if values["static"] != _LAST["static"]:  # which nothing but a static batch has
        values["batch"] = rng.choice(("static_copy", "static_data", "static_numpy"))
    if values["loss"] == "last":  # which nothing but a head for rewards has
        values |= {"head": "value", "loss_mask": "absent"}
    if values["sets"] == "z_loss_coeff":
        values["model"] = "z_loss"
    if values["tree"] == "on_all_ranks" or values["ddp"] == "bare":  # seen only where prompts cross
        values |= {"tree": "on_all_ranks", "options": "across_ranks"}
    if values["static"] == "masks" and values["mask"] == "none":
        values["mask"] = "future_one"  # which is not the same in every microbatch
    return settle(Case(seed, **{"layout": layout, **values, **fixed}))


def alone(ranks: int = 1) -> Iterator[Case]:
    """Every value of every axis in the simplest trainer in which it can be."""
    for name, axis in AXES.items():
        for value in axis.values:
            for layout in DRAWN_LAYOUTS[ranks]:
                for help_ in _HELP.get((name, value), _HELP.get((name, ""), ({},))):
                    case = settle(Case(0, layout, **{**help_, name: value}))
                    if getattr(case, name) == value:
                        yield case


_HELP: dict[tuple[str, str], tuple[dict[str, str], ...]] = {
    ("static", "packing"): ({"batch": "static_copy", "form": "thd"},),
    ("static", "masks"): ({"batch": "static_copy", "mask": "future_one"},),
    ("static", ""): ({"batch": "static_copy"},),
    ("in_place", ""): ({"labels": "absent"},),
    ("loss", "entropy"): ({"labels": "absent"},),
    ("loss", "distil"): ({"labels": "absent"},),
    ("loss", "last"): ({"head": "value", "labels": "absent", "loss_mask": "absent"},),
    ("head", "value"): ({"labels": "absent"},),
    ("around", "autocast"): ({"dtype": "float32"},),
    ("reads", ""): ({"loss_mask": "given"},),
    ("model", "seq_aux_loss"): (
        {"form": "rows", "lengths": "equal"},
        {"form": "thd", "lengths": "equal"},
    ),
    ("model", "aux_loss"): ({"form": "rows"}, {"form": "thd"}),
    ("model", "expert_bias"): ({"ddp": "wrapped"},),
    ("sets", "z_loss_coeff"): ({"model": "z_loss"},),
    ("scale", ""): ({}, {"model": "aux_loss"}, {"model": "mtp"}),
    ("session", "evaluate_with_gradients"): (
        {},
        {"model": "expert_bias", "ddp": "wrapped"},
        {"model": "aux_loss"},
    ),
    ("ddp", "bare"): ({"tree": "on_all_ranks", "options": "across_ranks"},),
    ("ddp", "overlapped"): ({"model": "aux_loss"},),
    ("tree", "on_all_ranks"): ({"options": "across_ranks", "ddp": "wrapped"},),
    ("options", "across_ranks"): ({"tree": "on_all_ranks", "ddp": "wrapped"},),
}
"""What a value needs beside it."""


def _rules(case: Case) -> Iterator[tuple[bool, dict[str, str]]]:
    """(whether two things do not go together, what is taken back), the first that holds counts."""
    # long: a table of rules
    one = case.layout == "one"
    moe = case.model in EXPERTS
    static = case.batch.startswith("static")
    value = case.head == "value"  # another output layer, and no class around the model
    head = case.head != "none" and not value
    wrapped = case.wrapper != "none" or head or case.context != "none"
    delta, reentrant = case.model == "gated_delta_net", case.around == "reentrant"
    replays, recomputes = case.model in ("record", "replay_forward"), case.recompute != "none"
    samples = ("per_sample", "sequence", "preference", "last")  # losses on whole samples
    yield case.layout == "ep2" and not moe, {"model": "aux_loss"}
    yield moe and case.layout in ("tp2", "tp2_sp", "cp2", "pp2"), {"model": "gqa"}
    yield delta and (case.packed or not one), {"model": "gqa"}
    # Stock is wrong here; and what is refused here is tested elsewhere.
    yield case.model == "mla" and case.layout == "tp2", {"model": "gqa"}
    yield not one and case.ddp == "none", {"ddp": "wrapped"}
    yield case.ddp == "bare" and case.layout != "dp2", {"ddp": "none" if one else "wrapped"}
    yield case.ddp == "overlapped" and one, {"ddp": "wrapped"}
    together = case.layout in ("dp2", "ep2")
    yield case.tree == "on_all_ranks" and not together, {"tree": "groups"}
    yield case.options == "across_ranks" and not together, {"options": "small"}
    # Near ties between experts, and float32 recurrences, have no place in a comparison.
    yield (moe or delta) and case.dtype != "float64", {"dtype": "float64"}
    yield case.around == "autocast" and (moe or delta or not one), {"around": "none"}
    yield case.around == "autocast" and case.dtype != "float32", {"dtype": "float32"}
    # Megatron's local layers have no backward under autocast.
    yield case.around == "autocast" and case.session != "evaluate", {"session": "evaluate"}
    yield not static and case.static != "all", {"static": "all"}
    # Stock's warm-up still needs what the next microbatch overwrites.
    yield static and case.layout == "pp2", {"batch": "fresh", "static": "all"}
    yield static and case.lengths != "equal", {"lengths": "equal"}
    yield case.static == "packing" and not case.packed, {"static": "all"}
    yield case.static == "masks" and case.mask == "none", {"static": "all"}
    # Multi-token prediction reads labels, positions and its own layers.
    ahead = case.model == "mtp"
    yield ahead and not one, {"model": "gqa"}
    yield ahead and (case.labels == "absent" or wrapped or value), {"model": "gqa"}
    yield ahead and case.positions == "none", {"positions": "given"}
    yield ahead and case.mask != "none", {"mask": "none"}
    # Megatron's own layer fails in a pack that is recomputed.
    yield ahead and case.packed and case.recompute == "full", {"recompute": "none"}
    # Masks of rows.
    yield case.packed and case.mask not in ("none", "padding_mask"), {"mask": "none"}
    yield not one and case.mask != "none", {"mask": "none"}
    yield delta and case.mask != "none", {"mask": "none"}
    yield case.layout in ("cp2", "tp2_sp") and case.form == "thd", {"form": "thd_padded"}
    yield case.layout == "cp2" and case.positions == "given", {"positions": "none"}
    # What needs logits, and heads that make their own.
    yield value and case.labels == "given", {"labels": "absent"}
    yield value and case.loss in ("entropy", "distil"), {"loss": "token_mean"}
    yield value and case.wrapper.endswith("derived"), {"wrapper": "none"}
    # Its embedding is tied: Megatron sums the first stage's gradients with this head's.
    yield value and case.model == "qk_norm" and case.layout == "pp2", {"model": "gqa"}
    yield case.loss == "last" and not value, {"loss": "token_mean"}
    yield case.loss == "last" and case.loss_mask == "given", {"loss_mask": "absent"}
    yield case.loss == "last" and case.reads != "masked", {"reads": "masked"}
    yield head and case.labels == "absent", {"labels": "given"}
    yield head and case.layout not in ("one", "dp2", "ep2"), {"head": "none"}
    logits = case.loss in ("entropy", "distil")
    yield head and logits, {"loss": "token_mean"}
    yield logits and case.labels == "given", {"labels": "absent"}
    yield case.in_place != "no" and case.labels == "given", {"in_place": "no"}
    yield case.head == "scalar" and case.loss in samples, {"loss": "token_mean"}
    yield case.head == "scalar" and case.calls == "twice", {"calls": "once"}
    yield case.reads != "masked" and (head or case.loss_mask == "absent"), {"reads": "masked"}
    yield case.layout == "cp2" and case.loss in samples, {"loss": "token_mean"}
    yield case.head == "n_minus_1" and case.layout == "cp2", {"head": "none"}
    yield wrapped and case.layout in ("pp2", "cp2"), {
        "wrapper": "none", "head": "none", "context": "none",
    }  # fmt: skip
    own = head or case.context != "none"
    yield own and case.wrapper == "instance_forward", {"wrapper": "none"}
    yield head and case.arguments == "positional", {"arguments": "keyword"}
    yield head and case.calls.startswith("other"), {"calls": "once"}
    yield case.head == "scalar" and case.wrapper.endswith("derived"), {"wrapper": "none"}
    yield reentrant and case.in_place != "no", {"in_place": "no"}
    yield delta and wrapped, {"model": "gqa"}
    yield case.context != "none" and case.arguments == "positional", {"arguments": "keyword"}
    # More than one call, or none, does not fit the stock pipeline's messages.
    yield case.calls != "once" and case.layout == "pp2", {"calls": "once"}
    yield case.calls.startswith("other") and case.layout not in ("one", "dp2"), {"calls": "once"}
    yield case.calls == "not_at_all" and case.ddp == "wrapped" and one, {"ddp": "none"}
    yield case.calls == "not_at_all" and not one, {"calls": "once"}
    yield case.calls == "not_at_all" and case.head != "none", {"head": "none"}
    yield value and case.calls.startswith("other"), {"calls": "once"}
    yield case.calls != "once" and reentrant, {"calls": "once"}
    yield replays and case.calls != "once", {"calls": "once"}
    yield replays and not one, {"model": "aux_loss"}
    yield replays and recomputes, {"recompute": "none"}
    yield replays and case.around != "none", {"around": "none"}
    yield (
        case.around in ("reentrant", "checkpoint") and (moe or case.layout != "one"),
        {"around": "none"},
    )
    yield reentrant and case.head in ("dict", "dataclass", "tuple"), {"around": "none"}
    yield reentrant and recomputes, {"recompute": "none"}
    yield reentrant and case.hook == "activation_read", {"hook": "none"}
    yield (
        case.around in ("checkpoint", "grad_switch", "saved_hooks") and recomputes,
        {"recompute": "none"},
    )
    yield case.hook == "activation_read" and recomputes, {"recompute": "none"}
    yield case.hook != "none" and case.layout in ("pp2", "cp2", "tp2_sp"), {"hook": "none"}
    yield case.dropout != "none" and not one, {"dropout": "none"}
    yield case.session == "uneven" and case.layout != "dp2", {"session": "train"}
    yield case.exchange != "none" and case.layout not in ("dp2", "ep2", "one"), {"exchange": "none"}
    yield case.raises != "none" and case.layout == "pp2", {"raises": "none"}
    yield case.session == "train_eval_mixed" and delta, {"session": "train"}
    yield case.tree == "unshared" and case.static == "packing", {"tree": "groups"}
    yield case.sets != "nothing" and not (one or together), {"sets": "nothing"}
    yield case.sets == "z_loss_coeff" and case.model != "z_loss", {"sets": "nothing"}
    # A pipeline's backwards come when other forwards have been.
    yield case.scale.startswith("by_") and case.layout == "pp2", {"scale": "none"}
    ends = case.raises != "none" or case.around == "autocast"  # before there is a late step
    yield case.late != "nothing" and ends, {"late": "nothing"}
    yield case.late != "nothing" and case.session != "train_long", {"session": "train_long"}
    again = case.late == "second_call"
    yield again and case.calls != "once", {"late": "nothing"}
    yield again and (case.layout == "pp2" or case.head == "scalar"), {"late": "nothing"}
    yield again and reentrant, {"late": "nothing"}
    yield again and replays, {"late": "nothing"}
    outside = case.late == "outside_mask"
    yield outside and (head or case.loss_mask == "absent"), {"late": "nothing"}
    yield outside and case.reads != "masked", {"reads": "masked"}
    # Static packs are of one length, which a shuffle would undo.
    yield static and case.packed and case.tree == "shuffled", {"tree": "groups"}


def settle(case: Case) -> Case:
    for _ in range(100):
        for clash, change in _rules(case):
            if clash and any(getattr(case, name) != value for name, value in change.items()):
                case = replace(case, **change)
                break
        else:
            return case
    raise ValueError(f"the rules do not settle: {dataclasses.asdict(case)}")
