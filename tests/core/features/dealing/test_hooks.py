"""Hooks of slime, miles, NeMo-RL, ROLL and AReaL, whose functions are stood in for: whole groups in
their own forms, or their own dealing. Their own sources: benchmarks/trainers/*dealing_steps.py."""

import contextlib
import itertools
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_prefix.features.dealing import areal, hooks, own, roll, slime
from megatron_prefix.features.dealing.microbatches import OwnDealing, chunked, cut, filled, packed
from megatron_prefix.features.dealing.rollouts import Rollouts

GROUPS, SIZE = 12, 4
CONFIG = {"dp_size": 4, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
ARGUMENTS = {
    "use_dynamic_batch_size": True, "max_tokens_per_gpu": 200, "micro_batch_size": 2,
    "loss_type": "policy_loss", "moe_aux_loss_coeff": 0.01,
    "moe_router_load_balancing_type": "none",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _forgotten():
    """Log lines come once."""
    own.stays.cache_clear()


def drawn(seed=0, num=GROUPS):
    """Tokens and answers of groups whose rollouts are mixed."""
    rng, pairs = np.random.default_rng(seed), []
    for group in range(num):
        prompt = [group, *rng.integers(0, 9, rng.integers(20, 60))]
        pairs += [(prompt, rng.integers(0, 9, rng.integers(1, 40)).tolist()) for _ in range(SIZE)]
    order = rng.permutation(len(pairs))
    return [(pairs[n][0] + pairs[n][1], len(pairs[n][1])) for n in order]


def groups_of(rollouts):
    return [tokens[0] for tokens, _ in rollouts]


@st.composite
def parts(draw):
    """Rollouts of any groups, and a number of ranks."""
    sizes = draw(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 9)), min_size=1, max_size=6))
    lengths = [prompt + draw(st.integers(1, 50)) for prompt, num in sizes for _ in range(num)]
    prompts = [prompt for prompt, num in sizes for _ in range(num)]
    names = [group for group, (_, num) in enumerate(sizes) for _ in range(num)]
    return Rollouts(names, lengths, prompts), draw(st.integers(1, 4))


@given(parts(), st.integers(1, 120), st.integers(1, 3))
def test_microbatches_are_equally_many_and_within_the_budget(step, budget, multiple):
    rollouts, num_ranks = step
    with contextlib.suppress(OwnDealing):
        check_filled(filled(rollouts, num_ranks, budget, multiple), *step, budget, multiple)
    num = len(rollouts.groups) // (num_ranks * multiple)
    if num and len(rollouts.groups) == num * num_ranks * multiple and multiple == 1:
        filled(rollouts, num_ranks, budget)  # equal numbers of rollouts always do


def check_filled(ranks, rollouts, num_ranks, budget, multiple):
    assert len(ranks) == num_ranks
    assert len({len(batches) for batches in ranks}) == 1
    assert len(ranks[0]) % multiple == 0
    batches = list(itertools.chain(*ranks))
    assert sorted(itertools.chain(*batches)) == list(range(len(rollouts.groups)))
    for batch in batches:
        assert batch
        assert len(batch) == 1 or sum(rollouts.lengths[n] for n in batch) <= budget
    for batches in ranks:
        names = [rollouts.groups[number] for batch in batches for number in batch]
        assert len(list(itertools.groupby(names))) == len(set(names)), "siblings are apart"


def test_microbatches_are_cut_in_halves():
    assert packed([3, 1, 2, 0], [5, 4, 9, 2], 8) == [[3, 1], [2], [0]]
    assert packed([0, 1, 2, 3], [3, 4, 9, 2], 8) == [[0, 1], [2], [3]]
    assert cut([[0, 1, 2], [3]], [4, 1, 5, 90], 3) == [[0, 1], [2], [3]]
    rollouts = Rollouts([*"aabb"], [5] * 4, [4] * 4)
    assert chunked(rollouts, 2, 2) == [[[0, 1]], [[2, 3]]]
    with pytest.raises(OwnDealing, match="4 rollouts are no multiple of 3 ranks times 1"):
        chunked(rollouts, 3, 1)
    with pytest.raises(OwnDealing, match="no rollouts"):
        filled(Rollouts([], [], []), 2, 9)


