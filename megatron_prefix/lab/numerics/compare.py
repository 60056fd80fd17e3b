"""Two schedules on the same step, compared by the numerics policy (policy.py).

`align` and `train --compare` both use this.  Losses, log-probs, gradients and parameters each have
a limit.  In 16 bit only an fp32 reference can tell (pooled.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_prefix.lab.numerics import policy

PART = 1 << 26
"""Numbers that are compared at once."""


@dataclass(frozen=True)
class Trace:
    """What one schedule computed; None if it was not asked for.

    Attributes:
        losses: of every microbatch, float64 [microbatches]; empty on ranks that have none.
        gradients: by parameter name, before clipping.
        parameters: by name, after the optimizer step.
        logprobs: of every trained token, float64 [trained tokens].
        forward: the same from a pass without gradients.
        auxiliary: what the step left in the routers (lab/verify/observed.py), float32.
    """

    losses: Tensor
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor] | None = None
    logprobs: Tensor | None = None
    forward: Tensor | None = None
    auxiliary: dict[str, Tensor] | None = None


@dataclass(frozen=True)
class Conditions:
    """What the limits of a comparison follow from.

    Attributes:
        dtype: of the weights.
        tokens: positions that a weight's gradient sums up, those of all data-parallel ranks.
        width, depth: of the model; see `policy.tolerance`.
        lr, eps: AdamW's.
        loss: size of a microbatch's mean loss if its terms did not cancel, at least 1.
        sent: what a trained token sends back on average.
        cancellation: that, over what is left of it if its terms cancel, at least 1.
        may_vanish: gradients may all be zero (advantages are what rewards make them).
    """

    dtype: torch.dtype
    tokens: int
    width: int = 1
    depth: int = 0
    lr: float = 0.0
    eps: float = 1e-8
    loss: float = 1.0
    sent: float = 0.0
    cancellation: float = 1.0
    may_vanish: bool = False

    @property
    def limit(self) -> float:
        """The relative tolerance."""
        least = policy.tolerance(self.dtype, self.tokens, self.width, self.depth)
        return least * self.cancellation


@dataclass(frozen=True)
class Verdict:
    """How far two traces are from each other, and whether that is within the policy.

    Every difference is the largest of its kind; the limit with it is its own.

    Attributes:
        loss_max_abs_diff, loss_limit: over microbatches.
        logprob_max_abs_diff, logprob_limit: over trained tokens, with and without gradients.
        grad_max_rel_diff, tolerance: over parameters, relative to the size of each one's gradient.
            In 16 bit `tolerance` is the limit of the error ratio, chance aside.
        param_max_abs_diff, param_limit: over parameters after one AdamW step.
        passed: None in 16 bit without an fp32 reference.  There the limits are None, too.
        failures: what is outside, one line each.
        compared: how many values were compared, by kind.
        grad_error_ratio_max, grad_error_ratio_p50: in 16 bit, over parameters.
        draws: steps over which these errors are pooled.
    """

    loss_max_abs_diff: float
    logprob_max_abs_diff: float
    grad_max_rel_diff: float
    param_max_abs_diff: float
    passed: bool | None
    loss_limit: float | None = None
    logprob_limit: float | None = None
    tolerance: float | None = None
    param_limit: float | None = None
    failures: tuple[str, ...] = ()
    compared: dict[str, int] = field(default_factory=dict)
    grad_error_ratio_max: float | None = None
    grad_error_ratio_p50: float | None = None
    draws: int = 1


LIMIT_OF = {
    "loss_max_abs_diff": "loss_limit",
    "logprob_max_abs_diff": "logprob_limit",
    "grad_max_rel_diff": "tolerance",
    "param_max_abs_diff": "param_limit",
}
"""The limit of each difference, as fields of Verdict."""


class _Check(NamedTuple):
    what: str
    error: float
    limit: float

    @property
    def failure(self) -> str | None:
        # An infinite weight makes its own limit infinite, so finite is asked for too.
        if self.error <= self.limit and math.isfinite(self.error):
            return None
        return f"{self.what}: {self.error:.2e} exceeds {self.limit:.2e}"


def compare(expected: Trace, found: Trace, conditions: Conditions) -> Verdict:
    """One rank's verdict on what a schedule `found`, where the stock schedule found `expected`.

    Gradients are the test proper.  AdamW divides a gradient by its own size, so where one is
    rounding noise a parameter may go either way: lr * min(2, error / eps) is all that can be asked
    of it, and storing it rounds twice.
    """
    sizes = _gradient_sizes(expected.gradients, conditions)
    by_kind = {
        "loss_max_abs_diff": list(_losses(expected, found, conditions)),
        "logprob_max_abs_diff": list(_logprobs(expected, found, conditions)),
        "grad_max_rel_diff": list(_gradients(expected, found, conditions, sizes)),
        "param_max_abs_diff": list(_parameters(expected, found, conditions, sizes)),
        "routers": list(_auxiliary(expected, found, conditions)),
    }
    judged = conditions.dtype.itemsize >= 4
    checks = [check for checks in by_kind.values() for check in checks]
    failures = [check.failure for check in checks if check.failure] if judged else []
    if not conditions.may_vanish and not any(map(_largest, expected.gradients.values())):
        failures.insert(0, "every stock gradient is zero: nothing was compared")
    values: dict[str, Any] = {}
    for name, limit in LIMIT_OF.items():
        worst = max(by_kind[name], key=lambda check: check.error, default=_Check("", 0.0, 0.0))
        values |= {name: worst.error, limit: worst.limit if judged else None}
    passed = not failures if judged else (False if failures else None)
    return Verdict(passed=passed, failures=tuple(failures), compared=_counts(expected), **values)


def merged(verdicts: Mapping[str, Verdict]) -> Verdict:
    """One verdict of several, by what each is called: "rank 1", or "" if there is only one.

    What none of them has compared anything of fails.
    """
    several = list(verdicts.values())
    values: dict[str, Any] = {}
    for name, limit in LIMIT_OF.items():
        worst = max(several, key=lambda one: _or_inf(getattr(one, name)))
        values |= {name: getattr(worst, name), limit: getattr(worst, limit)}
    for name in ("grad_error_ratio_max", "grad_error_ratio_p50"):
        ratios = [getattr(one, name) for one in several if getattr(one, name) is not None]
        values[name] = max(map(_or_inf, ratios), default=None)
    kinds = dict.fromkeys(kind for one in several for kind in one.compared)
    compared = {kind: sum(one.compared.get(kind, 0) for one in several) for kind in kinds}
    failures = [f"no {kind} were compared" for kind, number in compared.items() if not number]
    failures += [
        f"{name}: {line}" if name else line
        for name, one in verdicts.items()
        for line in one.failures
    ]
    answers = [one.passed for one in several if one.passed is not None]
    passed = False if failures else (all(answers) if answers else None)
    return Verdict(
        passed=passed, failures=tuple(failures), compared=compared, draws=several[0].draws, **values
    )


def on_all_ranks(mine: Any) -> list[Any]:
    """What every rank of the job gives, in the order of ranks; all of them call this and wait."""
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    return everyone


def over_ranks(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict of all ranks together, from the one of each."""
    if len(verdicts) == 1:
        return merged({"": verdicts[0]})
    return merged({f"rank {rank}": verdict for rank, verdict in enumerate(verdicts)})


