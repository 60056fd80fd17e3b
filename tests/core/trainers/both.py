"""A schedule that runs every step twice, stock and prefix, and keeps how far they are apart.

A trainer that gets it instead of Megatron's runs as it always does: its own data iterator,
forward step and loss, first under the stock schedule and then under the prefix schedule; in mode
"auto" under that before, too, since the first step of a kind is stock's, watched. It goes on with
the gradients and the results of the last.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from megatron_prefix import PrefixConfig, get_forward_backward_func
from megatron_prefix.lab.models import build
from megatron_prefix.lab.numerics import tolerance
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.tree.cp_layout import Slices

CONFIG = PrefixConfig(min_gain=0, segment_tokens=128, chunk_tokens=32, kernel="math")
"""Small segments, so that small steps have many; the kernel without probing."""
AUTO = dataclasses.replace(CONFIG, mode="auto", min_speedup=1e-3)
"""The same, and what can be shared is, whatever is predicted."""


@dataclass
class Step:
    """One call of the schedule.

    Differences of a gradient are relative to the largest element of its parameter, or to a
    hundredth of the largest of all where that is more; those of results likewise.
    """

    kind: str  # "update", or "forward" for a pass without gradients
    executed: int  # tokens that ran through the model
    raw: int  # of what the stock schedule runs
    limit: float  # what the numerics policy allows the differences
    gradient: float
    results: float
    scored: int = 0  # positions that went through the output layer
    reason: str = ""  # why the stock schedule ran; "" where the step was shared
    unshared: int = 0  # positions that were computed again since routes differ
    verified: float | None = None  # what `verify` told, as parts of what rounding allows

    @property
    def problem(self):
        """What is wrong; "" for nothing. A step of the stock schedule is stock's, bit for bit."""
        if self.reason:
            if self.gradient == self.results == 0:
                return ""
            return (
                f"{self.kind}: gradients differ by {self.gradient:.1e}, results by"
                f" {self.results:.1e} in a step of the stock schedule: {self.reason}"
            )
        if self.verified is not None and not (
            self.verified <= 1 and self.gradient == self.results == 0
        ):
            return (
                f"{self.kind}: verify told {self.verified:.2g} of what rounding allows; results"
                f" differ from the stock schedule's by {max(self.gradient, self.results):.1e}"
            )
        if not (self.gradient <= self.limit and self.results <= self.limit):
            return (
                f"{self.kind}: gradients differ by {self.gradient:.1e}, results by"
                f" {self.results:.1e}; allowed are {self.limit:.1e}"
            )
        if not self.executed < 0.9 * self.raw:
            return f"{self.kind}: {self.executed} of {self.raw} tokens ran: nothing was shared"
        return ""


class _Seen(NamedTuple):
    """What one run of a step gave; `report`: None of the stock schedule's."""

    results: Any
    gradients: dict[str, Tensor]
    sizes: list[dict[str, Any]]
    report: Any


