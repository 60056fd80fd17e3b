"""What rows stand for, the ledger against losses written out token by token, and the hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import CannotShare, UserError
from megatron_prefix.features.experts.group_counts import GroupCounts
from megatron_prefix.features.experts.ledger import LOGGED_AS, RouterLedger
from megatron_prefix.features.experts.part import Routers
from megatron_prefix.features.experts.routers import routers as routers_in
from megatron_prefix.features.experts.tokens import LogicalTokens
from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.megatron import features, install
from megatron_prefix.parts import StepPart
from megatron_prefix.plan.planner import backward_order
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.parts_of_call import chosen
from megatron_prefix.run.rank import Rank
from megatron_prefix.tree import Forest, Pairs, TreeOptions, build
from tests.harness.one_rank import one_rank, small_model
from tests.harness.trees import as_pairs, rollout_sets, tree_options

EXPERTS, TOPK = 5, 2
CPU = torch.device("cpu")


def small_forest(align: int = 1) -> Forest:
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


@settings(max_examples=200)
@given(made=rollout_sets(), options=tree_options())
def test_spans_stand_for_every_token_of_every_rollout_once(made, options):
    rollouts, groups = made
    forest = build(rollouts, groups, options)
    microbatch_of = [rollout // 2 for rollout in range(len(rollouts))]
    logical = LogicalTokens(forest, microbatch_of, CPU)
    seen = np.zeros(len(rollouts), int)
    tokens = [0] * (max(microbatch_of) + 1)
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


class StubRouter:
    """A router's losses as Megatron's methods see them, on one rank, weight 3."""

    num_experts, topk, training, calculate_per_token_loss = EXPERTS, TOPK, True, False

    def __init__(self, coefficients: dict[str, float], z: float | None) -> None:
        self.coefficients, self.logged = coefficients, dict.fromkeys([*coefficients, "z"], 0.0)
        self.config = SimpleNamespace(moe_z_loss_coeff=z)
        self.tp_cp_group = self.tp_dp_cp_group = SimpleNamespace(size=lambda: 1)
        self.global_tokens_per_expert = torch.zeros(EXPERTS, dtype=torch.float64)
        self.ga_steps = torch.tensor(0.0)

    def get_aux_loss_coeff(self, kind: str) -> float:
        return self.coefficients.get(kind, 0.0)

    def attach_and_log_load_balancing_loss(
        self,
        activation: Tensor,
        coeff: float,
        loss: Tensor,
        name: str,
        group: Any,
        reduce_group_has_dp: bool = False,
        valid_token_count: Any = None,
    ) -> Tensor:
        kind = {logged: kind for kind, logged in LOGGED_AS.items()}[name]
        assert reduce_group_has_dp == (kind == "global_aux_loss")
        self.logged[kind] += float(loss.detach()) / coeff
        return MoEAuxLossAutoScaler.apply(activation, 3 * loss)

    def apply_z_loss(self, logits: Tensor) -> Tensor:
        loss = torch.logsumexp(logits, -1).square().mean()
        self.logged["z"] += float(loss.detach())
        return MoEAuxLossAutoScaler.apply(logits, 3 * self.config.moe_z_loss_coeff * loss)


@pytest.fixture(autouse=True)
def _weight_of_one() -> Iterator[None]:
    before = MoEAuxLossAutoScaler.main_loss_backward_scale
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    yield
    MoEAuxLossAutoScaler.main_loss_backward_scale = before


def inputs_of(forest: Forest, seed: int = 0) -> list[Tensor]:
    """Logits of the segments' positions, [padded_length, experts], padding included."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(s.padded_length, EXPERTS, generator=generator, dtype=torch.float64)
        for s in forest.segments
    ]


