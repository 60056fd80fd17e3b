"""Routers account for every token that a rollout stands for: against Megatron's stock schedule.

Everything is fp64 except three things that Megatron keeps in fp32 whatever the model's dtype: the
RoPE table and the experts' biases, which are the same for both schedules, and its log of auxiliary
losses, which is judged in fp32.  Coefficients are 1, so that a wrong weight of an auxiliary loss
changes gradients by as much as the loss itself.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.features.across.span_sums import SpanSums
from megatron_prefix.features.experts import tokens
from megatron_prefix.features.experts.group_counts import GroupCounts
from megatron_prefix.features.experts.ledger import RouterLedger
from megatron_prefix.lab import runtime
from megatron_prefix.lab.data.pairs import pairs_of_groups
from megatron_prefix.lab.data.rollouts import Group, Rollout
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.plans.dealing import deal
from megatron_prefix.lab.plans.forest import trees
from megatron_prefix.lab.rl import passes
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.runtime.groups import forget_logged_losses
from megatron_prefix.lab.verify import align
from megatron_prefix.run.schedule import PrefixSchedule
from megatron_prefix.tree import build
from tests.harness.cases import run_cases
from tests.harness.ranks import run_ranks
from tests.harness.rows import chosen, rows
from tests.harness.stock_once import stock_once

pytestmark = pytest.mark.turns

VOCAB = 64
SP = {"sequence_parallel": True}
AUX = {"moe_aux_loss_coeff": 1.0}
SEQ = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1.0}
GLOBAL = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 1.0}
Z = {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 1.0}
AUX_Z = {**AUX, "moe_z_loss_coeff": 1.0}
BIAS = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_bias_update_rate": 0.05,
}
BOTH = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
    "moe_aux_loss_coeff": [1.0, 0.7],
    "moe_z_loss_coeff": 0.5,
}
ALL = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [1.0, 0.7, 2.0],
    "moe_z_loss_coeff": 0.5,
}


@dataclass(frozen=True)
class Case:
    """A model and a layout; `spec` changes ModelSpec, `config` Megatron's TransformerConfig."""

    spec: dict[str, Any] = field(default_factory=lambda: AUX_Z)
    layout: Layout = Layout()  # noqa: RUF009  # frozen
    prefix: PrefixConfig = PrefixConfig(min_gain=0)  # noqa: RUF009
    config: dict[str, Any] = field(default_factory=dict)
    recompute: str = "none"
    flat: bool = False
    uneven: bool = False  # flat groups on odd data-parallel ranks
    even: bool = False  # equally many microbatches on all ranks that prompts cross


