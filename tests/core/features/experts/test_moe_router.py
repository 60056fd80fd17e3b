"""What rows of segments stand for, and the hooks of routers; their losses and counts: rows of the
table of cases."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import CannotShare, UserError
from megatron_prefix.features.experts.ledger import RouterLedger
from megatron_prefix.features.experts.part import Routers
from megatron_prefix.features.experts.routers import routers as routers_in
from megatron_prefix.features.experts.tokens import LogicalTokens
from megatron_prefix.megatron import install
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.parts_of_call import chosen
from megatron_prefix.run.rank import Rank
from megatron_prefix.tree import TreeOptions, build
from tests.harness.one_rank import one_rank, small_model
from tests.harness.trees import as_pairs, rollout_sets, tree_options

EXPERTS, TOPK = 5, 2
CPU = torch.device("cpu")


def small_forest(align=1):
    """Three rollouts, the first and the last equally long, which share two positions more."""
    rollouts = [
        as_pairs(ids[:-1], ids[1:], [False] * 7 + [True] * (len(ids) - 8))
        for ids in (
            [0, 1, 2, 3, 4, 5, 6, 7, 1, 1, 20, 21],
            [0, 1, 2, 3, 4, 5, 6, 7, 2, 2, 2, 2, 22],
            [0, 1, 2, 3, 4, 5, 6, 7, 1, 1, 30, 31],
        )
    ]
    return build(rollouts, options=TreeOptions(multiple=align, min_gain=0))


@settings(max_examples=60)
@given(made=rollout_sets(), options=tree_options())
def test_spans_stand_for_every_token_of_every_rollout_once(made, options):
    rollouts, groups = made
    forest = build(rollouts, groups, options)
    microbatch_of = [rollout // 2 for rollout in range(len(rollouts))]
    logical = LogicalTokens(forest, microbatch_of, CPU)
    seen, tokens = np.zeros(len(rollouts), int), [0] * (max(microbatch_of) + 1)
    for index, segment in enumerate(forest.segments):
        of = logical[index]
        assert len(of.span_of) == segment.padded_length
        assert int(of.copies[of.span_of].sum()) == sum(of.numbers.values())
        for span, rollout in zip(of.span.tolist(), of.rollout.tolist(), strict=True):
            assert rollout in segment.spans[span].rollouts
            seen[rollout] += int((of.span_of == span).sum())
        for microbatch, number in of.numbers.items():
            tokens[microbatch] += number
    assert seen.tolist() == [len(rollout) for rollout in rollouts]
    assert tokens == logical.num_tokens
    padding = sum(span.padded - span.length for s in forest.segments for span in s.spans)
    unowned = sum(
        int((of.copies[of.span_of] == 0).sum())
        for of in map(logical.__getitem__, range(len(forest.segments)))
    )
    assert unowned == padding


def test_a_loss_by_sample_wants_equal_samples():
    def router(kind):
        return SimpleNamespace(
            num_experts=EXPERTS, topk=TOPK, training=True, calculate_per_token_loss=False,
            get_aux_loss_coeff=lambda asked: float(asked == kind),
            config=SimpleNamespace(moe_z_loss_coeff=None),
            tp_cp_group=SimpleNamespace(size=lambda: 1),
        )  # fmt: skip

    logical = LogicalTokens(small_forest(), [0, 1, 1], CPU)
    with pytest.raises(UserError, match="samples of several lengths"):
        RouterLedger(logical, {0: router("seq_aux_loss")})
    RouterLedger(logical, {0: router("aux_loss")})


@pytest.fixture(scope="module")
def model():
    with one_rank():
        yield small_model("tiny-moe", wrap_ddp=False)


def test_a_queue_of_routes_that_is_not_known_is_refused(model):
    """As slime's register_routing_replay and miles' register_to_module leave a router; and else."""
    router = routers_in(model)[1]

    def parts():
        return chosen(PrefixConfig(), Rank.of([model]), Callbacks())

    router.routing_replay = SimpleNamespace(forward_index=0, backward_index=0, top_indices_list=[])
    assert [type(part).__name__ for part in parts()] == ["Routers", "RoutedStep"]
    router.routing_replay = SimpleNamespace(forward_index=0)
    with pytest.raises(CannotShare, match="layer 1's router takes its routes from a queue that is"):
        parts()
    del router.routing_replay
    assert [type(part).__name__ for part in parts()] == ["Routers"]


@contextlib.contextmanager
def in_segment(model):
    """The ledger of a segment that runs, whose tokens stand for three each."""
    ledger = SimpleNamespace(
        route=lambda layer, index, routing_map: 3 * routing_map.sum(0), count=lambda *_: None
    )
    part = Routers(PrefixConfig(), Rank.of([model]), Callbacks())
    part.ledger_of = dict.fromkeys(routers_in(model).values(), ledger)
    hooks = install.install(model)
    hooks.current = SimpleNamespace(parts=[part], index=0)
    try:
        yield ledger
    finally:
        hooks.current = None


@pytest.fixture
def ledger(model):
    """See `in_segment`."""
    with in_segment(model) as found:
        yield found
    install.uninstall(model)


@pytest.mark.usefixtures("ledger")
def test_the_expert_bias_counts_a_recomputed_segment_once(model, monkeypatch):
    router = routers_in(model)[0]
    monkeypatch.setattr(router, "enable_expert_bias", True)
    monkeypatch.setattr(router, "local_tokens_per_expert", torch.zeros(4))
    routing_map = torch.tensor([[True, True, False, False], [True, False, False, True]])
    with torch.no_grad():  # the first forward of activation recomputation
        router._apply_expert_bias(routing_map)
    assert router.local_tokens_per_expert.tolist() == [0, 0, 0, 0]
    router._apply_expert_bias(routing_map)
    assert router.local_tokens_per_expert.tolist() == [6, 3, 0, 3]


def test_a_router_that_counts_for_itself_counts_every_rollout(model, monkeypatch):
    """verl's `routing` adds to the counts without Megatron's method for it."""
    router = routers_in(model)[0]
    routing_map = torch.tensor([[True, True, False, False], [True, False, False, True]])

    def routing(logits):
        if torch.is_grad_enabled():
            router.local_tokens_per_expert += routing_map.sum(0)
        return logits, routing_map

    monkeypatch.setattr(router, "enable_expert_bias", True)
    monkeypatch.setattr(router, "local_tokens_per_expert", torch.zeros(4))
    monkeypatch.setattr(router, "routing", routing)
    install.install(model)
    router.routing(torch.zeros(2, 4))
    assert router.local_tokens_per_expert.tolist() == [2, 1, 0, 1]  # outside of segments
    with in_segment(model):
        with torch.no_grad():
            router.routing(torch.zeros(2, 4))
        router.routing(torch.zeros(2, 4))
    assert router.local_tokens_per_expert.tolist() == [8, 4, 0, 4]
    install.uninstall(model)


def test_no_auxiliary_loss_in_eval_mode(model, ledger, monkeypatch):
    """As Megatron's routers have none."""
    router, counted = routers_in(model)[0], []
    monkeypatch.setattr(router.config, "moe_z_loss_coeff", 1.0)
    ledger.count = lambda *found: counted.append(found)
    logits = torch.randn(5, router.config.num_moe_experts)
    router.routing(logits)
    assert len(counted) == 1
    router.eval()
    router.routing(logits)
    router.train()
    assert len(counted) == 1


def test_a_router_of_another_kind_is_refused(model, monkeypatch):
    monkeypatch.setattr(model.decoder.layers[1].mlp, "router", torch.nn.Identity())
    with pytest.raises(UserError, match="layer 1's router Identity"):
        install.install(model)
