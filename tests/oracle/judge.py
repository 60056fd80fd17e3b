"""The same case by the stock schedule and by ours, and a verdict on what differs."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.device.tolerance import tolerance
from megatron_prefix.errors import UserError
from megatron_prefix.lab.numerics.compare import Conditions, Trace, compare
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.tree.cp_layout import Slices
from tests.cases import FAMILIES, OPTIONS
from tests.oracle import model as models
from tests.oracle.case import Case
from tests.oracle.trainer import SESSIONS, Call, Trainer, seed_all

EQUAL, REFUSED, FALLBACK = "equal", "refused", "fallback"
WRONG, ENDED, HUNG = "WRONG", "ENDED", "HUNG"
INVALID = "invalid"
GOOD = (EQUAL, REFUSED, FALLBACK)
ALL = ("gradients", "auxiliary", "returned", "kept", "losses")
"""Of a step that is not shared, which is Megatron's own bit for bit."""
MODES = ("on", "auto", "observe")


class Verdict(NamedTuple):
    """What became of a case in a mode.

    Attributes:
        what: `EQUAL` to rounding, shared; `REFUSED` by name in mode on; `FALLBACK`: the stock
            schedule, bit for bit; `WRONG` without an error; `ENDED` where stock goes on; `HUNG`;
            `INVALID` if stock itself cannot run it.
        kinds: what differs: returned, gradient, auxiliary, kept, order, random, reads, state, bits,
            raise.
        why: one line.
    """

    what: str
    kinds: tuple[str, ...] = ()
    why: str = ""


def run(case: Case, mode: str, stock: Sequence[Call] = ()) -> list[Call]:
    """All calls of the case's session with the stock schedule, or with ours in a mode.

    Args:
        stock: what the stock schedule has left: weights are updated by its gradients, so that each
            call begins with the same, and the limits are those of one step.
    """
    with models.AROUND[FAMILIES[case.model].around](case):
        parts = models.build(case)
        seed_all(case.seed)
        trainer = Trainer(case, parts, [call.gradients for call in stock])
        return list(trainer.session(_schedules(case, mode, trainer)))


def _schedules(case: Case, mode: str, trainer: Trainer) -> Callable[[], Any]:
    if mode == "stock":
        from megatron.core.pipeline_parallel import get_forward_backward_func

        return get_forward_backward_func
    fields = {"mode": mode, "min_gain": 0, "min_speedup": 1e-6, **OPTIONS[case.options]}
    parts = case.form == "thd_parts"
    callbacks = Callbacks(slices=Slices.CONTIGUOUS if parts else Slices.ZIGZAG)
    if case.model == "replay asked":
        callbacks = Callbacks(routes=lambda call: trainer.found[call.microbatch]["routes"])
    looks = len(SESSIONS[case.session]) > 1
    schedule = PrefixSchedule(PrefixConfig(**fields), callbacks, looks_first=looks)
    return lambda: schedule


def judge(case: Case, mode: str, stock: Sequence[Call], ours: Sequence[Call]) -> Verdict:
    broken = next((call.raised for call in stock if call.raised is not None), None)
    if broken is not None and case.raises == "none":
        return Verdict(INVALID, ("raise",), _line(broken))
    for index, expected in enumerate(stock):
        if index >= len(ours):
            raise ValueError("a session of ours is shorter without an exception")
        found = ours[index]
        verdict = _raises(mode, expected, found)
        if verdict is not None:
            return verdict
        if expected.raised is not None:
            return Verdict(EQUAL)
        bits = () if found.shared and mode != "observe" else ALL
        if mode != "observe" and any(call.shared for call in ours[:index]):
            # What these left is in `kept`, and may be in the losses of later steps.
            loose = ("kept", "losses") if _may_be_undone(case) else ("kept",)
            bits = () if case.leaves == "next_step" else tuple(n for n in bits if n not in loose)
        differences = list(_differences(case, expected, found, bits))
        if differences:
            kinds = tuple(dict.fromkeys(kind for kind, _ in differences))
            return Verdict(WRONG, kinds, f"call {index + 1}: {differences[0][1]}")
    shared = mode != "observe" and any(call.shared for call in ours)
    return Verdict(EQUAL if shared else FALLBACK)


def _may_be_undone(case: Case) -> bool:
    """Whether it may be seen in a step's losses that it cannot be shared; they are called twice."""
    return case.late != "nothing" or case.reads == "all"


def _raises(mode: str, expected: Call, found: Call) -> Verdict | None:
    if found.raised is None and expected.raised is None:
        return None
    if found.raised is None:
        return Verdict(WRONG, ("raise",), f"stock raises {_line(expected.raised)}")
    if mode == "on" and isinstance(found.raised, UserError):
        return Verdict(REFUSED, (), _line(found.raised))
    if expected.raised is None:
        return Verdict(ENDED, ("raise",), _line(found.raised))
    if not isinstance(found.raised, type(expected.raised)):
        return Verdict(
            WRONG, ("raise",), f"{_line(found.raised)} instead of {_line(expected.raised)}"
        )
    return None


