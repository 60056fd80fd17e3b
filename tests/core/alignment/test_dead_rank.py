"""A rank that dies or hangs in the middle of a step ends the others, with a clear error."""

import os
import re
import signal
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_prefix.errors import StepOutOfMemory
from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.runtime import Layout, RankError
from megatron_prefix.lab.runtime.groups import RENDEZVOUS
from megatron_prefix.run.execute.inputs import SegmentInputs
from megatron_prefix.run.execute.messages import channels_of
from megatron_prefix.run.schedule import PrefixSchedule
from megatron_prefix.sidecar.cache import SidecarCache
from tests.harness.failures import CONFIG, items
from tests.harness.ranks import forked, run_ranks
from tests.harness.steps import Contract, run

DEAD = 1
SOON_S = 60.0  # of a loaded machine; gloo knows at once that a connection has closed


def die_behind_the_third_segment(self, model, index, *others, **options):
    """Stands in for the model's call on the rank that dies: behind what crosses ranks first."""
    if index > 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return stock_call(self, model, index, *others, **options)


stock_call = SegmentInputs.call


def step_of(layout, **prefix):
    """A rank's part of a step; data-parallel ranks send prompts to one another."""
    runtime.initialize(layout)
    spec = resolve("tiny-llama", num_layers=max(2, layout.pp)).with_vocab(64)
    chunks, mine = build_model(spec, layout=layout, dtype="float64"), items()
    if layout.dp > 1:
        mine, prefix = mine[dist.get_rank() :: layout.dp], prefix | {"across_ranks": "on"}
    ours = PrefixSchedule(replace(CONFIG, **prefix))
    return lambda: run(ours, Contract().step, chunks, mine)


def step_until_death(layout):
    """A rank's part: one of them is killed behind its third forward."""
    step = step_of(layout)
    if dist.get_rank() == DEAD:
        SegmentInputs.call = die_behind_the_third_segment
    step()


def lone_rank(rank, layout, folder):
    """A rank that nobody watches; what it raised is in a file when it has ended."""
    world = str(layout.world_size)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world)
    os.environ[RENDEZVOUS] = str(folder / "rendezvous")
    try:
        step_until_death(layout)
    except RuntimeError as error:
        (folder / f"rank{rank}").write_text(str(error), encoding="utf-8")
        runtime.shutdown()


@pytest.mark.parametrize(("layout", "who", "text"), [
    (Layout(pp=3), "pipeline", "A neighbour has failed"),
    (Layout(dp=2), "data-parallel", "the log of rank 1"),
], ids=["pp3", "prompts cross"])  # fmt: skip
def test_the_other_ranks_end_by_themselves(tmp_path, layout, who, text):
    begin = time.monotonic()
    ranks = [forked(lone_rank, rank, layout, tmp_path) for rank in range(layout.world_size)]
    try:
        for rank in ranks:
            rank.join(max(0.0, begin + 2 * SOON_S - time.monotonic()))
        codes = [rank.exitcode for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    assert codes == [-signal.SIGKILL if rank == DEAD else 0 for rank in range(len(ranks))]
    for rank in set(range(len(ranks))) - {DEAD}:
        error = (tmp_path / f"rank{rank}").read_text(encoding="utf-8")
        assert re.match(rf"{who} rank {rank}, (waiting for|sending)", error), error
        assert text in error


def run_out_of_memory(layout):
    """A rank's part: memory runs out on one of them, and what each of them says of it."""
    step = step_of(layout)
    if dist.get_rank() == DEAD:
        SidecarCache.take = no_memory
    try:
        step()
    except (StepOutOfMemory, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def no_memory(self, layer, index):
    """Stands in for what a backward takes from the sidecar."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")


@pytest.mark.parametrize("layout", [Layout(pp=3), Layout(dp=2)], ids=["pp3", "prompts cross"])
def test_a_rank_without_memory_ends_the_step_of_all(layout):
    """It does not go back alone: the others wait for its messages."""
    said = run_ranks(layout.world_size, run_out_of_memory, layout)
    assert said[DEAD].startswith("StepOutOfMemory: out of device memory: CUDA out of memory;")
    assert "other ranks wait in this step" in said[DEAD]
    lines = said[DEAD].splitlines()
    assert [len(lines), lines[1].split()[0]] == [{2: 3, 3: 5}[layout.world_size], "rank"]
    for rank in {*range(len(said))} - {DEAD}:
        assert "A neighbour has failed" in said[rank]


TIMEOUT = timedelta(seconds=3)


def stop_among_others(layout):
    """A rank's part: one of them is stopped, as a debugger does it, while the others add up."""
    runtime.initialize(layout, message_timeout_minutes=TIMEOUT.total_seconds() / 60)
    if dist.get_rank() == DEAD:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.zeros(1))


def test_a_stopped_rank_is_noticed_and_named():
    begin = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(2, stop_among_others, Layout(dp=2), timeout_s=SOON_S)
    assert time.monotonic() - begin < SOON_S / 2
    assert re.search(r"\nrank 1 is stopped; kill -CONT \d+ would", str(caught.value))


def limits(layout):
    """A rank's part: the time limits of every process group, the pipeline's channels too."""
    runtime.initialize(layout, message_timeout_minutes=2.5)
    from megatron.core import parallel_state

    pipeline = parallel_state.get_pipeline_model_parallel_group()
    cpu = torch.device("cpu")
    made = channels_of(pipeline, cpu).groups.values()
    every = [*made, *(group for group in dist.distributed_c10d._pg_map if group.size() > 1)]
    return {group._get_backend(cpu).options._timeout for group in every}


def test_every_process_group_has_the_time_limit():
    assert run_ranks(4, limits, Layout(pp=2, tp=2)) == [{timedelta(minutes=2.5)}] * 4