def module_of(stock, name="slime.utils.dp_schedule"):
    """A trainer's module after the hook."""
    module = ModuleType(name)
    module.build_dp_schedule = stock
    hooks.HOOKS[name](module)
    return module


def by_turns(args, train_parallel_config, total_lengths, *, global_batch_size, rollout_indices):
    """Dealt in turn, in microbatches of two rollouts; a step has as many as it should have."""
    num = train_parallel_config["dp_size"]
    places = [[] for _ in range(num)]
    parts, steps = [[] for _ in range(num)], len(total_lengths) // global_batch_size
    for step in range(steps):
        numbers = range(step * global_batch_size, (step + 1) * global_batch_size)
        for rank, place in enumerate(places):
            dealt = numbers[rank::num]
            for start in range(0, len(dealt), 2):
                place.append(list(range(len(parts[rank]), len(parts[rank]) + 2)))
                parts[rank] += dealt[start : start + 2]
    return parts, places, [global_batch_size // num // 2] * steps, [global_batch_size] * steps


def scheduled(rollouts, stock=by_turns, config=CONFIG, size=24, **more):
    """What the hooked function returns to a caller with the batch in `data`."""
    data = {"tokens": [np.array(tokens) for tokens, _ in rollouts],
            "response_lengths": [answer for _, answer in rollouts]}  # fmt: skip
    args, lengths = SimpleNamespace(**ARGUMENTS | more), list(map(len, data["tokens"]))
    return module_of(stock).build_dp_schedule(
        args, config, lengths, global_batch_size=size, rollout_indices=list(range(len(lengths)))
    )


def steps_of(schedule):
    """By step and rank the samples of its microbatches."""
    parts, places, numbers, _ = schedule
    ends = [0, *itertools.accumulate(numbers)]
    return [
        [[[part[n] for n in batch] for batch in place[start:end]]
         for part, place in zip(parts, places, strict=True)]
        for start, end in itertools.pairwise(ends)
    ]  # fmt: skip


@pytest.mark.parametrize("more", [{}, {"use_dynamic_batch_size": False}])
@pytest.mark.parametrize("vpp", [1, 2])
def test_slimes_steps_stay_and_groups_are_whole(more, vpp, caplog):
    rollouts = sorted(drawn(), key=lambda rollout: rollout[0][0])  # as slime has them
    config = CONFIG | {"vpp_size": vpp, "microbatch_group_size_per_vp_stage": 3}
    schedule, stock = scheduled(rollouts, config=config, **more), scheduled(rollouts, other)
    names, spread = groups_of(rollouts), []
    assert schedule[3] == [24, 24]
    for step, ranks in enumerate(steps_of(schedule)):
        numbers = [n for batches in ranks for batch in batches for n in batch]
        assert sorted(numbers) == list(range(step * 24, step * 24 + 24))
        assert {len(batches) for batches in ranks} == {schedule[2][step]}
        if more:
            assert {len(batch) for batches in ranks for batch in batches} == {2}
        else:
            assert schedule[2][step] % (3 if vpp > 1 else 1) == 0
            sums = [sum(len(rollouts[n][0]) for n in batch) for b in ranks for batch in b]
            assert max(sums) <= 200
        spread.append(sum(len({names[n] for b in batches for n in b}) for batches in ranks))
    assert max(spread) <= 8, "6 groups on 4 ranks: two are cut"
    own_spread = [sum(len({names[n] for b in batches for n in b}) for batches in ranks)
                  for ranks in steps_of(stock)]  # fmt: skip
    assert min(own_spread) == 24
    for part, place in zip(*schedule[:2], strict=True):
        assert [n for batch in place for n in batch] == list(range(len(part)))
    assert "whole groups" not in "".join(caplog.messages[:-1])


def other(*args, **options):
    """A function that takes something else."""
    return by_turns(*args, **options)


@pytest.mark.parametrize(("more", "why"), [
    ({"enable_mtp_training": True}, "--enable-mtp-training: its loss is a mean"),
    ({"moe_router_load_balancing_type": "aux_loss"}, "--moe-aux-loss-coeff"),
    ({"moe_router_load_balancing_type": ["seq_aux_loss"], "moe_aux_loss_coeff": [0.1]},
     "--moe-aux-loss-coeff"),
    ({"moe_z_loss_coeff": 1e-3}, "--moe-z-loss-coeff"),
    ({"loss_type": "custom_loss"}, "--loss-type custom_loss"),
    ({"custom_pg_loss_reducer_function_path": "a.b"}, "--custom-pg-loss-reducer"),
    ({"max_tokens_per_gpu": 1}, "too few for equal numbers of microbatches"),
])  # fmt: skip
def test_slimes_own_dealing_stays_and_the_log_says_why(more, why, caplog):
    rollouts = drawn(num=13)[:48] if "max_tokens_per_gpu" in more else drawn()
    config = CONFIG | {"vpp_size": 2, "microbatch_group_size_per_vp_stage": 5}
    for _ in range(2):
        schedule = scheduled(rollouts, config=config, **more)
    assert schedule == scheduled(rollouts, other)
    lines = [line for line in caplog.messages if why in line]
    assert len(lines) == 1
    assert "slime.utils.dp_schedule" in lines[0] or "test_hooks" in lines[0]


def test_slimes_losses_that_are_sums_are_dealt():
    for more in (
        {},
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0},
        {"moe_router_load_balancing_type": ["none"]},
        {"loss_type": "sft_loss"},
    ):
        args = SimpleNamespace(**ARGUMENTS | more)
        assert slime.depends_on_microbatches(args) == ""


