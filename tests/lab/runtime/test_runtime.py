"""Layouts, and joining the ranks of a job."""

import pytest
import torch
from megatron.core import parallel_state

from megatron_prefix.errors import UserError
from megatron_prefix.lab import runtime
from megatron_prefix.lab.rl import job
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.runtime.groups import shutdown
from tests.harness.ranks import run_ranks


@pytest.mark.parametrize(("sizes", "message"), [
    ({"tp": 0}, "--tp 0 is not a size"), ({"dp": -1}, "--dp -1 is not a size"),
    ({"pp": 1.5}, "--pp 1.5 is not a size"), ({"cp": True}, "--cp True is not a size"),
    ({"dp": 10**20}, "--dp 1000+ is not a size; use an integer from 1 to 1000000"),
    ({"pp": 64, "vpp": 64}, "--pp 64 . --vpp 64 are 4096 model chunks.*at most 1024"),
    ({"sequence_parallel": True}, "needs --tp of at least 2, not 1"),
    ({"vpp": 2}, "--vpp 2 needs --pp of at least 2"),
    ({"ep": 2}, "--ep 2 must divide cp . dp = 1; use --dp 2"),
    ({"ep": 4, "cp": 2, "dp": 3}, "--ep 4 must divide cp . dp = 6; use --dp 2"),
    ({"world_size": 8, "tp": 3}, r"tp 3 \* pp 1 \* cp 1 \* dp 2 = 6 ranks, .* has 8"),
    ({"world_size": 4, "dp": 2}, "= 2 ranks, but the world has 4; .* start 2 ranks"),
])  # fmt: skip
def test_layouts_that_cannot_be_are_refused(sizes, message):
    with pytest.raises(UserError, match=message):
        (Layout.fill if "world_size" in sizes else Layout)(**sizes)


@pytest.mark.parametrize(("given", "dp"), [
    ({}, 1), ({"ep": 2}, 2), ({"ep": 4, "cp": 2}, 2), ({"tp": 2, "pp": 2}, 1),
    ({"world_size": 8, "tp": 2}, 4), ({"world_size": 8, "tp": 2, "ep": 4}, 4),
    ({"world_size": 8, "tp": 2, "dp": 4}, 4), ({"dp": 3}, 3),
])  # fmt: skip
def test_dp_defaults_to_what_fills_the_world(given, dp):
    assert Layout.fill(**given).dp == dp


MASTER = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
GOOD = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", **MASTER}


@pytest.mark.parametrize(("variables", "message"), [
    ({"RANK": "abc"}, "has RANK 'abc', which is not an integer"),
    ({"RANK": "9" * 5000}, r"has RANK '9+\.\.\., which is not an integer"),
    ({"MASTER_PORT": "http"}, "has MASTER_PORT 'http', which is not an integer"),
    ({"RANK": "2"}, "RANK 2 and WORLD_SIZE 2; ranks count from 0 to 1"),
    ({"WORLD_SIZE": None}, "RANK or WORLD_SIZE, but no WORLD_SIZE; start with torchrun, or"),
    ({"MASTER_ADDR": "", "MASTER_PORT": None}, "but no MASTER_ADDR and no MASTER_PORT;"),
])  # fmt: skip
def test_an_environment_that_cannot_be_is_refused(monkeypatch, variables, message):
    for name, value in {**GOOD, **variables}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        runtime.env_world_size()


def test_joining_a_world_of_another_size_is_refused():
    with pytest.raises(UserError, match="the layout has 2 ranks but the world has 1"):
        run_ranks(1, runtime.initialize, Layout(tp=2))


def test_leaving_a_job_leaves_no_group():
    """A process forked from this one would wait for ever for the threads of one."""

    def groups():
        kind = torch.distributed.ProcessGroup
        return [n for n, value in vars(parallel_state).items() if isinstance(value, kind)]

    runtime.initialize(Layout())
    assert groups()
    runtime.shutdown()
    assert not groups()


def test_a_failed_rank_leaves_nccls_groups_to_its_end(monkeypatch):
    """Destroying them waits for messages that no other rank will answer."""
    is_there = torch.distributed.is_initialized
    for backend, stays in (("nccl", True), ("gloo", False)):
        runtime.initialize(Layout())
        with monkeypatch.context() as patch:
            patch.setattr(torch.distributed, "get_backend", lambda backend=backend: backend)
            shutdown(failed=True)
        assert is_there() == stays
        runtime.shutdown()
        assert not is_there()


def test_an_exception_leaves_a_job_as_failed(monkeypatch):
    calls = []
    monkeypatch.setattr(job, "initialize", lambda *_: None)
    monkeypatch.setattr(job, "shutdown", lambda failed=False: calls.append(failed))
    options = job.ModelOptions("tiny-llama")
    with options.joined(Layout()):
        pass
    with pytest.raises(ValueError, match="stop"), options.joined(Layout()):
        raise ValueError("stop")
    assert calls == [False, True]