@dataclass
class Both:
    """Takes the place of `get_forward_backward_func`; calling it gives the schedule.

    `state` holds more of the trainer's than the model does, such as routes in a queue: lists, or
    objects, whose attributes are the same before every run. Both schedules leave equally much there
    in passes without gradients, and in updates too where all activations are recomputed.
    """

    config: PrefixConfig = CONFIG
    trained: Callable[..., Any] | None = None  # this and the next two: get_forward_backward_func
    samples: Callable[..., Any] | None = None
    masks_tokens: bool = False
    slices: Slices = Slices.ZIGZAG
    swapped: Callable[..., Any] | None = None  # what has taken Megatron's place runs, not `config`
    state: Callable[[], list[Any]] = list
    left: Callable[[], Any] = tuple  # by losses, after a run; compared as its results are
    dtype: torch.dtype = torch.float32  # in which trainers compute
    leaves_alike: bool = False  # updates, too
    steps: list[Step] = field(default_factory=list)

    def __call__(self, *_, **__):
        """The schedule."""
        return self._run

    def _run(self, *, data_iterator, model, **arguments):
        chunks = model if isinstance(model, list) else [model]
        arguments["model"] = model
        put_back = saved(self.state())
        seen = []
        for name, iterator in zip(
            self._turns, copies(data_iterator, len(self._turns)), strict=True
        ):
            if seen:
                for chunk in chunks:
                    chunk.zero_grad_buffer()
                put_back()
            schedule = stock_schedule() if name == "stock" else self._ours()
            results = schedule(data_iterator=iterator, **arguments)
            report = None if name == "stock" else schedule.report
            told = [results, self.left()]
            seen.append(_Seen(told, gradients(chunks), sizes(self.state()), report))
        self._compare(seen, bool(arguments.get("forward_only")))
        return results

    @property
    def _turns(self):
        """What is first runs as in a job that has just begun: what a loss leaves behind is new."""
        return ("watched", "stock", "prefix") if self.config.mode == "auto" else ("stock", "prefix")

    def _ours(self):
        ours = self.swapped or functools.partial(
            get_forward_backward_func, prefix_config=self.config, trained=self.trained,
            samples=self.samples, masks_tokens=self.masks_tokens, slices=self.slices,
        )  # fmt: skip
        return ours()

    def _compare(self, seen, forward_only):
        """Runs of the prefix schedule with stock's gradients and results."""
        stock = next(one for one in seen if one.report is None)
        for one in seen:
            if one.report is None:
                continue
            # With `verify` losses run twice, and leave twice as much.
            is_single = "verify" not in one.report.features
            if is_single and (self.leaves_alike or forward_only):
                assert one.sizes == stock.sizes, f"left {one.sizes}, stock {stock.sizes}"
            forest, decision = one.report.forest, one.report.decision
            self.steps.append(
                Step(
                    "forward" if forward_only else "update",
                    forest.executed_tokens, forest.raw_tokens,
                    tolerance(self.dtype, max(forest.raw_tokens, 1)),
                    0.0 if forward_only else furthest(one.gradients, stock.gradients),
                    furthest(*(flat(run.results[: 2 if is_single else 1]) for run in (one, stock))),
                    sum(segment.num_read for segment in forest.segments),
                    "" if decision.share else decision.reason,
                    forest.unshared_by_routes,
                    _verified(one.report) if self.config.verify and decision.share else None,
                )
            )  # fmt: skip


def _verified(report):
    """The largest difference that `verify` has told of a step; infinite if it has told none."""
    if "verify" not in report.features:
        return math.inf
    return float(max(worst.units for worst in report.features["verify"].worst.values()))


@contextlib.contextmanager
def changed(change):
    """Models that are built inside are changed before they are wrapped: heads, adapters."""
    stock = build.build_chunk

    def built(*args, **options):
        chunk = stock(*args, **options)
        torch.manual_seed(7)  # of a part that every rank has whole
        change(build.unwrap(chunk))
        return chunk

    with mock.patch.object(build, "build_chunk", built):
        yield


def config_of(layout):
    """The configuration for a layout's name: mode "auto" where that is in it; "across": what is
    common to data-parallel ranks runs once; "fallback": no step is shared; "verify": steps that are
    shared run with both schedules."""
    config = AUTO if "auto" in layout else CONFIG
    if "verify" in layout:
        config = dataclasses.replace(config, verify=99)
    if "fallback" in layout:
        config = dataclasses.replace(config, min_speedup=1e9)
    return dataclasses.replace(config, across_ranks="on" if "across" in layout else "off")


def saved(objects):
    """Puts back lists, and the attributes of other objects with the lists in those, too; and
    torch's random state."""
    before, random = [_held(one) for one in objects], torch.get_rng_state()

    def put_back():
        for one, values in zip(objects, before, strict=True):
            if isinstance(one, list):
                one[:] = values
            else:
                vars(one).update(_own_lists(values))
        torch.set_rng_state(random)

    return put_back