def test_a_function_of_other_arguments_stays(caplog):
    module = module_of(other)
    assert module.build_dp_schedule is other
    assert caplog.messages == [
        "megatron_prefix: slime.utils.dp_schedule.build_dp_schedule deals as ever, not whole"
        " groups: it takes args, options"
    ]
    args = SimpleNamespace(**ARGUMENTS)
    function = module_of(by_turns, "miles.utils.dp_schedule").build_dp_schedule
    lengths = [5] * 24
    assert function(
        args, CONFIG, lengths, global_batch_size=24, rollout_indices=lengths
    ) == by_turns(args, CONFIG, lengths, global_batch_size=24, rollout_indices=lengths)
    assert "its caller has no `data`" in caplog.messages[-1]


class Packer:
    """One rollout a bin."""

    def pack(self, sequence_lengths):
        return [[number] for number in range(len(sequence_lengths))]


def get_packer(algorithm, bin_capacity, collect_metrics=False, min_bin_count=None,
               bin_count_multiple=None):  # fmt: skip
    return Packer()


def nemo():
    """NeMo-RL's module after the hook, as far as it deals: bins to ranks in turn."""
    module = ModuleType("nemo_rl.distributed.batched_data_dict")
    module.get_packer = get_packer

    class BatchedDataDict(dict):
        def shard_by_batch_size(
            self, shards, batch_size=None, allow_uneven_shards=False, dynamic_batching_args=None,
            sequence_packing_args=None,
        ):  # fmt: skip
            lengths = self["input_lengths"].tolist()
            parts, size = [[] for _ in range(shards)], batch_size or len(lengths)
            packer = module.get_packer("first_fit", bin_capacity=1)
            for start in range(0, len(lengths), size):
                bins = packer.pack(sequence_lengths=lengths[start : start + size])
                for rank, part in enumerate(parts):
                    part.append([[start + n for n in held] for held in bins[rank::shards]])
            return parts

    module.BatchedDataDict = BatchedDataDict
    hooks.HOOKS[module.__name__](module)
    return module


class Policy:
    """With a configuration, as NeMo-RL's."""

    def __init__(self, **megatron):
        self.cfg = {"megatron_cfg": {"moe_router_load_balancing_type": "none", **megatron}}

    def shards(self, data, num, size=None, budget=200, **more):
        packing = {"input_lengths_key": "input_lengths", "sequence_length_pad_multiple": 8,
                   "max_tokens_per_microbatch": budget}  # fmt: skip
        more = more or {"sequence_packing_args": packing}
        return data.shard_by_batch_size(num, batch_size=size, **more)


