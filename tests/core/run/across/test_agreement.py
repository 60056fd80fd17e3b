"""What one rank cannot do, none does: at once and with the same reason."""

import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_prefix.errors import CannotShare, StepFailed, UserError, refused
from megatron_prefix.features.across.communicator import Communicator
from megatron_prefix.lab import runtime
from megatron_prefix.lab.runtime import Layout, RankError, hosts
from megatron_prefix.refusals.table import NOT_CAUSAL
from megatron_prefix.run import agreement
from megatron_prefix.run.agreement import agree
from megatron_prefix.run.rank import default_groups, several
from tests.harness.ranks import run_ranks

CPU = torch.device("cpu")


def test_a_rank_alone():
    assert agree(None, [], CPU) is None
    refusal = CannotShare("no")
    assert agree(refusal, [], CPU) is refusal
    with pytest.raises(KeyError):
        agree(KeyError("x"), [], CPU)


def said(cases, layout):
    """What a rank hears when some have a problem, case by case."""
    runtime.initialize(layout)
    made = default_groups()
    groups = several(made.tp, made.pp, made.dp_cp)
    heard = []
    for problems in cases:
        try:
            found = agree(problems.get(torch.distributed.get_rank()), groups, CPU)
            refusal = () if found is None or found.refusal is None else (found.refusal,)
            heard.append(None if found is None else ("falls back", str(found), *refusal))
        except (StepFailed, KeyError) as error:
            heard.append((type(error).__name__, str(error)))
    runtime.shutdown()
    return heard


def test_all_ranks_hear_of_the_problem_of_one():
    """One that cannot share takes all with it, and one that fails ends all with its reason."""
    failed = {1: KeyError("data"), 2: CannotShare("a mask")}
    cases = [{}, {2: CannotShare("a mask")}, {1: refused(NOT_CAUSAL)}, failed]
    alike = [None, ("falls back", "a mask"), ("falls back", NOT_CAUSAL.given().text, NOT_CAUSAL)]
    heard = ("StepFailed", "the step ends on all ranks: rank 1: KeyError: 'data'")
    for rank, found in enumerate(run_ranks(4, said, cases, Layout(tp=2, pp=2))):
        assert found == [*alike, ("KeyError", "'data'") if rank == 1 else heard]


@pytest.mark.parametrize("layout", [Layout(cp=2), Layout(dp=2, ep=2)])
def test_ranks_of_every_kind_hear_of_it(layout):
    problems = {1: CannotShare("a mask")}
    assert run_ranks(2, said, [problems], layout) == [[("falls back", "a mask")]] * 2


# What data-parallel ranks know of one another's payloads ------------------------------------------


def told():
    """A rank's part: the first says what its rows are, three times; the other hears the first."""
    runtime.initialize(Layout(dp=2))
    made, model = Communicator(dist.group.WORLD, torch.device("cpu")), torch.nn.Linear(1, 1)
    known, found = made.known(model, False, False), list[object]()
    sent = []  # a message that nobody keeps is lost
    if made.rank == 1:
        found.append(made.rows(0, known, 1))
    for width in (3, 3, 4) if made.rank == 0 else ():
        try:
            sent.append(made.tell_rows(1, known, [(torch.zeros(2, width),)]))
            found.append(sent[-1] is not None)
        except RuntimeError as error:
            found.append(str(error))
    dist.barrier()
    # Another model, pass or mode is another payload.
    others = [made.known(torch.nn.Linear(1, 1), False, False), made.known(model, True, False)]
    others.append(made.known(model, False, True))
    others.append(made.known(model.eval(), False, False))
    found.append(all(one is not known and not one.told for one in others))
    runtime.shutdown()
    return found


def test_rows_are_said_once_and_may_not_change():
    first, second = run_ranks(2, told)
    assert first[:2] == [True, False] and "other shapes or dtypes" in str(first[2])
    assert second[0] == [[((3,), torch.float32)]]
    assert first[-1] and second[-1]


# Which rank is on which host, and what an error says of it ----------------------------------------

SOON = timedelta(milliseconds=50)
LOST = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 24000ms for recv operation"


@pytest.fixture(autouse=True)
def _unknown_again():
    yield
    agreement.hosts = ()


def met(*names):
    """Ranks on these hosts have met; this process is the last of them."""
    store = dist.HashStore()
    for rank, name in enumerate(names[:-1]):
        store.set(f"host of rank {rank}", name)
    hosts.meet(store, len(names) - 1, len(names), SOON)


def test_ranks_tell_one_another_where_they_are():
    assert agreement.named(1) == "rank 1"
    met("node-a", "here")
    assert agreement.named(0) == "rank 0 on node-a"
    assert agreement.named(1) == f"rank 1 on {socket.gethostname()}"


def test_ranks_that_do_not_come_are_named():
    store = dist.HashStore()
    store.set("host of rank 2", "node-b")
    with pytest.raises(UserError, match=r"^ranks 1, 3 of 4 have not joined in 0 s; their"):
        hosts.meet(store, 0, 4, SOON)


def test_an_error_in_communication_names_the_other_hosts():
    error = RuntimeError(LOST)
    assert hosts.loss(0, error) is None, "hosts are not known"
    met("node-a", "node-a", "node-b", "node-b", "node-c", "node-a")
    assert hosts.loss(0, RuntimeError("shapes do not match")) is None
    said = hosts.loss(2, error)
    assert said is not None and LOST in said
    here = socket.gethostname()
    where = f"other hosts have 0, 1 on node-a; 4 on node-c; 5 on {here}"
    assert said.startswith(f"rank 2 on node-b has lost a rank ({where})")


def test_a_rank_of_torchrun_says_whom_it_has_lost(monkeypatch):
    def fail():
        raise RuntimeError(LOST)

    met("node-a", "here")
    for name, value in dict(RANK="1", WORLD_SIZE="2", MASTER_ADDR="a", MASTER_PORT="1").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankError, match=r"(?s)has lost a rank .other hosts have 0 on.* in fail"):
        runtime.launch(fail, 2)