def _held(one):
    return one[:] if isinstance(one, list) else _own_lists(vars(one))


def _own_lists(values):
    """A copy of a dict, with copies of the lists and dicts in it."""
    found = copy.copy(values)
    for name, value in values.items():
        if isinstance(value, list):
            found[name] = value[:]
        elif isinstance(value, dict):
            found[name] = _own_lists(value)
    return found


def sizes(objects):
    """Numbers that objects have, and how long their lists are; of a list, how long it is."""
    return [
        {name: len(value) if isinstance(value, list) else value for name, value in held.items()
         if isinstance(value, list | int)}
        for one in objects
        for held in [{"": one} if isinstance(one, list) else vars(one)]
    ]  # fmt: skip


def copies(iterator, num):
    """`num` data iterators over the same microbatches; the given one is used up by the last."""
    if isinstance(iterator, list):
        return [list(one) for one in zip(*(copies(one, num) for one in iterator), strict=True)]
    if iterator is None:
        return [None] * num
    if hasattr(iterator, "__next__"):  # Megatron-LM's has no __iter__
        # pretrain_gpt of 0.19 puts this rank's slices into the dict that it gets.
        return [map(_own, one) for one in itertools.tee(iter(iterator.__next__, object()), num)]
    return [copy.copy(iterator) for _ in range(num - 1)] + [iterator]  # a place in a list: slime


def _own(batch):
    return dict(batch) if isinstance(batch, dict) else batch


def gradients(chunks):
    """Copies of all gradients of a rank; frozen parameters have none.

    With a distributed optimizer only what is this rank's: elsewhere is what it computed itself,
    which its step does not read.
    """
    found = {}
    for number, chunk in enumerate(chunks):
        sharded = getattr(chunk, "ddp_config", None) and chunk.ddp_config.use_distributed_optimizer
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad:
                grad = parameter.main_grad.detach()
                own = grad.flatten()[_own_part(chunk, parameter)] if sharded else grad
                found[f"{number}.{name}"] = own.clone()
    return found


def _own_part(chunk, parameter):
    """Which elements of a parameter's gradient are in this rank's part of its bucket."""
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        if parameter not in buffer.param_index_map:
            continue
        start, end, number = buffer.param_index_map[parameter]
        bucket, group = buffer.buckets[number], buffer.data_parallel_group
        size = bucket.grad_data.numel() // group.size()
        first = bucket.offset + group.rank() * size
        low, high = (min(max(place, start), end) - start for place in (first, first + size))
        return slice(low, high)
    raise KeyError("a parameter in no buffer")


def flat(results, name=""):
    """Every number in what a schedule returns, by its place."""
    if isinstance(results, Tensor):
        return {name: results.values() if results.is_nested else results}
    if isinstance(results, bool) or not isinstance(results, int | float | Mapping | list | tuple):
        return {}
    if isinstance(results, int | float):
        return {name: torch.tensor(float(results))}
    pairs = results.items() if isinstance(results, Mapping) else enumerate(results)
    found = {}
    for key, value in pairs:
        found.update(flat(value, f"{name}/{key}"))
    return found


def furthest(found, expected):
    """The largest relative difference; infinite where something is missing or not finite."""
    if found.keys() != expected.keys():
        return math.inf
    sizes = [float(value.abs().max()) for value in expected.values() if value.numel()]
    if not sizes:
        return 0.0
    floor, worst = 0.01 * max(sizes), 0.0
    for name, value in expected.items():
        other = found[name]
        if other.shape != value.shape or not (other.isfinite().all() and value.isfinite().all()):
            return math.inf
        if value.numel() and (scale := max(float(value.abs().max()), floor)):
            worst = max(worst, float((other.double() - value.double()).abs().max()) / scale)
    return worst