def batch(module, rollouts):
    lengths = [len(tokens) for tokens, _ in rollouts]
    data = module.BatchedDataDict(
        input_ids=torch.zeros(len(lengths), 128, dtype=torch.long),
        input_lengths=torch.tensor(lengths), token_mask=torch.zeros(len(lengths), 128),
        attention_mask=torch.arange(128) < torch.tensor(lengths)[:, None],
    )  # fmt: skip
    for row, (tokens, answer) in enumerate(rollouts):
        data["input_ids"][row, : len(tokens)] = torch.tensor(tokens)
        data["token_mask"][row, len(tokens) - answer : len(tokens)] = 1
    return data


@pytest.mark.parametrize("size", [None, 24])
def test_nemo_rl_packs_whole_groups(size):
    rollouts = sorted(drawn(), key=lambda rollout: rollout[0][0])
    module, num = nemo(), 4
    ranks = Policy().shards(batch(module, rollouts), num, size)
    names, chunks = groups_of(rollouts), list(zip(*ranks, strict=True))
    assert len(chunks) == (2 if size else 1)
    for number, chunk in enumerate(chunks):
        rows = sorted(n for batches in chunk for held in batches for n in held)
        assert rows == list(range(number * (size or 0), number * (size or 0) + (size or 48)))
        assert len({len(batches) for batches in chunk}) == 1
        for held in itertools.chain(*chunk):
            assert sum(-(-len(rollouts[n][0]) // 8) * 8 for n in held) <= 200
        spread = sum(len({names[n] for held in batches for n in held}) for batches in chunk)
        assert spread <= (8 if size else 13)


@pytest.mark.parametrize(("policy", "more", "why"), [
    (Policy(mtp_num_layers=1), {}, "mtp_num_layers: its loss is a mean"),
    (Policy(moe_router_load_balancing_type="aux_loss"), {}, "moe_router_load_balancing_type"),
    (Policy(), {"budget": 90}, "a rollout is longer than 90 tokens"),
    (Policy(), {"dynamic_batching_args": {}}, "dynamic batching cuts microbatches"),
    (SimpleNamespace(), {}, "the configuration of the policy is not known"),
])  # fmt: skip
def test_nemo_rls_own_dealing_stays_and_the_log_says_why(policy, more, why, caplog):
    module, rollouts = nemo(), drawn()
    rollouts[0] = (rollouts[0][0][:1] + [1] * 91, 40)
    shards = Policy.shards(policy, batch(module, rollouts), 4, **more)
    assert shards == [[[[n] for n in range(rank, 48, 4)]] for rank in range(4)]
    assert [line for line in caplog.messages if why in line] == caplog.messages[-1:]


def test_nemo_rl_generates_as_ever(caplog):
    data = batch(nemo(), drawn())
    assert data.shard_by_batch_size(48, None, True) == [[[[n]]] for n in range(48)]
    del data["token_mask"]
    Policy().shards(data, 1)
    assert not caplog.messages
    Policy().shards(data, 2)
    assert "no token_mask: prompts are not known" in caplog.messages[-1]


class Pipeline:
    """ROLL's, with a configuration."""

    def __init__(self, options=(), dynamic=False, scaled=True, **more):
        strategy = SimpleNamespace(strategy_config=dict(options))
        actor = SimpleNamespace(use_dynamic_batching_in_train=dynamic, apply_loss_scale=scaled,
                                strategy_args=strategy)  # fmt: skip
        self.pipeline_config = SimpleNamespace(actor_train=actor, seed=7, **more)

    def balanced(self, rollouts, size=48, prefix="x/actor_train", lacks=""):
        """The order of a batch, as far as it has one, and what is logged of it."""
        columns, order = batch(nemo(), rollouts), []
        columns["response_mask"] = columns["token_mask"]
        made = MagicMock(batch={name: value.roll(3, -1) for name, value in columns.items()})
        made.__len__.return_value = len(rollouts)
        made.reorder = lambda numbers: order.extend(numbers.tolist())
        made.batch.pop(lacks, None)
        module = ModuleType("roll.utils.functionals")
        exec(f"def batch_balance({roll.PARAMETERS}): return {{}}", vars(module))
        hooks.HOOKS[module.__name__](module)
        return order, module.batch_balance(made, 4, size, prefix)


def test_rolls_workers_shuffle_whole_groups_into_mini_batches():
    names = groups_of(rollouts := drawn())
    order, logged = Pipeline().balanced(rollouts, 24)
    assert sorted(order) == list(range(48)), "each once"
    assert logged["x/actor_train/executed_max"] < 1.1 * logged["x/actor_train/executed_mean"]
    for part in np.reshape(order, (4, 12)).tolist():
        draw = torch.Generator().manual_seed(7)
        parts = torch.utils.data.DataLoader(part, 6, shuffle=True, generator=draw, collate_fn=list)
        for found in ([names[number] for number in held] for held in parts):
            assert len(list(itertools.groupby(found))) == len(set(found)) <= 3


@pytest.mark.parametrize(("pipeline", "why"), [
    (Pipeline(dynamic=True), "deals once more, by length"),
    (Pipeline(scaled=False), "apply_loss_scale: without it"),
    (Pipeline(length_loss_weight=True), "length_loss_weight: its weights are relative"),
    (Pipeline(options={"mtp_num_layers": 1}), "mtp_num_layers: its loss is a mean"),
    (Pipeline(options={"expert_model_parallel_size": 2}), "moe_aux_loss_coeff is not 0"),
    (Pipeline(options={"moe_z_loss_coeff": 1, "moe_aux_loss_coeff": 0}), "moe_z_loss_coeff"),
])  # fmt: skip
def test_rolls_own_order_stays_and_the_log_says_why(pipeline, why, caplog):
    assert pipeline.balanced(drawn()) == ([], {})
    assert why in caplog.messages[-1]
    assert pipeline.balanced(drawn(), prefix="x")[0], "passes for log-probs have no losses"
    assert pipeline.balanced(drawn(), prefix="x", lacks="response_mask") == ([], {})
    assert "no response_mask: prompts are not known" in caplog.messages[-1]


class Actor:
    """AReaL's, with Megatron's configuration."""

    def __init__(self, m2_threshold=None, **options):
        known = {"num_moe_experts": 8, "moe_router_load_balancing_type": "aux_loss",
                 "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None}  # fmt: skip
        self.engine = SimpleNamespace(tf_config=SimpleNamespace(**known | options))
        self.m2_threshold = m2_threshold

    def mini_batches(self, rollouts, num):
        """Rollouts of each: in turn, or as the hooks have them."""
        columns, module, actor = batch(nemo(), rollouts), ModuleType("data"), ModuleType("actor")
        columns["loss_mask"] = columns["token_mask"].roll(-1, 1)  # `compute_advantages` moves it
        parts = [list(range(n, len(rollouts), num)) for n in range(num)]
        module.allocate_balanced_mbs_synced = lambda mb_spec, lens, group: parts
        hooks.HOOKS[areal.DATA](module)
        allocate = module.allocate_balanced_mbs_synced
        vars(actor)[areal.NAME] = lambda data, mb_spec, group: allocate(mb_spec, None, group)
        hooks.HOOKS[areal.PLACES[0]](actor)
        return vars(actor)[areal.NAME](columns, SimpleNamespace(n_mbs=num))


@pytest.mark.parametrize(("actor", "why"), [
    (Actor(), ""), (Actor(0.1), "m2_threshold"), (Actor(mtp_num_layers=1), "mtp_num_layers"),
    (Actor(moe_aux_loss_coeff=[0.1]), "moe_aux_loss_coeff, moe_z_loss_coeff"),
])  # fmt: skip
def test_areals_mini_batches_have_whole_groups_or_are_its_own(actor, why, caplog):
    parts, names = actor.mini_batches(rollouts := drawn(), 4), groups_of(rollouts)
    assert sorted(itertools.chain(*parts)) == list(range(48))
    spread = sum(len({names[number] for number in part}) for part in parts)
    assert spread > 30 and why in caplog.messages[-1] if why else spread <= 15
    assert actor.mini_batches(rollouts, 1) == [list(range(48))]
    actor.mini_batches(rollouts[:3], 4)
    assert why or "3 rollouts of a rank are too few for 4 mini-batches" in caplog.messages[-1]


def test_data_of_another_form_do_not_end_a_run(caplog):
    def deals():
        raise KeyError("tokens")

    own.stays.cache_clear()
    assert own.or_own("a trainer", deals, "its own") == "its own"
    [line] = caplog.messages
    assert "a trainer deals as ever, not whole groups: KeyError: 'tokens'" in line
