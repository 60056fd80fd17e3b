"""Routers on random trees, several rollouts a microbatch, in fp64: against Megatron's schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from megatron_prefix.config import PrefixConfig
from megatron_prefix.features import replays_routes
from megatron_prefix.features.experts.routers import routers as routers_in
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.lab.verify.observed import take_auxiliary
from megatron_prefix.run import schedule
from megatron_prefix.tree import TreeOptions
from tests.harness import steps
from tests.harness.fuzzing import rounds
from tests.harness.one_rank import change_rank, one_rank, small_model
from tests.harness.steps import Contract, Microbatch
from tests.harness.trees import rollout_sets, tree_options, with_routes

LOSSES = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [1.0, 0.7, 1.3],
    "moe_z_loss_coeff": 0.5,
}
LAYERS, EXPERTS = 2, 4
BIAS = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
MODELS = {
    "losses": LOSSES,
    "biased": {**BIAS, "moe_aux_loss_coeff": 1.0},
    "recomputed": {**LOSSES, **BIAS},
    "replayed": {**LOSSES, **BIAS, "moe_enable_routing_replay": True},
}


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, Any]]:
    """Models without DDP, so that nothing resets the routers' counts."""
    with one_rank():
        made = {
            name: small_model(
                "tiny-moe",
                spec={"num_layers": LAYERS, "num_moe_experts": EXPERTS},
                recompute="full" if name in ("recomputed", "replayed") else "none",
                config_overrides=overrides,
                wrap_ddp=False,
            )
            for name, overrides in MODELS.items()
        }
        yield made
        made.clear()


contracts = st.builds(
    Contract,
    triple=st.booleans(),
    per_token=st.booleans(),
    logits=st.just(True),
    scale=st.sampled_from([None, 8.0]),
)


@st.composite
def step_inputs(draw: Any) -> list[Microbatch]:
    """Rollouts in microbatches of one to three samples of one group, in any order."""
    rollouts, members = draw(rollout_sets())
    parts = [draw(st.integers(0, 2 * len(rollout))) for rollout in rollouts]
    rollouts = with_routes(rollouts, LAYERS, EXPERTS, parts)
    items: list[Microbatch] = []
    for group in dict.fromkeys(members):
        left = [rollout for rollout, g in zip(rollouts, members, strict=True) if g == group]
        while left:
            num = draw(st.integers(1, 3))
            items.append(steps.microbatch(left[:num], f"group {group}", len(items)))
            left = left[num:]
    return draw(st.permutations(items))


@dataclass(frozen=True)
class Replaying(Contract):
    """A trainer that has routers follow the routes of its microbatches."""

    def step(self, data_iterator: Iterator[Microbatch], model: Any) -> Any:
        routers = routers_in(unwrap(model))
        return steps.replaying(super().step, routers)(data_iterator, model)


def configure(model: Any, contract: Contract, num_microbatches: int) -> None:
    """What the trainer sets, and the weight of auxiliary losses that Megatron derives from it."""
    contract.configure(model)
    for router in routers_in(unwrap(model)).values():
        router.calculate_per_token_loss = contract.per_token
    scale = contract.scale or 1.0
    weight = scale if contract.per_token else scale / num_microbatches
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor([weight]))


class Taken(NamedTuple):
    """What a step leaves behind: gradients, logged losses, and the routers' counts."""

    gradients: dict[str, Tensor]
    logged: dict[str, Tensor]
    counts: list[Tensor]
    averaged: list[Tensor]


def taken(model: Any) -> Taken:
    """All of it since the last time."""
    gradients = steps.gradients(model)
    steps.zero_gradients(model)
    counts: list[Tensor] = []
    averaged: list[Tensor] = []
    for router in routers_in(unwrap(model)).values():
        if router.enable_expert_bias:
            counts.append(router.local_tokens_per_expert.clone())
            router.local_tokens_per_expert.zero_()
        if router.global_tokens_per_expert is not None:
            averaged += [router.global_tokens_per_expert.clone(), router.ga_steps.clone()]
            router.reset_global_aux_loss_tracker()
    return Taken(gradients, take_auxiliary([unwrap(model)]), counts, averaged)


def check(
    model: Any, items: Sequence[Microbatch], contract: Contract, schedule: schedule.PrefixSchedule
) -> None:
    configure(model, contract, len(items))
    if replays_routes(unwrap(model).config):
        contract = Replaying(**vars(contract))
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        RouterReplay.clear_global_indices()
    num_positions = sum(item["tokens"].numel() for item in items)
    # Without DDP nothing divides by the number of tokens: then losses are sums.
    summed = contract.triple and contract.per_token
    plain = steps.plain(model, replace(contract, triple=contract.triple and not summed), items)
    terms = {name: x * len(items) if summed else x for name, x in plain.terms.items()}
    taken(model)

    steps.call(get_forward_backward_func(), contract.step, model, items)
    expected = taken(model)
    MoEAuxLossAutoScaler.set_loss_scale(torch.full([1], float("nan")))
    steps.call(schedule, contract.step, model, items)
    found = taken(model)

    wanted = steps.Reference(expected.gradients, terms)
    steps.assert_gradients(found.gradients, wanted, num_positions)
    assert found.logged.keys() == expected.logged.keys()
    for name, losses in expected.logged.items():
        assert_close(found.logged[name], losses, num_positions, what=name)
    for ours, theirs in ((found.counts, expected.counts), (found.averaged, expected.averaged)):
        assert len(ours) == len(theirs)
        assert all(map(torch.equal, ours, theirs))
    assert [int(c.sum()) for c in found.counts] == [2 * num_positions for _ in found.counts]
    sizes = [2 * num_positions, len(items)] * (len(found.averaged) // 2)
    assert [int(x.sum()) for x in found.averaged] == sizes

    with torch.no_grad():
        steps.call(schedule, contract.step, model, items, forward_only=True)
    after = taken(model)
    assert not any(torch.any(x != 0) for name, x in after.logged.items() if "loss" in name)
    assert not any(torch.any(x != 0) for x in [*after.counts, *after.averaged])


# Shrinking takes minutes, and a failing example is small as it is.
@settings(
    max_examples=rounds(12, 500, fewest=6), phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
@given(
    name=st.sampled_from(list(MODELS)),
    items=step_inputs(),
    contract=contracts,
    options=tree_options(),
)
def test_random_trees(models, name, items, contract, options: TreeOptions):
    with pytest.MonkeyPatch.context() as patch:
        change_rank(patch, alignment=options.multiple)
        config = PrefixConfig(
            chunk_tokens=options.chunk_tokens,
            segment_tokens=options.segment_tokens,
            min_gain=options.min_gain,
            loss_in_leaves=options.loss_in_leaves,
            kernel="math",
        )
        prefix = schedule.PrefixSchedule(config, steps.routes_of(items))
        check(models[name], items, contract, prefix)
