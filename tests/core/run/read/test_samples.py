"""Masks of microbatches whose model calls have none: heeded where they fit, else all positions."""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.errors import CannotShare, UserError
from megatron_prefix.features.replay import routes
from megatron_prefix.features.replay.routes import ToldRoutes
from megatron_prefix.features.replay.told import FORWARD, RECORD, Told
from megatron_prefix.lab import runtime
from megatron_prefix.lab.runtime.layout import Layout
from megatron_prefix.run.calls import Callbacks, CallLayout, ModelCall
from megatron_prefix.run.read import step
from megatron_prefix.run.read.read_calls import trained_positions
from megatron_prefix.trainers.table import NEMO_RL
from tests.harness import steps
from tests.harness.one_rank import one_rank, small_model
from tests.harness.ranks import run_ranks

IDS = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 1, 0, 0]])
MASK = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0]])
LENGTHS = torch.tensor([6, 4])
FLAGS = [[0, 0, 1, 1, 1, 1], [0, 1, 1, 1]]


def nemo(**changes):
    data = {"input_ids": IDS, "token_mask": MASK, "input_lengths": LENGTHS, **changes}
    return SimpleNamespace(data_dict={name: v for name, v in data.items() if v is not None})


def heeded(tokens, lengths, rank=0, size=1, **changes):
    given = {} if tokens is None else {"input_ids": torch.tensor(tokens)}
    call = ModelCall(0, given, drawn=nemo(**changes))
    layout = CallLayout(lengths, tokens is not None and len(tokens) == 1)
    (found,) = trained_positions([call], [layout], NEMO_RL.samples, rank, size)
    return found


def test_trained_positions_predict_a_masked_token_or_are_last():
    found = NEMO_RL.samples(nemo())
    assert found is not None and [flags.int().tolist() for _, flags in found] == FLAGS
    assert [ids.tolist() for ids, _ in found] == [IDS[0].tolist(), IDS[1, :4].tolist()]


def test_masks_are_laid_out_as_the_call_is():
    rows = heeded(IDS.tolist(), (6, 6))
    assert rows is not None and rows.int().tolist() == [*FLAGS[0], *FLAGS[1], 0, 0]
    packed = heeded([[1, 2, 3, 4, 5, 6, 0, 0, 7, 8, 9, 1, 0, 0, 0]], (8, 4, 3))
    assert packed.int().tolist() == [*FLAGS[0], 0, 0, *FLAGS[1], 0, 0, 0]
    slices = [[1, 2, 0, 0, 7, 1]], [[3, 4, 5, 6, 8, 9]]  # of the zig-zag, each sample by itself
    flags = [[0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 1]]
    for rank, tokens in enumerate(slices):
        mine = heeded(tokens, (8, 4), rank, 2)
        assert mine is not None and mine.int().tolist() == flags[rank]


def test_masks_are_heeded_where_a_call_has_no_tokens():
    rows = heeded(None, (6, 6))
    assert rows is not None and rows.int().tolist() == [*FLAGS[0], *FLAGS[1], 0, 0]
    second = heeded(None, (8, 4), 1, 2)
    assert second is not None and second.all()
    for lengths in ((10,), (5, 4)):  # other samples
        assert heeded(None, lengths) is None


@pytest.mark.parametrize(("tokens", "lengths", "changes"), [
    ([[1, 2, 3, 4, 5, 6, 7, 8, 9, 2]], (6, 4), {}),  # another token
    ([[9, 2, 3, 4, 5, 6, 7, 8, 9, 1]], (6, 4), {}),  # another one, without loss
    ([[7, 8, 9, 1, 1, 2, 3, 4, 5, 6]], (4, 6), {}),  # another order
    ([[1, 2, 3, 4, 5, 6, 7, 8, 9, 1]], (10,), {}),  # another number of samples
    ([[1, 2, 3, 4, 5, 7, 8, 9, 1]], (5, 4), {}),  # a sample is shorter
    ([[1, 2, 3, 4, 5, 6, 7, 8, 9, 1]], (6, 4), {"token_mask": None}),
    ([[1, 2, 3, 4, 5, 6, 7, 8, 9, 1]], (6, 4), {"token_mask": MASK[:, 1:]}),
    ([[1, 2, 3, 4, 5, 6, 7, 8, 9, 1]], (6, 4), {"token_mask": MASK[:1]}),
])  # fmt: skip
def test_where_a_mask_does_not_fit_all_positions_count(tokens, lengths, changes):
    assert heeded(tokens, lengths, **changes) is None


@pytest.fixture
def model():
    with one_rank():
        yield small_model()


