"""Rollouts dealt to ranks: each once, whole groups, balanced by what ranks run."""

import math
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_prefix.errors import UserError
from megatron_prefix.features.dealing import verl
from megatron_prefix.features.dealing.deal import DealtCosts, cost_of_length, deal
from megatron_prefix.lab.plans.dealing import balanced_parts
from tests.core.trainers import verl_batches
from tests.core.trainers.registry import installed, printed
from tests.harness.data import REPOSITORY


class Step(NamedTuple):
    """The arguments of `deal`."""

    groups: list[str]
    costs: list[float]
    shared: list[float]

    def first(self, num):
        return Step(*(column[:num] for column in self))


def loads(step, ranks):
    """What every rank runs, counted rollout by rollout."""
    found = []
    for part in ranks:
        begun = {}
        for number in part:
            name = step.groups[number]
            siblings = [s for g, s in zip(step.groups, step.shared, strict=True) if g == name]
            begun[name] = min(siblings)
        own = (step.costs[number] - begun[step.groups[number]] for number in part)
        found.append(sum(begun.values()) + sum(own))
    return found


@st.composite
def steps(draw):
    """Groups of any sizes, in any order, with beginnings of any length."""
    lengths = [
        (f"g{number}", prompt, prompt + answer)
        for number in range(draw(st.integers(0, 8)))
        for prompt in [draw(st.integers(0, 400))]
        for answer in draw(st.lists(st.integers(1, 400), min_size=1, max_size=8))
    ]
    rows = draw(st.permutations(lengths))
    quadratic = draw(st.sampled_from([0.0, 0.001]))
    return Step(
        [name for name, _, _ in rows],
        [cost_of_length(length, quadratic) for _, _, length in rows],
        [cost_of_length(prompt, quadratic) for _, prompt, _ in rows],
    )


def drawn(seed, num_groups, size, prompt, answer):
    """Groups with log-normal lengths, as responses have."""
    rng = np.random.default_rng(seed)
    prompts = rng.lognormal(math.log(prompt), 0.5, num_groups).astype(int) + 1
    shared = np.repeat(prompts, size).astype(float)
    costs = shared + rng.lognormal(math.log(answer), 0.8, num_groups * size).astype(int) + 1
    names = [f"g{number}" for number in range(num_groups) for _ in range(size)]
    return Step(names, costs.tolist(), shared.tolist())


@given(steps(), st.integers(1, 6))
def test_each_rollout_is_on_one_rank_and_loads_are_near_the_mean(step, num):
    ranks = deal(*step, num)
    assert len(ranks) == num
    assert sorted(number for part in ranks for number in part) == list(range(len(step.groups)))
    assert ranks == deal(*step, num)
    found = loads(step, ranks)
    assert [DealtCosts.of(*step).load(part) for part in ranks] == pytest.approx(found)
    assert max(found) <= 1.1 * sum(found) / num + max(step.costs, default=0) + 1e-6


