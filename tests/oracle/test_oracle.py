"""Random trainers by the stock schedule and by ours: a bounded number of them.

`python -m tests.oracle` runs thousands. What fails today is in known.py.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_prefix.layers.blocks import math
from tests import test_cases_of_trainers as trainers
from tests.harness.fuzzing import rounds
from tests.harness.one_rank import one_rank
from tests.oracle import judge, known, pairs, runner
from tests.oracle.case import AXES, DRAWN_LAYOUTS, Case, alone, draw, settle
from tests.oracle.judge import ENDED, GOOD, INVALID, MODES, WRONG, Verdict
from tests.oracle.trainer import Call

LIMITS = Path("docs/limits.md")
OBSERVED = (
    *("batch", "static", "writes", "leaves", "draws", "calls", "around", "session", "raises"),
    *("sets", "scale", "late"),
)  # fmt: skip
"""Axes by which mode observe may fail: it runs the model as it is; and mode auto otherwise than
mode on, in the steps that it watches."""
APART: dict[str, tuple[str, ...]] = {
    "model": ("record",), "dtype": ("float32",), "dropout": (),
    "wrapper": ("super_plain", "super_derived", "instance_forward"),
    "head": ("dict", "tuple", "dataclass", "n_minus_1", "scalar", "log_probs"),
    "batch": ("dict_refilled", "list_refilled", "slots_refilled", "object_refilled",
              "static_copy", "static_data", "static_numpy"),
    "mask": ("causal_cut", "future", "future_one"), "context": (), "reads": (),
    "writes": ("list_item", "object_in_list", "tensor", "class_attribute", "model_attribute"),
    "leaves": ("next_step",), "draws": ("both",),
    "calls": ("reference_in_loss", "twice", "not_at_all"),
    "around": ("reentrant", "checkpoint", "saved_hooks", "function_mode"),
    "hook": ("clip", "regulariser", "activation_read", "noise", "functional_dropout"),
    "session": (), "raises": (), "sets": (), "scale": ("by_microbatch", "by_list_item"), "late": (),
}  # fmt: skip
"""Values that are tried alone, all of an axis if none is named: no step is shared with them, or a
session is like no other."""
TWO_RANKS = (
    Case(0, "tp2_sp", form="thd_padded", labels="absent", in_place="div"),
    Case(0, "cp2", form="thd_padded", session="evaluate_then_train"),
    Case(0, "dp2", tree="on_all_ranks", options="across_ranks"),
)


def _unexplained(case, found):
    """A line for every verdict that no table explains; with it the case can be run alone."""
    return [
        f"{case!r}\n    in mode {mode}: {verdict.what} {' '.join(verdict.kinds)} {verdict.why}"
        for mode, verdict in found.items()
        if verdict.what not in GOOD and known.explanation(case, mode, verdict) is None
    ]


def _run(*jobs):
    failures = [
        line for job, found in runner.run(jobs, workers=2) for line in _unexplained(job.case, found)
    ]
    assert not failures, "\n".join(failures)


def is_apart(case):
    """Whether a step is not shared with one of its values, or its session is like no other."""
    values = case.changes().items()
    return any(name in APART and (not APART[name] or value in APART[name])
               for name, value in values)  # fmt: skip


def together():
    """Trainers with as many values as go together and share; each value of `alone` is in one."""
    found: list[dict[str, str]] = []
    for case in alone():
        values = case.changes()
        for number, others in enumerate(found if not is_apart(case) else ()):
            both = {**others, **values}
            agree = all(both[name] == value for name, value in others.items())
            if agree and settle(Case(0, **both)).changes() == both:
                found[number] = both
                break
        else:
            if not is_apart(case):
                found.append(values)
    return [Case(0, **values) for values in found]


@pytest.mark.slow
def test_values_that_share_are_exact_together():
    """A value that needs to be seen alone is one of APART."""
    failures = []
    for job, found in runner.run([runner.Job(case, MODES) for case in together()], workers=2):
        failures += _unexplained(job.case, found)
        if found["on"] != Verdict(judge.EQUAL):
            failures.append(f"{job.case!r} is not shared: {found['on']}")
    assert not failures, "\n".join(failures)


@pytest.mark.slow
def test_every_other_value_alone():
    """Which is not in a row of tests/test_cases_of_trainers.py. What known.py says of one fails
    just so; fixed? Then its line must go."""
    lines = {line.case: line for line in known.KNOWN if line.case.ranks == 1}
    rows = (*trainers.ODD, *trainers.ORDINARY, *trainers.LATE)
    elsewhere = {pair for each in rows for pair in each.values.items()}
    left = (case for case in alone() if not elsewhere & {*case.changes().items()})
    left = filter(is_apart, left)
    jobs = []
    for case in dict.fromkeys([*left, *lines]):
        observed = case in lines or any(name in OBSERVED for name in case.changes())
        jobs.append(runner.Job(case, MODES if observed else ("on", "auto")))
    failures = []
    for job, found in runner.run(jobs, workers=2):
        failures += _unexplained(job.case, found)
        if job.case in lines:
            failing = tuple(mode for mode in MODES if found[mode].what not in GOOD)
            if failing != lines[job.case].modes:
                failures.append(f"{lines[job.case]} fails in modes {failing}")
    assert not failures, "\n".join(failures)


@pytest.mark.slow
def test_pairs_of_values():
    """Nothing ends or changes a step of mode auto, where most of these fall back. Seeds that come
    first cover the most pairs; HYPOTHESIS_PROFILE=search runs all."""
    cases = pairs.cases(every=bool(rounds(0, 1)))
    _run(*(runner.Job(case, ("auto",)) for case in cases))


@pytest.mark.slow
@pytest.mark.parametrize("case", TWO_RANKS, ids=lambda case: case.layout)
def test_two_ranks(case):
    _run(runner.Job(settle(case), ("auto",)))


# The oracle itself --------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_every_job_has_a_verdict(workers, monkeypatch):
    """Also one whose process dies, and those behind it."""

    def told(case, *_):
        if case.seed == 2:
            os._exit(3)
        return {"auto": Verdict(judge.EQUAL, (), str(case.seed))}

    monkeypatch.setattr(runner, "verdicts", told)
    monkeypatch.setattr(runner, "CASES", 3)
    jobs = [runner.Job(Case(seed), ("auto",)) for seed in range(7)]
    found = {job.case.seed: verdicts["auto"] for job, verdicts in runner.run(jobs, workers)}
    assert found.pop(2).what == ENDED
    assert {seed: verdict.why for seed, verdict in found.items()} == {
        seed: str(seed) for seed in (0, 1, 3, 4, 5, 6)
    }


def test_a_seed_is_a_case_for_ever():
    for seed in range(50):
        case = draw(seed)
        assert case == draw(seed) == eval(repr(case))  # noqa: S307  # as it is printed
        assert settle(case) == case


def test_every_value_can_be():
    """In some layout, alone and in seeds."""
    cases = [*alone(1), *alone(2)]
    drawn = [draw(seed, ranks) for ranks in DRAWN_LAYOUTS for seed in range(1500)]
    for name, axis in AXES.items():
        for value in axis.values:
            assert any(getattr(case, name) == value for case in cases), (name, value)
            assert any(getattr(case, name) == value for case in drawn), (name, value)


def test_sentences_stand_in_limits():
    text = " ".join(LIMITS.read_text(encoding="utf-8").split())
    for line in known.PERMITTED:
        assert line.sentence in text, line.sentence


def _call(**changes):
    log = {"number": 0, "loss": torch.ones(()), "values": torch.ones(1, 3)}
    call = Call("train", [log], {"w": torch.ones(3)}, reads=[0], losses=[0], shared=True)
    for name, value in changes.items():
        setattr(call, name, value)
    return call


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gradient", {"gradients": {"w": torch.full((3,), 1.001)}}),
        ("gradient", {"gradients": {"w": torch.full((3,), float("nan"))}}),
        ("gradient", {"gradients": {}}),
        ("returned", {"returned": []}),
        ("returned", {"returned": [{"number": 0, "loss": torch.zeros(()), "values": torch.ones(1, 3)}]}),  # noqa: E501
        ("reads", {"reads": [0, 0]}),
        ("kept", {"losses": [0, 0]}),
        ("auxiliary", {"auxiliary": {"z_loss": torch.ones(2)}}),
    ],
)  # fmt: skip
def test_the_judge_sees(kind, changes):
    case = Case(0)
    assert judge.judge(case, "auto", [_call()], [_call()]).what == judge.EQUAL
    verdict = judge.judge(case, "auto", [_call()], [_call(**changes)])
    assert verdict.what == WRONG and kind in verdict.kinds


def test_a_later_step_is_judged_as_sharply_as_the_first(monkeypatch):
    """Nothing bounds this loss: scores of 200,000 in the third step, which amplify rounding, unless
    updates are clipped. Gradients of keys that are off in the twelfth digit are always wrong."""
    changes = {"head": "value", "labels": "absent", "loss": "token_sum", "scale": "constant"}
    long = {"model": "gqa", "dtype": "float64", "session": "train_long"}
    case = settle(replace(draw(7200085, odd=0), **changes, **long))
    with one_rank():
        stock = judge.run(case, "stock")
        ours = judge.run(case, "on", stock)
        backward = math.attend_backward

        def attend_backward(*args):
            query_grad, key_grad, value_grad = backward(*args)
            return query_grad, key_grad * (1 + 1e-12), value_grad

        monkeypatch.setattr(math, "attend_backward", attend_backward)
        broken = judge.run(case, "on", stock)
    assert judge.judge(case, "on", stock, ours) == Verdict(judge.EQUAL)
    for number, call in enumerate(broken):
        verdict = judge.judge(case, "on", stock, [*ours[:number], call, *ours[number + 1 :]])
        assert verdict.what == WRONG and verdict.kinds == ("gradient",)
        assert verdict.why.startswith(f"call {number + 1}: ")


def test_the_judge_of_exceptions_and_fallbacks():
    case, boom = Case(0), {"raised": RuntimeError("x")}
    assert judge.judge(case, "auto", [_call()], [_call(**boom)]).what == ENDED
    assert judge.judge(case, "auto", [_call(**boom)], [_call(**boom)]).what == INVALID
    raising = replace(case, raises="in_loss")
    assert judge.judge(raising, "auto", [_call(**boom)], [_call(**boom)]).what == judge.EQUAL
    assert judge.judge(raising, "auto", [_call(**boom)], [_call()]).what == WRONG
    other = _call(raised=KeyError("x"))
    assert judge.judge(raising, "auto", [_call(**boom)], [other]).what == WRONG
    near = {"w": torch.full((3,), 1 + 1e-7)}
    stock = _call(shared=False, gradients=near)
    assert judge.judge(replace(case, dtype="float32"), "auto", [_call()], [stock]).what == WRONG
    assert known.explanation(case, "auto", Verdict(WRONG, ("gradient",))) is None