def _line(error: BaseException | None) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1] if error and error.__traceback__ else None
    at = f" ({place.filename.rpartition('/')[2]}:{place.lineno})" if place else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}{at}"


# What differs -------------------------------------------------------------------------------------


def _differences(case, expected, found, bits):
    """(kind, one line) of everything that is not as stock left it, `bits` of it bit for bit."""
    for name in bits:
        if not _same(getattr(expected, name), getattr(found, name), 0.0):
            yield "bits", f"{name} are not bit for bit those of the stock schedule"
    if found.reads != expected.reads:
        yield "reads", f"reads {found.reads} instead of {expected.reads}"
    yield from _numbers(case, expected, found)
    undone = _may_be_undone(case) and found.losses == 2 * expected.losses  # and done again
    if found.losses != expected.losses and not undone:
        both = sorted(found.losses) == sorted(expected.losses)
        yield "order" if both else "kept", f"losses {found.losses}, stock {expected.losses}"
    for name, value in expected.kept.items():
        got = found.kept[name]
        if _same(value, got, _limit(case, expected)):
            continue
        if isinstance(value, list) and _same(_sorted(value), _sorted(got), _limit(case, expected)):
            yield "order", f"{name} is in another order"
        else:
            yield "kept", f"{name} is {_short(got)} instead of {_short(value)}"
    for name, value in expected.state.items():
        if not _same(value, found.state[name], 0.0):
            random = name in ("torch", "python", "numpy")
            yield "random" if random else "state", f"{name} is not as stock leaves it"


def _numbers(case: Case, expected: Call, found: Call) -> Iterator[tuple[str, str]]:
    numbers = [[log["number"] for log in call.returned] for call in (found, expected)]
    if numbers[0] != numbers[1]:
        yield "returned", f"logs of microbatches {numbers[0]} instead of {numbers[1]}"
        return
    traces = [_trace(call) for call in (expected, found)]
    conditions = _conditions(case, expected)
    for line in compare(*traces, conditions).failures:
        yield ("gradient" if line.startswith("gradient") else "auxiliary"), line
    for theirs, mine in zip(expected.returned, found.returned, strict=True):
        for name in ("loss", "values"):
            if not _same(theirs[name].double(), mine[name].double(), conditions.limit):
                text = f"{_short(mine[name])} instead of {_short(theirs[name])}"
                yield "returned", f"{name} of microbatch {theirs['number']}: {text}"


def _trace(call: Call) -> Trace:
    return Trace(torch.zeros(0), call.gradients, auxiliary=call.auxiliary)


def _conditions(case: Case, call: Call) -> Conditions:
    """Under autocast products are rounded to bf16: the limit is bf16's, of the same policy."""
    dtype = getattr(torch, case.dtype)
    widest = max((max(g.shape) for g in call.gradients.values()), default=128)
    found = Conditions(dtype, call.tokens, widest, depth=2, may_vanish=True)
    if case.around != "autocast":
        return found
    coarse = tolerance(torch.bfloat16, call.tokens, widest, depth=2)
    return replace(found, cancellation=coarse / found.limit)


def _limit(case: Case, call: Call) -> float:
    return _conditions(case, call).limit


def _same(expected: Any, found: Any, limit: float) -> bool:
    """Equal in structure; floats to a limit relative to the largest, NaN nowhere."""
    if type(expected) is not type(found):
        return False
    if isinstance(expected, dict):
        return expected.keys() == found.keys() and all(
            _same(value, found[name], limit) for name, value in expected.items()
        )
    if isinstance(expected, (list, tuple)):
        return len(expected) == len(found) and all(
            _same(a, b, limit) for a, b in zip(expected, found, strict=True)
        )
    if isinstance(expected, Tensor):
        return _close(expected, found, limit)
    if isinstance(expected, float):
        return abs(found - expected) <= limit * max(1.0, abs(expected))
    return bool(expected == found)


def _close(expected: Tensor, found: Tensor, limit: float) -> bool:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    if not expected.is_floating_point() or not expected.numel():
        return bool(torch.equal(expected, found))
    if not (expected.isfinite().all() and found.isfinite().all()):
        return False
    error = float((expected.double() - found.double()).abs().max())
    return error <= limit * max(1.0, float(expected.abs().max())) if limit else error == 0.0


def _sorted(value: list[Any]) -> list[Any]:
    return sorted(value, key=lambda one: one[0] if isinstance(one, tuple) else one)


def _short(value: Any) -> str:
    if isinstance(value, Tensor) and value.numel() == 1:
        return f"{float(value):.6g}"
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} of norm {float(value.double().norm()):.6g}"
    return " ".join(repr(value).split())[:80]