CHUNKED = PrefixConfig(min_gain=0, chunk_tokens=8, segment_tokens=16)
JOINED = PrefixConfig(min_gain=1)
ACROSS = PrefixConfig(min_gain=0, across_ranks="on")
ACROSS_CHUNKED = replace(CHUNKED, across_ranks="on")
PER_TOKEN = {"calculate_per_token_loss": True, **BOTH}
CASES = {
    "no auxiliary loss": Case({"moe_aux_loss_coeff": 0.0}),
    "aux_loss": Case(AUX),
    "aux_loss, flat groups": Case(AUX, flat=True),
    "aux_loss, one rollout a wave": Case(AUX, prefix=PrefixConfig(min_gain=0, segment_tokens=1)),
    "seq_aux_loss": Case(SEQ),
    "global_aux_loss": Case(GLOBAL),
    "global_aux_loss, full recompute": Case(GLOBAL, prefix=CHUNKED, recompute="full"),
    "z-loss": Case(Z),
    "per-token loss": Case(config={"calculate_per_token_loss": True, **BOTH}),
    "sigmoid": Case(config={"moe_router_score_function": "sigmoid"}),
    "expert bias": Case(AUX, config=BIAS),
    "expert bias alone": Case({"moe_aux_loss_coeff": 0.0}, config=BIAS, flat=True),
    "shared experts": Case(config={"moe_shared_expert_intermediate_size": 24}),
    "groups of experts": Case(config={"moe_router_num_groups": 4, "moe_router_group_topk": 2}),
    "softmax before the choice": Case(
        {**AUX_Z, "moe_router_pre_softmax": True, "moe_router_topk": 3}
    ),
    "one layer of two is dense": Case({**AUX_Z, "moe_layer_freq": (False, True)}),
    "in one segment": Case(prefix=JOINED, config=BOTH),
    "in one segment, global_aux_loss": Case(GLOBAL, prefix=JOINED, recompute="full"),
    "in one segment, per-token loss": Case(prefix=JOINED, config=PER_TOKEN),
    "in one segment, expert bias": Case(prefix=JOINED, config=BIAS),
    "in one segment, TP2": Case(layout=Layout(tp=2, **SP), prefix=JOINED, config=PER_TOKEN),
    "in one segment, DP2": Case(layout=Layout(dp=2), prefix=JOINED, config=ALL, uneven=True),
    "all-gather": Case(
        config={"moe_token_dispatcher_type": "allgather", "variable_seq_lengths": False}
    ),
    "chunks": Case(prefix=CHUNKED, config=BOTH),
    "memory as it fits": Case(
        prefix=replace(CHUNKED, memory="auto", memory_budget_gb=1e-4), config=BOTH
    ),
    "offload of segments": Case(prefix=replace(CHUNKED, memory="offload"), config=BOTH),
    "sidecar on the host": Case(prefix=replace(CHUNKED, cache_host_layers=1), config=BOTH),
    "recompute of segments": Case(prefix=replace(CHUNKED, memory="recompute"), config=BOTH),
    "full recompute": Case(AUX_Z, prefix=CHUNKED, config=BIAS, recompute="full"),
    "full recompute, per-token loss": Case(
        prefix=CHUNKED, config={"calculate_per_token_loss": True, **BOTH}, recompute="full"
    ),
    "recompute of experts": Case(
        config={"recompute_modules": ["moe", "layernorm"]}, recompute="selective"
    ),
    "PP2": Case(layout=Layout(pp=2), prefix=CHUNKED, config=BOTH),
    "PP2 VPP2": Case({**AUX_Z, "num_layers": 4}, layout=Layout(pp=2, vpp=2)),
    "TP2": Case(layout=Layout(tp=2, **SP), config=BIAS),
    "TP2, per-token loss": Case(layout=Layout(tp=2, **SP), config=PER_TOKEN),
    "EP2": Case(layout=Layout(dp=2, ep=2), config=BIAS),
    "EP2, all-gather": Case(
        layout=Layout(dp=2, ep=2),
        config={"moe_token_dispatcher_type": "allgather", "variable_seq_lengths": False},
    ),
    "DP2, global_aux_loss": Case(GLOBAL, layout=Layout(dp=2), uneven=True),
    "DP2, global_aux_loss, per-token loss": Case(
        layout=Layout(dp=2),
        prefix=CHUNKED,
        uneven=True,
        config={"calculate_per_token_loss": True, **ALL},
    ),
    "EP2, global_aux_loss": Case(GLOBAL, layout=Layout(dp=2, ep=2), uneven=True),
    "PP2 DP2, global_aux_loss": Case(
        layout=Layout(pp=2, dp=2),
        prefix=replace(CHUNKED, memory="recompute"),
        config=ALL,
        uneven=True,
    ),
    "PP2 VPP2, global_aux_loss": Case({**GLOBAL, "num_layers": 4}, layout=Layout(pp=2, vpp=2)),
    "TP2, global_aux_loss": Case(layout=Layout(tp=2, **SP), config=ALL),
    "CP2": Case(layout=Layout(cp=2), prefix=CHUNKED, config=BOTH),
    "CP2, per-token loss": Case(
        layout=Layout(cp=2), config={"calculate_per_token_loss": True, **BIAS}
    ),
    "CP2 EP2": Case(layout=Layout(cp=2, ep=2)),
    "TP2 CP2": Case(layout=Layout(tp=2, cp=2, **SP)),
    "TP2 EP2, full recompute": Case(layout=Layout(tp=2, dp=2, ep=2, **SP), recompute="full"),
    "across ranks": Case(layout=Layout(dp=2), prefix=ACROSS_CHUNKED, config=PER_TOKEN),
    "across ranks, flat": Case(layout=Layout(dp=2), prefix=ACROSS, config=BOTH, flat=True),
    "across ranks, expert bias": Case(
        layout=Layout(dp=2), prefix=ACROSS, config=BIAS, recompute="full"
    ),
    "across ranks, expert bias alone": Case(
        {"moe_aux_loss_coeff": 0.0}, layout=Layout(dp=2), prefix=ACROSS, config=BIAS
    ),
    "across ranks, one layer is dense": Case(
        {**AUX_Z, "moe_layer_freq": (False, True)}, layout=Layout(dp=3), prefix=ACROSS
    ),
    "across ranks, TP2": Case(layout=Layout(dp=2, tp=2, **SP), prefix=ACROSS, config=PER_TOKEN),
    "across ranks, CP2": Case(layout=Layout(dp=2, cp=2), prefix=ACROSS, config=BOTH),
    "across ranks, EP2": Case(
        layout=Layout(dp=2, ep=2), prefix=ACROSS_CHUNKED, config={**PER_TOKEN, **BIAS}
    ),
    "across ranks, two groups of experts": Case(
        layout=Layout(dp=4, ep=2), prefix=ACROSS, config=BOTH, recompute="full"
    ),
    "across ranks, EP2 PP2": Case(
        layout=Layout(dp=2, ep=2, pp=2), prefix=replace(ACROSS, memory="recompute"), config=BOTH
    ),
    "across ranks, global_aux_loss": Case(GLOBAL, Layout(dp=2), ACROSS, even=True),
    "across ranks, global_aux_loss, per-token loss": Case(
        layout=Layout(dp=3),
        prefix=ACROSS_CHUNKED,
        even=True,
        config={"calculate_per_token_loss": True, **ALL},
    ),
    "across ranks, PP2, global_aux_loss": Case(
        layout=Layout(pp=2, dp=2),
        prefix=replace(ACROSS_CHUNKED, memory="recompute"),
        config=ALL,
        even=True,
    ),
    "across ranks, PP2 VPP2, global_aux_loss": Case(
        {**GLOBAL, "num_layers": 4}, Layout(pp=2, vpp=2, dp=2), ACROSS, even=True
    ),
    "across ranks, EP2, global_aux_loss": Case(
        GLOBAL, Layout(dp=2, ep=2), ACROSS, recompute="full"
    ),
    "across ranks, TP2, global_aux_loss": Case(
        layout=Layout(dp=2, tp=2, **SP), prefix=ACROSS, config=ALL, even=True
    ),
    "across ranks, CP2 EP2": Case(layout=Layout(dp=2, cp=2, ep=2), prefix=ACROSS, config=BOTH),
    "across ranks, PP2 VPP2": Case(
        {**AUX_Z, "num_layers": 4},
        layout=Layout(dp=2, pp=2, vpp=2),
        prefix=replace(ACROSS_CHUNKED, memory="recompute"),
    ),
}