@given(steps(), st.integers(1, 6))
def test_ranks_get_equally_many_and_run_no_more_than_by_length(step, num):
    step = step.first(len(step.groups) // num * num)
    ranks = deal(*step, num, equal=True)
    assert {len(part) for part in ranks} == {len(step.groups) // num}
    assert sorted(number for part in ranks for number in part) == list(range(len(step.groups)))
    lengths = [round(cost) for cost in step.costs]
    by_length = loads(step, balanced_parts(lengths, num))
    assert max(loads(step, ranks)) <= max(by_length) + max(step.costs, default=0) / 2 + 1


@given(steps(), st.integers(1, 6))
def test_siblings_are_side_by_side_in_the_order_given(step, num):
    for part in deal(*step, num):
        names = [step.groups[number] for number in part]
        assert len(set(names)) == sum(a != b for a, b in zip(names, [None, *names], strict=False))
        assert part == sorted(
            part, key=lambda number: (step.groups.index(step.groups[number]), number)
        )


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("num", [2, 8, 16])
@pytest.mark.parametrize(("prompt", "answer"), [(2000, 100), (500, 500), (100, 1000)])
def test_ranks_run_less_than_by_length(equal, num, prompt, answer):
    """As verl deals; 64 groups of 8: prompts that are long, alike, and short."""
    for seed in range(3):
        step = drawn(seed, 64, 8, prompt, answer)
        found = loads(step, deal(*step, num, equal=equal))
        by_length = loads(step, balanced_parts([int(cost) for cost in step.costs], num))
        assert max(found) < 1.1 * sum(found) / num
        # Executed once or on every rank: what is to be had grows with prompts and ranks.
        assert max(found) < {100: 0.99, 500: 0.92, 2000: 0.75}[prompt] * max(by_length)


def test_a_group_stays_whole_where_splitting_repeats_more():
    """A beginning of 1,000 and answers of 1: a second rank would save a few of 1,008."""
    step = Step(["a"] * 8 + ["b"] * 8, [1001.0] * 16, [1000.0] * 16)
    assert sorted(loads(step, deal(*step, 2))) == [1008, 1008]


def test_wrong_numbers_are_refused():
    with pytest.raises(UserError, match="0 ranks to deal rollouts to: give 1 or more"):
        deal(["a"], [1.0], [0.0], 0)
    with pytest.raises(UserError, match="3 rollouts, equally many for each of 2 ranks"):
        deal([*"aab"], [1.0] * 3, [0.0] * 3, 2, equal=True)
    assert deal([], [], [], 2) == [[], []]


HOOK = "megatron_prefix.auto.whole_groups"


def balanced():
    """What verl's two trainers did with the batch of tests/core/trainers/verl_batches.py, by their
    own method and by the one that is in its place."""
    words = "tests.core.trainers.verl_batches", str(installed("verl"))
    found = printed(4, *words, VERL_USE_EXTERNAL_MODULES=HOOK)
    return found[:2], found[2:]


@pytest.mark.slow
def test_verls_trainers_deal_whole_groups_with_one_setting():
    dealt_by_verl, ours = balanced()
    num = verl_batches.RANKS * verl_batches.MINI_BATCHES
    for stock, found in zip(dealt_by_verl, ours, strict=True):
        assert sum(len(set(part)) for part in stock["parts"]) > verl_batches.GROUPS
        assert sum(len(set(part)) for part in found["parts"]) == verl_batches.GROUPS
        assert [len(part) for part in found["parts"]] == [len(part) for part in stock["parts"]]
        assert len(found["parts"]) == num
        assert sum(found["tokens"]) == sum(stock["tokens"])
        metrics = found["metrics"]
        assert metrics["global_seqlen/balanced_max"] == max(found["tokens"])
        assert metrics["global_seqlen/balanced_min"] == min(found["tokens"])
        assert metrics["global_seqlen/executed_max"] < 0.85 * max(stock["tokens"])
        assert metrics["global_seqlen/executed_max"] < 1.1 * metrics["global_seqlen/executed_mean"]
        assert max(found["tokens"]) < 1.1 * min(found["tokens"])
        assert not [name for name in stock["metrics"] if "executed" in name]


class Batch:
    """A DataProto, as far as a trainer orders one."""

    def __init__(self, prompt=4):
        mask = torch.zeros(8, 12, dtype=torch.long)
        for row, answer in zip(mask, (2, 7, 1, 3, 5, 2, 6, 4), strict=True):
            row[4 - prompt : 4 + answer] = 1
        self.batch = {"attention_mask": mask, "prompts": mask[:, :4]}
        self.non_tensor_batch = {"uid": [*"abababab"]}

    def reorder(self, order):
        self.order = order.tolist()


def trainer(mini_batch):
    actor = SimpleNamespace(ppo_mini_batch_size=mini_batch)
    options = SimpleNamespace(actor=actor, rollout=SimpleNamespace(n=1))
    return SimpleNamespace(
        config=SimpleNamespace(actor_rollout_ref=options),
        actor_rollout_wg=SimpleNamespace(_dispatch_info={"actor": [0, 1]}),
    )


def hooked(function, place=0):
    """A module of verl whose trainer balances a batch with the function, and then as we do."""
    name, owner = [*verl.PLACES.items()][place]
    module = ModuleType(name)
    made = type(owner, (), {verl.NAME: function} if function else {})
    vars(module)[owner] = made
    verl.deal_whole_groups(module)
    return made._balance_batch


def stock(self, batch, metrics, logging_prefix="global_seqlen", keep_minibatch=False):
    metrics[f"{logging_prefix}/mean"] = 1


def test_a_batch_is_ordered_again():
    metrics = {}
    for mini_batch, size in ((8, 4), (4, 2)):
        batch = Batch()
        assert hooked(stock)(trainer(mini_batch), batch, metrics, logging_prefix="x") is None
        assert sorted(batch.order) == list(range(8))
        parts = [batch.order[start : start + size] for start in range(0, 8, size)]
        assert all(len({number % 2 for number in part}) == 1 for part in parts), "whole or halves"
    assert metrics["x/mean"] == 1
    assert (metrics["x/balanced_min"], metrics["x/balanced_max"]) == (30, 32)


def test_what_is_read_of_batches():
    found = verl.rollouts_of(Batch(prompt=3))
    assert found == ([*"abababab"], [5, 10, 4, 6, 8, 5, 9, 7], [3] * 8)
    tags = [{"prompt_len": 3, "seq_len": 5}, {"prompt_len": 2, "seq_len": 9}]
    kept = verl_batches.KVBatchMeta(["one_two_0_0", "pad12_1_0"], tags)
    assert verl.rollouts_of(kept) == (["one_two", "pad12"], [5, 9], [3, 2])


def test_what_is_not_as_expected_is_refused_by_name():
    def older(self, batch, metrics):
        pass

    for place, owner in enumerate(verl.PLACES.values()):
        with pytest.raises(UserError, match=f"{owner}._balance_batch takes self, batch, metrics, "):
            hooked(older, place)
        with pytest.raises(UserError, match=f"{owner}._balance_batch takes nothing, and not self"):
            hooked(None, place)
    assert verl.PARAMETERS.endswith("logging_prefix, keep_minibatch")
    with pytest.raises(
        UserError, match=r"keep_minibatch=True and megatron_prefix.auto.whole_groups"
    ):
        hooked(stock)(trainer(8), Batch(), {}, keep_minibatch=True)
    batch = Batch()
    del batch.non_tensor_batch["uid"]
    with pytest.raises(UserError, match="verl's Batch lacks 'uid': groups are not known"):
        hooked(stock)(trainer(8), batch, {})


def test_trainers_that_are_imported_later_are_reached(tmp_path):
    for name, owner in verl.PLACES.items():
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        text = f"class {owner}:\n    def _balance_batch({verl.PARAMETERS}):\n        pass\n"
        path.write_text(text, encoding="utf-8")
    code = f"""
import importlib, sys
import {HOOK}
assert not {{"torch", "megatron", "verl"}} & sys.modules.keys()
for name, owner in {verl.PLACES!r}.items():
    function = getattr(importlib.import_module(name), owner)._balance_batch
    assert function.__wrapped__.__module__ == name
assert not {{*{verl.PLACES!r}}} & {{getattr(finder, "_name", "") for finder in sys.meta_path}}
"""
    paths = os.pathsep.join([str(REPOSITORY), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
