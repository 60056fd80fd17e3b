"""What is wrong today, and what Limits says that no check can see: data, in one place.

A line of `KNOWN` says that a value fails in these modes, in the simplest trainer that has it. Fix
it and the line must go: the tests run that trainer, and a line that no longer fails is an error.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.oracle.case import Case, settle
from tests.oracle.judge import ENDED, HUNG, WRONG, Verdict

ALL, SHARED, STOCK, AUTO = ("on", "auto", "observe"), ("on", "auto"), ("auto", "observe"), ("auto",)


class Known(NamedTuple):
    """A line: values of axes, modes that fail, and the item of issue 27 (or what was found)."""

    values: dict[str, str]
    modes: tuple[str, ...]
    item: str
    beside: dict[str, str] | None = None  # what the simplest trainer needs for it to fail
    may: tuple[str, ...] = ()  # modes in which others fail, too

    @property
    def case(self) -> Case:
        return settle(Case(0, **{**(self.beside or {}), **self.values}))


class Permitted(NamedTuple):
    """A sentence of docs/operations.md (Limits) that says what no check can see.

    kinds: what may differ; empty: anything.
    """

    values: dict[str, str]
    sentence: str
    kinds: tuple[str, ...] = ()


_STATIC = {"lengths": "equal"}
_SEVERAL = "Limits: a forward step calls the model once"
_WRAPPED = "a wrapper that owns the language model, or exposes its decoder alone"
KNOWN: tuple[Known, ...] = (
    # Silently wrong.
    *(
        Known({"wrapper": value}, SHARED, _WRAPPED)
        for value in ("decoder_property", "decoder_derived", "embedding_property")
    ),
    *(
        Known({"wrapper": value}, SHARED, "the call captured is not the language model's own")
        for value in ("super_derived", "instance_forward")
    ),
    *(
        Known({"context": value}, SHARED, "what a call is given does not arrive by identity")
        for value in ("empty_dict", "empty_list", "object")
    ),
    Known({"model": "seq_aux_loss", "form": "thd"}, SHARED,
          "seq_aux_loss takes a pack as one sample", _STATIC),
    *(
        Known({"batch": value}, ALL, "one object with other values")
        for value in ("dict_refilled", "list_refilled", "slots_refilled", "object_refilled")
    ),
    *(
        Known({"batch": value}, ALL, "one static buffer: numpy, .data.copy_", _STATIC)
        for value in ("static_data", "static_numpy")
    ),
    Known({"batch": "static_copy"}, STOCK, "one static buffer: auto and observe end", _STATIC),
    Known({"static": "packing"}, ALL, "one static buffer: cu_seqlens",
          {"batch": "static_copy", "form": "thd"}),
    Known({"static": "masks"}, ALL, "one static buffer: an attention mask",
          {"batch": "static_copy", "mask": "future_one"}),
    Known({"draws": "both"}, ALL, "numbers drawn in forward step and loss"),
    Known({"session": "scale_changed"}, SHARED, "softmax_scale changed after the first step"),
    Known({"session": "inv_freq_changed"}, SHARED, "inv_freq changed after the first step"),
    Known({"hook": "clip"}, SHARED, "hooks on parameters that clip"),
    Known({"hook": "regulariser"}, SHARED, "activation regularisers inside a layer"),
    Known({"hook": "activation_read"}, SHARED, "activation regularisers read by the loss"),
    # Ended where stock goes on.
    *(
        Known({"wrapper": value}, ALL, "wrappers without `decoder`")
        for value in ("owns", "owns_derived", "no_decoder")
    ),
    *(Known({"model": v}, AUTO, "RouterReplay") for v in ("record", "replay_forward")),
    *(
        Known({"calls": value}, AUTO, "a forward step that calls the model twice")
        for value in ("reference_before", "twice")
    ),
    Known({"calls": "not_at_all"}, STOCK, "a forward step that does not call the model"),
    *(
        Known({"head": value}, AUTO, "outputs that are not per position")
        for value in ("dataclass", "scalar")
    ),
    Known({"head": "n_minus_1"}, AUTO, "outputs of n-1 positions", may=("on",)),
    Known({"around": "reentrant"}, SHARED, "a reentrant checkpoint around the model call"),
    *(
        Known({"around": value}, STOCK, "what cannot be suspended around the model call")
        for value in ("checkpoint", "saved_hooks", "function_mode")
    ),
    Known({"model": "seq_aux_loss", "form": "thd", "lengths": "varied"}, AUTO,
          "found: seq_aux_loss with packed samples of several lengths ends auto", may=("on",)),
    Known({"model": "seq_aux_loss", "form": "thd_padded"}, SHARED,
          "seq_aux_loss takes a pack as one sample"),
    *(
        Known({"around": "reentrant", "dropout": value}, STOCK,
              "found: dropout in a reentrant checkpoint is drawn anew in backward")
        for value in ("hidden", "attention")
    ),
    # Several ranks: a hang costs a test minutes, so these are run by hand (--ranks 2).
    Known({"layout": "dp2", "session": "uneven"}, AUTO,
          "data-parallel ranks that call the schedule a different number of times hang",
          may=("on", "observe")),
    Known({"layout": "ep2", "exchange": "in_loss"}, AUTO,
          "losses that exchange over data-parallel ranks, with experts: hang", may=("on",)),
    # Not in the issue.
    Known({"reads": "all"}, AUTO, "found: a loss that reads positions without loss ends auto"),
    Known({"session": "mode_in_step"}, STOCK,
          "found: train() and eval() in a forward step are put back"),
    Known({"raises": "data_ends"}, STOCK,
          "found: data that ends early is a UserError, where stock raises StopIteration"),
)  # fmt: skip
_WRITTEN = (
    "This does not cover lists, tensors that are written in place, attributes of classes, modules"
    " and models, or what one loss leaves for the *next* forward step: with these a loss can be"
    " silently wrong."
)
_ORDER = (
    "Losses are called in the order of their microbatches, except when a backward needs one sooner"
    " because a microbatch holds rollouts of several prompts."
)
_UNREAD = (
    "If a model call has a `loss_mask`, or the callback `trained` is given, positions without loss"
    " are zero in the model's output, even in the middle of a sample"
)
PERMITTED: tuple[Permitted, ...] = (
    *(
        Permitted({"writes": value}, _WRITTEN)
        for value in (
            *("list_item", "object_in_list", "tensor", "class_attribute", "model_attribute"),
            *("global_in_helper", "deque"),
        )
    ),
    Permitted({"static": "weight"}, _WRITTEN),
    *(Permitted({"static": name, name: "absent"}, _WRITTEN) for name in ("labels", "loss_mask")),
    Permitted({"leaves": "next_step"}, _WRITTEN),
    Permitted({"leaves": "ema"}, _ORDER, ("kept",)),
    Permitted({}, _ORDER, ("order",)),
    *(Permitted({"draws": value}, _ORDER) for value in ("loss", "python", "numpy")),
    Permitted({"reads": "all_detached"}, _UNREAD, ("returned",)),
)
"""The first line that fits counts."""


def explanation(case: Case, mode: str, verdict: Verdict) -> str | None:
    """Which line of the tables a failure is, if any: "known: ..." or "Limits: ..."."""
    if verdict.what not in (WRONG, ENDED, HUNG):
        return None
    for line in KNOWN:
        if mode in (*line.modes, *line.may) and _fits(case, line.values):
            return f"known: {line.item}"
    if verdict.what == WRONG:
        for permitted in PERMITTED:
            kinds = (*permitted.kinds, "order")
            seen = not permitted.kinds or all(kind in kinds for kind in verdict.kinds)
            if seen and _fits(case, permitted.values):
                return f"Limits: {permitted.sentence[:40]}..."
    return None


def _fits(case: Case, values: dict[str, str]) -> bool:
    return all(getattr(case, name) == value for name, value in values.items())