# Each value of these rows, and each mistake, is in another one.
PRODUCTS = {
    "global_aux_loss, full recompute", "in one segment, global_aux_loss",
    "in one segment, expert bias", "in one segment, per-token loss", "in one segment, DP2",
    "TP2, global_aux_loss", "EP2, global_aux_loss", "DP2, global_aux_loss, per-token loss",
    "PP2 DP2, global_aux_loss", "PP2 VPP2", "CP2, per-token loss", "CP2 EP2", "TP2 CP2",
    "TP2 EP2, full recompute", "across ranks, flat", "across ranks, expert bias",
    "across ranks, EP2 PP2", "across ranks, global_aux_loss, per-token loss",
    "across ranks, PP2 VPP2, global_aux_loss", "across ranks, EP2, global_aux_loss",
    "across ranks, TP2, global_aux_loss", "across ranks, CP2 EP2", "across ranks, PP2 VPP2",
}  # fmt: skip


def groups(flat: bool, seed: int) -> list[Group]:
    """Two groups of four uneven rollouts: flat, or with a turn of the agent that two of them share.

    Lengths do not depend on the seed, and rollouts follow one another in an order that is not that
    of the tree.
    """
    draw = np.random.default_rng(seed)
    found = []
    for number in range(2):
        prompt, turn = draw.integers(0, VOCAB - 4, 21), draw.integers(0, VOCAB - 4, 9)
        rollouts = []
        for member in range(4):
            shared = [] if flat or member % 2 else turn
            own = draw.integers(0, VOCAB - 4, 5 + 3 * member)
            ids = np.concatenate([prompt, shared, [VOCAB - 4 + member], own]).astype(np.int32)
            spans = ((len(prompt), len(ids)),)
            rollouts.append(Rollout(f"g{number}", str(member), ids, len(prompt), spans, 0.0))
        found.append(Group(f"g{number}", tuple(rollouts)))
    return found


def test_the_groups_are_packed_unless_a_case_says_otherwise() -> None:
    """Both prompts in one segment, spans of four rollouts beside spans of two, and of one."""
    for flat in (False, True):
        options = Case().prefix.tree_options(1)
        forest = build(*pairs_of_groups(groups(flat, 0)), options)
        together = [len({*numbers}) for numbers in trees(forest.segments)]
        assert together == [2] * len(forest.segments)
        counts = {len(span.rollouts) for segment in forest.segments for span in segment.spans}
        assert counts == ({4, 1} if flat else {4, 2, 1})
    budgets = {case.prefix.segment_tokens for case in CASES.values()}
    assert budgets == {PrefixConfig().segment_tokens, CHUNKED.segment_tokens, 1}