def scored(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scores = logits.softmax(-1)
    experts = torch.zeros_like(scores, dtype=torch.bool)
    experts.scatter_(1, scores.topk(TOPK, 1).indices, True)
    return experts, scores, logits.logsumexp(-1).square()


def written_out(
    forest: Forest, microbatch_of: list[int], logits: list[Tensor], weights: dict[str, float]
) -> tuple[Tensor, dict[str, float]]:
    """The losses on whole rollouts: their sum, and each one's, without its coefficient."""
    whole = []
    for path in forest.paths:
        pieces = []
        for index, position in path:
            rows = forest.segments[index].spans
            start = sum(span.padded for span in rows[:position])
            pieces.append(logits[index][start : start + rows[position].length])
        whole.append(torch.cat(pieces))

    def balance(tokens: Tensor, counts: Tensor | None = None) -> Tensor:
        experts, scores, _ = scored(tokens)
        factor = EXPERTS / (TOPK * len(tokens) ** 2)
        counts = experts.sum(0) if counts is None else counts
        return factor * (counts * scores.sum(0)).sum()

    microbatches = [
        [tokens for tokens, m in zip(whole, microbatch_of, strict=True) if m == microbatch]
        for microbatch in range(max(microbatch_of) + 1)
    ]
    joined = [torch.cat(samples) for samples in microbatches]
    counts = torch.stack([scored(tokens)[0].sum(0) for tokens in joined]).cumsum(0)
    averages = counts.double() / torch.arange(1, len(joined) + 1).unsqueeze(1)
    losses = {
        "aux_loss": sum(map(balance, joined)),
        "global_aux_loss": sum(map(balance, joined, averages)),
        "seq_aux_loss": sum(sum(map(balance, s)) / len(s) for s in microbatches),
        "z": sum(scored(tokens)[2].mean() for tokens in joined),
    }
    total = sum(weights[name] * losses[name] for name in weights)
    return total, {name: float(loss.detach()) for name, loss in losses.items()}


@pytest.mark.parametrize(
    "coefficients",
    [
        {"aux_loss": 1.0},
        {"seq_aux_loss": 2.0},
        {"global_aux_loss": 1.5},
        {"z": 0.5},
        {"aux_loss": 1.0, "seq_aux_loss": 2.0, "global_aux_loss": 1.5, "z": 0.5},
    ],
)
@pytest.mark.parametrize("align", [1, 4])
@pytest.mark.parametrize("microbatch_of", [[0, 1, 2], [0, 1, 0], [1, 0, 1]])
def test_gradients_are_those_of_the_losses_written_out(coefficients, align, microbatch_of):
    forest = small_forest(align)
    logits = [x.requires_grad_() for x in inputs_of(forest)]
    total, losses = written_out(forest, microbatch_of, logits, coefficients)
    expected = torch.autograd.grad(3 * total, logits)

    router = StubRouter(coefficients, coefficients.get("z"))
    sums = GroupCounts()
    ledger = RouterLedger(LogicalTokens(forest, microbatch_of, CPU), {7: router}, sums)
    terms = [scored(x) for x in logits]
    for index, (experts, scores, squares) in enumerate(terms):
        for _ in range(2):  # the second time is recompute
            ledger.count(7, index, experts, scores, squares)
    averaged = "global_aux_loss" in coefficients
    sums.begin(averaged * (max(microbatch_of) + 1))
    for index in backward_order(forest.segments):
        given = ledger.gradients(7, index, len(logits[index]))
        found = torch.autograd.grad(terms[index][1:], logits[index], given)[0]
        assert_close(found, expected[index], forest.raw_tokens, what=f"segment {index}")
    for name in coefficients:
        logged, wanted = (torch.tensor([x]) for x in (router.logged[name], losses[name]))
        assert_close(logged, wanted, forest.raw_tokens, torch.float64)
    seen = int(router.global_tokens_per_expert.sum()), int(router.ga_steps)
    assert seen == ((forest.raw_tokens * TOPK, max(microbatch_of) + 1) if averaged else (0, 0))


def test_tokens_are_counted_in_fp32_for_scores_of_16_bits():
    """Of bf16's whole numbers above 256 every other is missing."""
    tokens = np.arange(302)
    forest = build([Pairs(tokens[:-1], tokens[1:], np.ones(301, bool))])
    router = StubRouter({"aux_loss": 1.0}, None)
    ledger = RouterLedger(LogicalTokens(forest, [0], CPU), {0: router})
    experts = torch.ones(301, EXPERTS, dtype=torch.bool)
    for index in range(len(forest.segments)):
        ledger.count(0, index, experts, experts.bfloat16(), None)
    state = ledger._layers[0]
    assert state.counts.tolist() == state.masses.tolist() == [[301.0] * EXPERTS]


def test_gradients_before_the_last_token_are_refused():
    forest = small_forest()
    ledger = RouterLedger(
        LogicalTokens(forest, [0, 1, 0], CPU), {0: StubRouter({"aux_loss": 1.0}, None)}
    )
    logits = inputs_of(forest)
    for index in range(len(forest.segments) - 1):
        ledger.count(0, index, *scored(logits[index]))
    missing = {
        m for r in forest.segments[-1].spans for rollout in r.rollouts for m in [rollout % 2]
    }
    with pytest.raises(
        RuntimeError, match=f"layer 0: microbatches .*{min(missing)}.* were not counted"
    ):
        ledger.gradients(0, 0, len(logits[0]))


def test_a_loss_by_sample_wants_equal_samples():
    logical = LogicalTokens(small_forest(), [0, 1, 1], CPU)
    with pytest.raises(UserError, match="samples of several lengths"):
        RouterLedger(logical, {0: StubRouter({"seq_aux_loss": 1.0}, None)})
    RouterLedger(logical, {0: StubRouter({"aux_loss": 1.0}, None)})


# Hooks --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    with one_rank():
        yield small_model("tiny-moe", wrap_ddp=False)


def test_taking_the_hooks_off_leaves_the_routers_as_they_were(model):
    routers = routers_in(model)
    before = [dict(router.__dict__) for router in routers.values()]
    assert list(routers) == [0, 1]
    install.install(model)
    assert all("routing" in router.__dict__ for router in routers.values())
    install.uninstall(model)
    assert [dict(router.__dict__) for router in routers.values()] == before


def test_a_queue_of_routes_that_is_not_known_is_refused(model):
    """As slime's register_routing_replay and miles' register_to_module leave a router; and else."""
    router = routers_in(model)[1]

    def parts() -> tuple[StepPart, ...]:
        return chosen(PrefixConfig(), Rank.of([model]), Callbacks())

    router.routing_replay = SimpleNamespace(forward_index=0, backward_index=0, top_indices_list=[])
    assert [type(part).__name__ for part in parts()] == ["Routers", "RoutedStep"]
    router.routing_replay = SimpleNamespace(forward_index=0)
    with pytest.raises(CannotShare, match="layer 1's router takes its routes from a queue that is"):
        parts()
    del router.routing_replay
    assert [type(part).__name__ for part in parts()] == ["Routers"]


@contextlib.contextmanager
def in_segment(model: Any) -> Iterator[Any]:
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
def ledger(model: Any) -> Iterator[Any]:
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

    def routing(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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


def test_megatrons_own_routing_is_known_to_count_by_its_method(model, monkeypatch):
    copied = []
    stock = torch.Tensor.clone

    def clone(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        copied.append(tensor is router.local_tokens_per_expert)
        return stock(tensor, *args, **options)

    router = routers_in(model)[0]
    monkeypatch.setattr(router, "enable_expert_bias", True)
    monkeypatch.setattr(router, "local_tokens_per_expert", torch.zeros(8))
    monkeypatch.setattr(router, "expert_bias", torch.zeros(8))
    monkeypatch.setattr(torch.Tensor, "clone", clone)
    with in_segment(model):
        router.routing(torch.rand(2, 1, 8))
    assert not any(copied)
    assert int(router.local_tokens_per_expert.sum()) == 3 * 2 * router.topk
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


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("moe_expert_capacity_factor", 1.0, "moe_expert_capacity_factor: leave it out"),
        ("moe_pad_expert_input_to_capacity", True, "moe_pad_expert_input_to_capacity"),
        ("moe_token_dropping", True, "moe_token_dropping"),
        ("moe_input_jitter_eps", 0.1, "moe_input_jitter_eps"),
        ("moe_router_force_load_balancing", True, "moe_router_force_load_balancing"),
        ("moe_router_force_biased", 1.0, "moe_router_force_biased"),
        ("moe_router_load_balancing_type", "sinkhorn", "sinkhorn: use aux_loss"),
        ("moe_router_load_balancing_type", "quantile_balancing", "quantile_balancing"),
        ("moe_router_load_balancing_type", "expert_choice", "not known here"),
    ],
)
def test_routers_without_exact_accounting_are_refused_by_name(
    model, option, value, words, monkeypatch
):
    monkeypatch.setattr(model.config, option, value, raising=False)
    with pytest.raises(UserError, match=words):
        install.install(model)
    monkeypatch.setattr(model.config, "num_moe_experts", None)
    assert features.refusals(model.config) == []


def test_a_router_of_another_kind_is_refused(model, monkeypatch):
    monkeypatch.setattr(model.decoder.layers[1].mlp, "router", torch.nn.Identity())
    with pytest.raises(UserError, match="layer 1's router Identity"):
        install.install(model)
