"""What is wrong today, and what Limits says that no check can see: data, in one place.

A line of `KNOWN` says that a value fails in these modes, in the simplest trainer that has it. Fix
it and the line must go: the tests run that trainer, and a line that no longer fails is an error.
"""

from typing import NamedTuple

from tests.oracle.case import Case, settle
from tests.oracle.judge import ENDED, HUNG, WRONG, Verdict

SHARED = ("on", "auto")


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
    """A sentence of docs/limits.md that says what no check can see.

    kinds: what may differ; empty: anything.
    """

    values: dict[str, str]
    sentence: str
    kinds: tuple[str, ...] = ()


KNOWN: tuple[Known, ...] = (
    Known({"wrapper": "instance_forward"}, SHARED, "a forward of the instance derives positions"),
    Known({"hook": "regulariser"}, SHARED, "activation regularisers inside a layer"),
)  # fmt: skip
_WRITTEN = "A helper that a forward step calls reads something that an earlier loss has set."
_ORDER = (
    "Losses are called in the order of their microbatches, except when a backward needs one sooner"
    " because a microbatch holds rollouts of several prompts."
)
_UNREAD = (
    "If a model call has a `loss_mask`, or the callback `trained` is given, positions without loss"
    " are zero in the model's output, even in the middle of a sample"
)
_TWICE = (
    "When a step runs twice (undone, or with `verify`), [side effects of your code happen twice]"
)
_INSIDE = "without gradients, a loss that reads activations which a hook has kept"
PERMITTED: tuple[Permitted, ...] = (
    *(
        Permitted({"hook": "activation_read", "session": session}, _INSIDE, ("returned", "kept"))
        for session in ("evaluate", "evaluate_then_train", "uneven")
    ),
    *(
        Permitted({"writes": value}, _WRITTEN)
        for value in "list_item object_in_list tensor class_attribute model_attribute"
        " global_in_helper deque".split()
    ),
    Permitted({"static": "weight"}, _WRITTEN),
    *(Permitted({"static": name, name: "absent"}, _WRITTEN) for name in ("labels", "loss_mask")),
    Permitted({"leaves": "next_step"}, _WRITTEN),
    Permitted({"leaves": "ema"}, _ORDER, ("kept",)),
    Permitted({}, _ORDER, ("order",)),
    *(Permitted({"draws": value}, _ORDER) for value in ("loss", "python", "numpy")),
    *(Permitted({"late": value}, _TWICE, ("kept",)) for value in ("second_call", "outside_mask")),
    Permitted({"reads": "all_detached"}, _UNREAD, ("returned",)),
    Permitted({"reads": "all", "loss": "preference"}, _UNREAD, ("returned",)),
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