# What is compared ---------------------------------------------------------------------------------


def _losses(expected: Trace, found: Trace, conditions: Conditions) -> Iterator[_Check]:
    limit = conditions.limit * _size(expected.losses, conditions.loss)
    yield _Check("loss", _distance(found.losses, expected.losses), limit)


def _logprobs(expected: Trace, found: Trace, conditions: Conditions) -> Iterator[_Check]:
    for what, wanted, got in (
        ("log-prob", expected.logprobs, found.logprobs),
        ("log-prob without gradients", expected.forward, found.forward),
    ):
        if wanted is not None or got is not None:
            yield _Check(what, _distance(got, wanted), conditions.limit * _size(wanted, 1.0))


def _gradients(
    expected: Trace, found: Trace, conditions: Conditions, sizes: dict[str, float]
) -> Iterator[_Check]:
    for name, got, wanted in _pairs(found.gradients, expected.gradients):
        error, size = _distance(got, wanted), sizes.get(name, 0.0)
        relative = _or_inf(error / size) if size else math.inf if error else 0.0
        yield _Check(f"gradient of {name}", relative, conditions.limit)


def _parameters(
    expected: Trace, found: Trace, conditions: Conditions, sizes: dict[str, float]
) -> Iterator[_Check]:
    for name, got, wanted in _pairs(found.parameters or {}, expected.parameters or {}):
        moved = conditions.limit * sizes.get(name, 0.0) / conditions.eps
        rounding = 0.0 if wanted is None else 2 * torch.finfo(wanted.dtype).eps * _largest(wanted)
        most = conditions.lr * min(2.0, moved) + rounding
        yield _Check(f"parameter {name}", _distance(got, wanted), most)