def scattered(everything: list[Group], number: int, *, even: bool) -> list[Group]:
    """Rollouts of one data-parallel rank: some of each group, equally many or not."""
    taken = (((0, 2), (1, 3), (0, 1), (1, 2)) if even else ((0, 2, 3), (1,), (2, 3)))[number]
    return [
        replace(group, rollouts=tuple(group.rollouts[member] for member in taken))
        for group in everything
    ]


class Forgetful(PrefixSchedule):
    """The prefix schedule where no weight of auxiliary losses is left from the stock schedule."""

    def __call__(self, **arguments: Any) -> list[Any]:
        MoEAuxLossAutoScaler.set_loss_scale(torch.full([1], float("nan")))
        return super().__call__(**arguments)


MODELS: dict[str, list[Any]] = {}
"""Of a rank's process."""


def chunks_of(case: Case) -> list[Any]:
    """The model; cases that differ in the prefix schedule alone have one, and the stock schedule's
    step of it."""
    across = case.prefix.across_ranks == "on"
    kind = repr(replace(case, prefix=ACROSS if across else JOINED))
    if kind not in MODELS:
        experts = 8 if "moe_router_num_groups" in case.config else 4
        fields = {"num_layers": 2, "num_moe_experts": experts, **case.spec}
        MODELS[kind] = build_model(
            resolve("tiny-moe", **fields).with_vocab(VOCAB),
            layout=case.layout,
            dtype="float64",
            recompute=case.recompute,
            config_overrides=case.config,
        )
    return MODELS[kind]


def compare(case: Case, layout: Layout) -> str:
    """What differs, a line each; every data-parallel rank has groups of its own."""
    align.PrefixSchedule = Forgetful  # in this process only
    forget_logged_losses()  # of the case before
    number = align.data_rank()
    if case.prefix.across_ranks == "on":
        mine = scattered(groups(case.flat, 0), number, even=case.even or layout.ep > 1)
    else:
        mine = groups(case.flat or (case.uneven and number % 2 == 1), number)
    found = align.align(chunks_of(case), mine, case.prefix, multiple=layout.alignment)
    verdict = align.over_ranks(found)
    assert verdict.passed == (verdict.failures == ())
    assert verdict.executed_tokens < verdict.raw_tokens
    return "\n".join(verdict.failures)


@pytest.fixture(scope="module")
def outcome(request):
    """What every rank says of the cases of a layout, and of the mistakes in one."""
    every = {name: (name, "") for name in chosen(request, "name")}
    every |= {mistake: (MISTAKES[mistake][0], mistake) for mistake in chosen(request, "mistake")}

    @functools.cache
    def of(layout: Layout) -> list[dict[str, str]]:
        cases = {name: what for name, what in every.items() if CASES[what[0]].layout == layout}
        run = stock_once()(run_cases)
        return run_ranks(layout.world_size, run, layout, cases, compare_with)

    return of


@pytest.mark.parametrize("name", rows(CASES, PRODUCTS))
def test_a_step_is_that_of_the_stock_schedule(name, outcome):
    for rank, found in enumerate(outcome(CASES[name].layout)):
        assert not found[name], f"rank {rank}: {found[name]}"


def once(rows: Any, *place: int) -> list[np.ndarray]:
    """Every row stands for its first rollout only."""
    return STOCK_COLUMNS([span._replace(rollouts=span.rollouts[:1]) for span in rows], *place)


def together(self: tokens.LogicalTokens, microbatches: tuple[int, ...]) -> tokens.Closing:
    """Microbatches that end together are one."""
    closing = STOCK_CLOSING(self, microbatches)
    return closing._replace(place=torch.zeros_like(closing.place))


def alone(self: GroupCounts, router: Any) -> int:
    """Counts of this rank only."""
    one = SimpleNamespace(tp_dp_cp_group=SimpleNamespace(size=lambda: 1))
    return STOCK_ENTER(self, one)


def by_itself(self: RouterLedger, layer: int, microbatches: tuple[int, ...]) -> torch.Tensor:
    """Counts of each microbatch, not of those before it too."""
    place = self._places[layer]
    return torch.stack([self._group_counts.take(place, m) for m in microbatches])


def zeros(self: SpanSums, layer: int, index: int, name: str, sums: torch.Tensor) -> None:
    """Nothing is counted for other ranks."""
    STOCK_PUT(self, layer, index, name, torch.zeros_like(sums))


