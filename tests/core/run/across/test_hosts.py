"""Which rank is on which host, and what an error says of it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_prefix.errors import StepFailed, UserError
from megatron_prefix.lab import runtime
from megatron_prefix.lab.runtime import RankError, hosts
from megatron_prefix.run import agreement

SOON = timedelta(milliseconds=50)
LOST = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 24000ms for recv operation"


@pytest.fixture(autouse=True)
def _unknown_again() -> Iterator[None]:
    yield
    agreement.hosts = ()


def met(*names: str) -> None:
    """Ranks on these hosts have met; this process is the last of them."""
    store = dist.HashStore()
    for rank, name in enumerate(names[:-1]):
        store.set(f"host of rank {rank}", name)
    hosts.meet(store, len(names) - 1, len(names), SOON)


def test_ranks_tell_one_another_where_they_are() -> None:
    assert agreement.named(1) == "rank 1"
    met("node-a", "here")
    assert agreement.named(0) == "rank 0 on node-a"
    assert agreement.named(1) == f"rank 1 on {socket.gethostname()}"


def test_ranks_that_do_not_come_are_named() -> None:
    store = dist.HashStore()
    store.set("host of rank 2", "node-b")
    with pytest.raises(UserError, match=r"^ranks 1, 3 of 4 have not joined in 0 s; their"):
        hosts.meet(store, 0, 4, SOON)


def test_an_error_in_communication_names_the_other_hosts() -> None:
    error = RuntimeError(LOST)
    assert hosts.loss(0, error) is None, "hosts are not known"
    met("node-a", "node-a", "node-b", "node-b", "node-c", "node-a")
    assert hosts.loss(0, RuntimeError("shapes do not match")) is None
    said = hosts.loss(2, error)
    assert said is not None and LOST in said
    here = socket.gethostname()
    where = f"other hosts have 0, 1 on node-a; 4 on node-c; 5 on {here}"
    assert said.startswith(f"rank 2 on node-b has lost a rank ({where})")


def test_a_thousand_hosts_are_counted() -> None:
    met(*(f"node-{number}" for number in range(1000)), "here")
    said = hosts.loss(0, dist.DistError(LOST))
    assert said is not None and "8 on node-8; 992 more hosts)" in said


def test_one_host_is_said_to_be_the_only_one() -> None:
    met(*[socket.gethostname()] * 2)
    assert f"(all are on {socket.gethostname()})" in (hosts.loss(0, RuntimeError(LOST)) or "")


@pytest.mark.parametrize("error", [StepFailed("rank 3: no data"), UserError("--tp 3: give 2")])
def test_other_errors_stay_as_they_are(error: Exception) -> None:
    def fail() -> None:
        raise error

    met("node-a", "here")
    with pytest.raises(type(error)) as caught:
        runtime.launch(fail, 1)
    assert caught.value is error


def test_a_rank_of_torchrun_says_whom_it_has_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError(LOST)

    met("node-a", "here")
    for name, value in dict(RANK="1", WORLD_SIZE="2", MASTER_ADDR="a", MASTER_PORT="1").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankError, match=r"(?s)has lost a rank .other hosts have 0 on.* in fail"):
        runtime.launch(fail, 2)