def _auxiliary(expected: Trace, found: Trace, conditions: Conditions) -> Iterator[_Check]:
    """Routers' logged losses and biases, which Megatron keeps in fp32 for every dtype."""
    limit = replace(conditions, dtype=torch.float32).limit
    for name, got, wanted in _pairs(found.auxiliary or {}, expected.auxiliary or {}):
        yield _Check(
            name, _distance(got, wanted), limit * (0.0 if wanted is None else _largest(wanted))
        )


def _counts(trace: Trace) -> dict[str, int]:
    """How many values of each kind there are to compare."""
    counts = {"losses": trace.losses.numel(), "gradients": len(trace.gradients)}
    for kind, values in (
        ("parameters", trace.parameters),
        ("log-probs", trace.logprobs),
        ("log-probs without gradients", trace.forward),
    ):
        if values is not None:
            counts[kind] = len(values)
    return counts


def _size(values: Tensor | None, least: float) -> float:
    """The largest magnitude, at least `least`, which stands in if it is not finite."""
    largest = 0.0 if values is None else _largest(values)
    return max(least, largest) if math.isfinite(largest) else least


def _gradient_sizes(gradients: dict[str, Tensor], conditions: Conditions) -> dict[str, float]:
    """What the error of each parameter's gradient is relative to: its own largest element, or
    `policy.FLOOR` of the largest of all if it vanishes compared with the others.

    Where the sums of all terms cancel (identical rollouts whose advantages add up to zero, and
    nothing else) all gradients are rounding noise, and errors are relative to the terms.
    """
    sizes = {name: _largest(value) for name, value in gradients.items()}
    most = max(sizes.values(), default=0.0)
    least = policy.FLOOR * most if most > conditions.limit * conditions.sent else conditions.sent
    return {name: max(size, least) for name, size in sizes.items()}


def _pairs(
    found: dict[str, Tensor], expected: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    """By name; None for what only one of them has."""
    for name in dict.fromkeys((*expected, *found)):
        yield name, found.get(name), expected.get(name)


def _distance(found: Tensor | None, expected: Tensor | None) -> float:
    """The largest difference; infinite for NaN anywhere, other shapes, or what is missing."""
    if found is None or expected is None or found.shape != expected.shape:
        return math.inf
    parts = zip(_parts(found), _parts(expected), strict=True)
    return max((_largest(one.double() - other.double()) for one, other in parts), default=0.0)


def _largest(values: Tensor) -> float:
    """The largest magnitude; infinite if there is NaN, so that it never passes for small."""
    return max((_or_inf(float(x.double().abs().max())) for x in _parts(values)), default=0.0)


def _parts(values: Tensor) -> Sequence[Tensor]:
    """Pieces whose copies in fp64 take little memory beside a large vocabulary's gradient."""
    return values.flatten().split(PART) if values.numel() else ()


def _or_inf(value: float) -> float:
    """max() forgets a NaN that does not come first; infinity stays."""
    return math.inf if math.isnan(value) else value