STOCK_PUT = SpanSums.put
STOCK_ENTER = GroupCounts.enter
STOCK_COLUMNS, STOCK_CLOSING = tokens.columns_of, tokens.LogicalTokens.closing
MISTAKES = {
    "aux_loss of rows": ("aux_loss", "tokens.columns_of", once),
    "seq_aux_loss of rows": ("seq_aux_loss", "tokens.columns_of", once),
    "global_aux_loss of rows": ("global_aux_loss", "tokens.columns_of", once),
    "global_aux_loss of a rank": (
        "DP2, global_aux_loss",
        "group_counts.GroupCounts.enter",
        alone,
    ),
    "global_aux_loss of other ranks": (
        "across ranks, global_aux_loss",
        "span_sums.SpanSums.put",
        zeros,
    ),
    "global_aux_loss, unordered": ("global_aux_loss", "ledger.RouterLedger._averages", by_itself),
    "z-loss of rows": ("z-loss", "tokens.columns_of", once),
    "rows on two ranks": ("TP2, per-token loss", "tokens.columns_of", once),
    "bias of rows": ("expert bias alone", "tokens.columns_of", once),
    "recomputed rows": ("full recompute, per-token loss", "tokens.columns_of", once),
    "rows of a pipeline": ("PP2", "tokens.columns_of", once),
    "losses of other ranks": ("across ranks", "span_sums.SpanSums.put", zeros),
    "bias of other ranks": ("across ranks, expert bias alone", "span_sums.SpanSums.put", zeros),
    "waves for microbatches": ("aux_loss, flat groups", "tokens.LogicalTokens.closing", together),
}


def compare_with(what: tuple[str, str], layout: Layout) -> str:
    """What differs in a case with a mistake, or with none."""
    name, mistake = what
    with pytest.MonkeyPatch.context() as patch:
        if mistake:
            _, where, wrong = MISTAKES[mistake]
            folder = "across" if where.startswith("span_sums.") else "experts"
            patch.setattr(f"megatron_prefix.features.{folder}.{where}", wrong)
        return compare(CASES[name], layout)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_count_is_seen(mistake, outcome):
    found = outcome(CASES[MISTAKES[mistake][0]].layout)[0][mistake]
    assert found and "Traceback" not in found, found
    failures = found.splitlines()
    biased = any("expert_bias" in line for line in failures)
    logged = any(line.split(": ")[-2].endswith("loss") for line in failures)
    gradients = any("gradient of" in line for line in failures)
    assert biased if mistake.startswith("bias") else logged and gradients


def test_one_schedule_on_all_data_parallel_ranks():
    """One rank has nothing to share, so neither does the other: their sums would not meet."""

    def on_rank() -> tuple[bool, bool, str, float]:
        runtime.initialize(Layout(dp=2))
        spec = resolve("tiny-moe", **{"num_layers": 1, **GLOBAL}).with_vocab(VOCAB)
        chunks = build_model(spec, layout=Layout(dp=2), dtype="float64")
        number = align.data_rank()
        mine = groups(True, 0)
        if number:  # of other prompts
            others = [groups(True, seed)[0] for seed in range(1, 9)]
            mine = [replace(group, rollouts=group.rollouts[:1]) for group in others]
        ours = PrefixSchedule(PrefixConfig(min_gain=0, mode="auto", min_speedup=1.2))
        items = align.microbatches(mine, 0)
        for item in items if number else ():
            item["loss_mask"][:] = 1.0  # no output may be left out either
        # Without gradients nothing is counted, so ranks need not go together.
        assert len(passes.logprobs(ours, chunks, items[: 3 + number])) == 3 + number
        align.run_step(ours, chunks, items)
        decision = ours.report.decision
        return decision.share, decision.fallback, decision.reason, decision.predicted_speedup

    first, second = run_ranks(2, on_rank)
    assert first[3] > 1.2 > second[3]
    assert not first[0] and not second[0] and first[1] and second[1]
    assert "another data-parallel rank" in first[2]
    assert "share too few first positions" in second[2]


def test_ranks_that_count_together_get_equally_many_rollouts():
    mine = [
        replace(group, rollouts=group.rollouts[: 2 + n]) for n, group in enumerate(groups(True, 0))
    ]
    config, layout = PrefixConfig(mode="on"), Layout(dp=2)
    apart = deal(mine, resolve("tiny-moe", **AUX), layout, config, stock=False)
    assert sorted(sum(len(group.rollouts) for group in rank) for rank in apart) == [2, 3]
    with pytest.raises(UserError, match="5 rollouts"):
        deal(mine, resolve("tiny-moe", **GLOBAL), layout, config, stock=False)