@pytest.mark.parametrize("mode", ["fits", "too little"])
def test_prompts_of_such_a_trainer_have_no_output_layer(model, mode):
    contract, items = steps.Contract(logits=True), steps.group(1, 4)
    if mode == "fits":
        for item in items:
            item["loss_mask"][:, :11] = 0  # none of the prompt

    def step(data_iterator, model):
        batch = next(data_iterator)
        output = model(batch["tokens"], batch["position_ids"], None)
        return output, contract.loss_func(batch)

    def samples(item):
        flags = item["loss_mask"] != 0
        flags[:, :11] = False
        return list(zip(item["tokens"], flags, strict=True))

    found = {}
    for callbacks in (Callbacks(), Callbacks(samples=samples)):
        schedule = PrefixSchedule(PrefixConfig(min_gain=0), callbacks)
        steps.zero_gradients(model)
        if mode == "too little" and callbacks.samples:
            with pytest.raises(UserError, match=r"a gradient reaches.*TRAINER_MASKS=false"):
                steps.call(schedule, step, model, items)
            return
        steps.call(schedule, step, model, items)
        inner = [segment for segment in schedule.report.forest.segments if segment.inner]
        found[any(segment.scored for segment in inner)] = steps.gradients(model)
        steps.call(schedule, step, model, items, forward_only=True)
        assert any(s.scored for s in schedule.report.forest.segments if s.inner)
    steps.assert_gradients(found[False], found[True], 1000)


# Routes that routers have been told: of which layers and stages, and what is refused of them ------

CPU = torch.device("cpu")
SHAPE = 3, 2
"""Layers of the whole model, and experts of a token."""


def rows(positions, layers):
    """int16 [positions, layers, topk], of numbers that say whose they are."""
    found = torch.arange(positions)[:, None] + 20 * torch.tensor(layers) + 1
    return torch.stack([found, found + 100], -1).to(torch.int16)


def ranks(size, rank=0):
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def test_layers_without_a_router_have_no_routes():
    """The first layer is dense: routes of the second one are the second one's."""
    told = ToldRoutes((1, 2), (rows(4, (1, 2)), rows(3, (1, 2))), SHAPE, None)
    layouts = [CallLayout((4,), True), CallLayout((3,), True)]
    found = told.gathered(layouts, 1, ranks(1), CPU)
    assert [len(one) for one in found] == [4, 3]
    for one in found:
        assert not one[:, 0].any() and torch.equal(one[:, 1:], rows(len(one), (1, 2)))


def test_stages_may_have_different_numbers_of_routers(monkeypatch):
    """A stage with one layer pads its part for the exchange, not what is made of it."""
    first, second = (
        ToldRoutes(layers, (rows(4, layers),), SHAPE, None) for layers in ((0,), (1, 2))
    )
    sent = [[], []]

    def exchanged(mine, _):
        """What the two stages give, one after another; the second one has run before."""
        sent[0].append(mine)
        return torch.cat([mine, sent[1][len(sent[0]) - 1]])

    def noted(mine, _):
        sent[1].append(mine)
        # The heads of both stages, then parts of the larger one's size.
        head = torch.tensor([[4, 1, 0, -1, -1]])
        return torch.cat([head, mine]) if len(sent[1]) == 1 else torch.cat([mine, mine])

    monkeypatch.setattr(routes, "_gathered_rows", noted)
    second.gathered((), 1, ranks(2, 1), CPU)
    monkeypatch.setattr(routes, "_gathered_rows", exchanged)
    [found] = first.gathered([CallLayout((4,), True)], 1, ranks(2), CPU)
    assert torch.equal(found, rows(4, (0, 1, 2)))


def test_what_was_told_before_the_step_is_no_microbatchs():
    """One tensor for all of them: it was set once, perhaps for the step before."""
    several = [Told(FORWARD, rows(4, (0,))[:, 0], source=source) for source in (1, 2)]
    check = routes._check_routes
    check(several, ahead=False)
    with pytest.raises(CannotShare, match=r"REPLAY_FORWARD, .* before the model call"):
        check([several[0]] * 2, ahead=False)
    with pytest.raises(CannotShare, match="REPLAY_FORWARD"):
        check([several[0], several[1]._replace(routes=None)], ahead=False)


@pytest.mark.parametrize("recording", [1, 2])
def test_routers_that_record_are_refused(recording):
    several = [Told(FORWARD, rows(4, (0,))[:, 0], source=source) for source in (1, 2)]
    several[-recording:] = [Told(RECORD, None)] * recording
    with pytest.raises(CannotShare, match="records routes"):
        routes._check_routes(several, ahead=False)


def test_microbatches_have_routes_all_or_none():
    one = Told(FORWARD, rows(4, (0,))[:, 0], source=1)

    def told_of(*each):
        return routes.told_of({0: "router"}, [{0: told} for told in each])

    assert told_of(one, one) == {0: ("router", [one, one])} and told_of(None, None) == {}
    with pytest.raises(CannotShare, match="some microbatches have routes and some have none"):
        told_of(one, None)


# What the first stage tells the others travels in one message, however long it is -----------------


def told(counts):
    """Whether this rank knows the first one's numbers, and by how many messages."""
    runtime.initialize(Layout(pp=2))
    heard = []
    for count in counts:
        numbers = list(range(5, 5 + count))
        with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast:
            mine = np.array(numbers if dist.get_rank() == 0 else [], np.int64)
            found = step._broadcast(mine, dist.group.WORLD, 0, CPU)
        heard.append((found.tolist() == numbers, broadcast.call_count))
    runtime.shutdown()
    return heard


def test_numbers_of_any_length_arrive():
    short, long = [0, 3, step.MESSAGE_NUMBERS - 1], [step.MESSAGE_NUMBERS, 20_000]
    messages = [(True, 1)] * 3 + [(True, 2)] * 2
    assert run_ranks(2, told, short + long) == [messages] * 2
