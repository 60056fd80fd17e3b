"""Ranks issue all their collectives in orders that can be merged into one, whatever they run: where
two ranks have two orders, each may wait for the other on a GPU."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.tensor_parallel import mappings

from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.runtime import Layout
from tests.core.alignment.test_overlap import NO_AUX, SHARDED, VOCAB, Job, alone, trees
from tests.harness.ranks import run_ranks

COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single",
    "reduce_scatter", "reduce_scatter_tensor", "broadcast", "all_gather_object", "barrier",
)  # fmt: skip
BOUND = (
    (param_and_grad_buffer, "dist_reduce_scatter_func", "reduce_scatter_tensor"),
    (param_and_grad_buffer, "dist_all_gather_func", "all_gather_into_tensor"),
    (mappings, "dist_reduce_scatter_func", "reduce_scatter_tensor"),
    (mappings, "dist_all_gather_func", "all_gather_into_tensor"),
)
"""Where Megatron keeps a function under a name of its own."""


class Issued(NamedTuple):
    """A collective. group: the same on all of its ranks, with their numbers."""

    kind: str
    group: str
    ranks: tuple[int, ...]


@contextlib.contextmanager
def recorded(into: list[Any], gives: Callable[..., Any] | None = None) -> Iterator[None]:
    """Writes down what this rank issues to groups of several ranks, or what `gives` says of it."""
    inside = [False]  # all_gather_object calls others

    def recording(kind: str, stock: Any) -> Any:
        parameters = inspect.signature(stock)

        def issue(*args: Any, **kwargs: Any) -> Any:
            given = parameters.bind(*args, **kwargs).arguments
            group = given.get("group") or dist.group.WORLD
            if inside[0] or group.size() == 1:
                return stock(*args, **kwargs)
            ranks = tuple(dist.get_process_group_ranks(group))
            issued = Issued(kind, group.group_name, ranks)
            into.append(gives(issued, given) if gives else issued)
            inside[0] = True
            try:
                return stock(*args, **kwargs)
            finally:
                inside[0] = False

        return issue

    with pytest.MonkeyPatch.context() as patch:
        for kind in COLLECTIVES:
            stock = getattr(dist, kind)
            patch.setattr(dist, kind, recording(kind, stock))
        for module, name, kind in BOUND:
            if hasattr(module, name):
                patch.setattr(module, name, recording(kind, getattr(module, name)))
        yield


def why_not_ending(programs: Sequence[Sequence[Issued]]) -> str:
    """What ranks wait for if every collective blocks a rank until all others have come to it; empty
    if all of them end. That is so if, and only if, their orders can be merged into one."""
    at, moved = [0] * len(programs), True
    while moved:
        moved = False
        for program, place in zip(programs, at, strict=True):
            if place == len(program):
                continue
            issued = program[place]
            next_ = [programs[one][at[one] :][:1] for one in issued.ranks]
            if all(one == [issued] for one in next_):
                for one in issued.ranks:
                    at[one] += 1
                moved = True
    waits = [
        f"rank {rank} at {place}: {program[place].kind} of {program[place].ranks}"
        for rank, (program, place) in enumerate(zip(programs, at, strict=True))
        if place < len(program)
    ]
    return f"deadlock: {'; '.join(waits)}" if waits else ""


def unlike(number, rank, spec, layout):
    """Trees of other depths and sizes on every rank and in every step; some share nothing."""
    shape, seed = (number + rank) % 3, 10 * number + rank
    if shape == 0:
        return [*generate(1, 8, 16, 1 + number % 2, vocab_size=VOCAB, seed=seed)]
    tree = {"tree": "branch", "depth": 2} if shape == 2 else {}
    return [*generate(shape, 32, 16, 2, vocab_size=VOCAB, seed=seed, **tree)]


GATHERS = {**SHARDED, "overlap_param_gather": True}
GLOBAL_AUX = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 1.0}
JOBS: dict[str, tuple[Job, Callable[..., Any], str]] = {
    "EP2, weights gathered during forwards": (
        Job("tiny-moe", Layout(dp=2, ep=2), NO_AUX, GATHERS), unlike, "PPPP",
    ),
    "EP2 of DP4": (Job("tiny-moe", Layout(dp=4, ep=2), NO_AUX), unlike, "PPPP"),
    "DP2, global_aux_loss": (Job("tiny-moe", model=GLOBAL_AUX), trees, "PPP"),
    "CP2 DP2": (Job(layout=Layout(cp=2, dp=2)), alone, "PPP"),
}  # fmt: skip


def issued(job, data, turns):
    """Per rank what it issues in each step."""

    def on_rank():
        steps: list[list[Issued]] = []

        @contextmanager
        def around(*_):
            steps.append([])
            with recorded(steps[-1]):
                yield

        job._replace(around=around).runs_here([(turns, True)], data)
        return steps

    return run_ranks(job.layout.world_size, on_rank)


@pytest.mark.parametrize("name", JOBS)
def test_ranks_have_one_order(name):
    ranks = issued(*JOBS[name])
    for number, step in enumerate(zip(*ranks, strict=True)):
        assert why_not_ending(step) == "", f"step {number}"
    kinds = [one.kind for one in ranks[0][-1]]
    assert "all_reduce" in kinds and len(kinds) > 20


def test_two_orders_are_noticed():
    reduced, exchanged = Issued("all_reduce", "1", (0, 1)), Issued("all_to_all", "2", (0, 1))
    assert why_not_ending([[reduced, exchanged], [reduced, exchanged]]) == ""
    assert "deadlock: rank 0 at 0: all_reduce" in why_not_ending(
        [[reduced, exchanged], [exchanged, reduced]]
    )
    assert why_not_ending([[reduced], []])
