"""Memory "auto": which segments give way, and for what price."""

import random
from dataclasses import replace

import pytest
import torch

from megatron_prefix import PrefixSchedule
from megatron_prefix.features.measure.byte_meter import least_moment
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.predict.execution import Execution
from megatron_prefix.lab.predict.model import footprint_of
from megatron_prefix.lab.predict.peak_memory import predict_memory
from megatron_prefix.layers.model import cost_of
from megatron_prefix.plan.actions import Action, policies
from megatron_prefix.plan.layer_numbers import Payload
from megatron_prefix.plan.memory import MESSAGES, Footprint
from megatron_prefix.plan.memory_policy import Rates, automatic, leaner
from megatron_prefix.plan.planner import make_plan
from megatron_prefix.plan.sizes import LAYERS_LOADED, StageBytes
from megatron_prefix.tree import Forest, Place, Segment, Span, TreeOptions, build
from megatron_prefix.tree.payload_map import Form
from tests.harness import steps
from tests.harness.failures import CONFIG, items, run
from tests.harness.one_rank import small_model
from tests.harness.predicted import predicted_bytes
from tests.harness.steps import Contract, assert_bitwise
from tests.harness.trees import flat_rollouts, random_forest

pytestmark = pytest.mark.usefixtures("on_one_rank")

SPEC = resolve("llama3-8b")
FOOTPRINT, COST = footprint_of(SPEC, Execution()), cost_of(SPEC)
EVERYTHING = replace(FOOTPRINT, act=0.0)  # nothing that an activation function gives can be dropped
FAST, SLOW = Rates(5e14, 1e13), Rates(5e14, 1e9)


def plan_of(prompt = 10240, response = 2048, num = 8, num_ranks = 1,
            num_groups = 1, chunk_tokens = 0):  # fmt: skip
    rollouts, groups = flat_rollouts(prompt, response, num, num_groups)
    options = TreeOptions(segment_tokens=response, chunk_tokens=chunk_tokens)
    return make_plan(build(rollouts, groups, options), num_ranks)


def peak(plan, chosen, footprint=FOOTPRINT):
    return max(one.peak for one in predict_memory(replace(plan, policies=chosen), footprint))


def chosen(plan, free, rates=FAST, may_offload=True, **more):
    return automatic(plan, more.get("footprint", FOOTPRINT), COST, rates, free, may_offload)


def test_all_is_retained_where_it_fits():
    plan = plan_of()
    assert chosen(plan, peak(plan, ())) == ()
    assert chosen(plan, peak(plan, ()) - 1) != ()


def test_segments_that_take_turns_in_a_pool_keep_nothing():
    plan = plan_of(prompt=512, response=256, num=4)
    assert [segment.padded_length for segment in plan.segments] == [512, 256, 256, 256, 256]
    peak = lambda chosen, known: known.peaks(replace(plan, policies=chosen))[0].peak  # noqa: E731
    stage = StageBytes(inner=2.0, wave=3.0, scored=0.5, moment=1.0)
    own = Footprint((stage,), ((),), 0.0, layers=2)
    assert peak((), own) == 512 * 2 + 256 * (3 + 0.5 + 1)
    waves = replace(own, pool=4.0, pool_length=256, spared=4.0)
    # It is there while the prompt runs, too, which has more for its duration.
    assert peak((), waves) == 256 * 4 + 512 * (2 + 1) > 512 * 2 + 256 * (4 + 0.5 + 1)
    again = ("recompute", *("retain",) * 4)
    assert peak(again, waves) == max(256 * (4 + 0.5 + 1), 256 * 4 + 512 * (2 + 1))
    # The prompt runs again in the same place, which is as long as the prompt all the time.
    both = replace(waves, pool_length=512)
    assert peak(again, both) == 512 * (4 + 1)
    assert peak((), both) == peak((), waves)
    # A place is as long as the longest one, a half of that, and so on: of inner segments, too.
    assert peak((), replace(waves, pool_length=300)) == 300 * 4 + 512 * (2 + 1)
    assert peak((), replace(waves, pool_length=600)) == 300 * 4 + 600 * 2 + 512
    # A prompt that runs again has more than a wave spares: that is there in its backward.
    heavy = replace(both, stages=(stage._replace(inner=6.0),))
    assert peak(again, heavy) == 512 * (4 + 6 - 4 + 1)
    # What graphs do not have of a wave is kept as before.
    assert peak((), replace(waves, pool=1.0, spared=1.0)) == peak((), own)
    # So is what is there besides where the pool holds more than a wave spares.
    spared = replace(waves, spared=2.0)
    assert peak((), spared) == 256 * 4 + 512 * 2 + 256 * (3 + 0.5 - 2 + 1) > peak((), waves)
    light = policies(plan.segments, "recompute_act")
    assert peak(light, replace(waves, act=1.5)) == 256 * 2.5 + 512 * (0.5 + 1 + 1.5 / 2)
    # A stage that runs ahead (F0 F1 F2 F3 B1 ...) has as many as waves that it has under way.
    ahead = plan_of(prompt=512, response=256, num=4, num_ranks=2)
    places = replace(waves, stages=(StageBytes(),) * 2, payloads=((),) * 2, spared=0.0)
    assert [of_rank.peak for of_rank in places.peaks(ahead)] == [3 * 256 * 4, 256 * 4]
    ahead = replace(ahead, policies=again)
    assert replace(places, pool_length=512).peaks(ahead)[0].peak == 3 * 512 * 4


def test_what_graphs_do_not_have_of_a_prompt_is_not_in_its_place():
    """Experts for example, which are as long as the prompt."""
    plan = plan_of(prompt=512, response=256, num=4)
    peak = lambda chosen, known: known.peaks(replace(plan, policies=chosen))[0].peak  # noqa: E731
    stage = StageBytes(inner=2.0, wave=3.0, scored=0.5, moment=1.0)
    graphs = dict(pool=4.0, pool_length=600, spared=1.5, placed=1.75)
    placed = Footprint((stage,), ((),), 0.0, layers=2, **graphs)
    of_wave = 256 * (3 - 1.5 + 0.5 + 1)
    assert peak((), placed) == 300 * 4 + 600 * 1.75 + 512 * (2 - 1.5) + of_wave
    light = policies(plan.segments, "recompute_act")
    of_wave = 256 * (3 - 1 - 0.5 + 0.5 + 1 + 1 / 2)
    assert peak(light, replace(placed, act=1.0)) == 300 * 3 + 600 * 0.75 + 512 * 0.5 + of_wave
    # The prompt runs again in the pool, beside what graphs do not have of it.
    again = ("recompute", *("retain",) * 4)
    assert peak(again, placed) == 600 * 4 + 512 * (2 - 1.5 + 1)


def test_the_cheaper_way_is_taken():
    plan = plan_of()
    free = peak(plan, ()) - 1
    assert set(chosen(plan, free, FAST)) == {"offload", "retain"}
    assert set(chosen(plan, free, SLOW)) == {"recompute_act"}
    assert set(chosen(plan, free, FAST, may_offload=False)) == {"recompute_act"}
    for more in (dict(rates=SLOW), dict(may_offload=False)):
        assert set(chosen(plan, free, footprint=EVERYTHING, **more)) == {"recompute", "retain"}


def test_activations_are_dropped_before_anything_runs_again():
    plan = plan_of()
    light = policies(plan.segments, "recompute_act")
    fits = peak(plan, light)
    assert set(light) == {"recompute_act"}
    # A prompt's last MLP does not run; one layer of a wave comes back where its logits were.
    saved = 14336 * 2 * (31 * 10240 + 32 * 2048)
    assert peak(plan, ()) - fits == pytest.approx(saved)
    assert chosen(plan, fits, SLOW) == light
    assert chosen(plan, fits - 1, SLOW, may_offload=False)[0] == "recompute"


def test_only_as_many_segments_give_way_as_must():
    plan = plan_of(chunk_tokens=1024)
    most, least = peak(plan, ()), peak(plan, policies(plan.segments, "recompute"))
    counts = []
    for share in (0.9, 0.6, 0.3):
        found = chosen(plan, least + share * (most - least), SLOW, footprint=EVERYTHING)
        assert peak(plan, found) <= least + share * (most - least)
        counts.append(found.count("recompute"))
    assert 0 < counts[0] < counts[1] < counts[2] < 10


@pytest.mark.parametrize("share", [0.9, 0.5, 0.1])
def test_what_another_segment_makes_needless_is_retained(share):
    """In a pipeline a recomputed prompt's own backward can be the peak, with others still held."""
    plan = plan_of(16384, 64, 8, num_ranks=4, num_groups=4)
    footprint = replace(footprint_of(SPEC, Execution(num_stages=4)), act=0.0)
    most, least = (peak(plan, way, footprint) for way in ((), policies(plan.segments, "recompute")))
    free = least + share * (most - least)
    found = chosen(plan, free, may_offload=False, footprint=footprint)
    assert peak(plan, found, footprint) <= free
    first = found.index("recompute")
    assert found.count("recompute") < 4
    assert peak(plan, (*found[:first], "retain", *found[first + 1 :]), footprint) > free


def test_a_prefix_too_large_to_recompute_is_offloaded():
    """Recomputed as a whole it is as large as ever; offloaded a few layers come at a time."""
    plan = plan_of(prompt=40960, response=1024, num=4)
    lean = policies(plan.segments, "recompute")
    free = 0.5 * peak(plan, lean)
    assert chosen(plan, free, SLOW)[0] == "offload"
    assert peak(plan, chosen(plan, free, SLOW)) <= free


@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_tree_the_peak_fits_or_nothing_leaner_does(seed):
    rng = random.Random(seed)
    plan = make_plan(random_forest(rng), rng.randint(1, 4))
    small = footprint_of(resolve("tiny-llama"), Execution(num_stages=plan.num_ranks), 64)
    light = replace(plan, policies=policies(plan.segments, "recompute_act"))
    lean = leaner(light) or light
    least = peak(plan, lean.policies, small)
    for share in (0.0, 0.5, 0.95):
        free = share * peak(plan, (), small)
        found = chosen(plan, free, rng.choice([FAST, SLOW]), footprint=small)
        assert len(found) in (0, len(plan.segments))
        if found:
            waves = [p for p, s in zip(found, plan.segments, strict=True) if not s.inner]
            assert set(waves) <= {"retain", "recompute_act"}
        assert peak(plan, found, small) <= max(free, least, peak(plan, (), small))
        if free >= least:
            assert peak(plan, found, small) <= max(free, 1.0)


def test_the_leanest_plan_has_nothing_leaner():
    plan = plan_of(1024, 256, 4)
    assert (lean := leaner(plan)) and lean.policies == policies(plan.segments, "recompute")
    assert leaner(lean) is leaner(plan_of(16, 16, 1)) is None  # which has no inner segments


def test_a_step_takes_what_fits_its_budget():
    model = small_model()
    expected = run(PrefixSchedule(CONFIG), model)
    found = {}
    for budget in (1.0, 1e-3, 2e-4, 1e-6):
        config = replace(CONFIG, memory="auto", memory_budget_gb=budget)
        schedule = PrefixSchedule(config)
        with predicted_bytes():
            assert_bitwise(run(schedule, model), expected)
        report = schedule.report
        found[budget] = set(report.plan.policies), report.memory.peak
    assert found[1.0][0] == set()
    assert found[1e-6][0] == {"recompute", "recompute_act"}
    assert found[1e-6][1] < found[1.0][1]


def test_without_gradients_nothing_is_chosen():
    config = replace(CONFIG, memory="auto", memory_budget_gb=1e-6)
    schedule, model = PrefixSchedule(config), small_model()
    with torch.no_grad():
        steps.call(schedule, Contract().step, model, items(), forward_only=True)
    assert schedule.report is not None and schedule.report.plan.policies == ()


# Memory of a plan by measured numbers: every part by hand, on a prompt with two answers -----------

KEYS = Payload(Form.POSITIONS, 3.0, 5.0)
ONE = Footprint((StageBytes(100.0, 120.0, 40.0),), ((KEYS, KEYS),), message=7.0, layers=4)
"""Of one stage with two layers that leave keys."""


def small_plan(num_ranks=1, policy="retain"):
    """A prompt of 64 positions, and two answers of 16, all of them with loss."""
    prompt = Segment((Span(0, 64, 64, (0, 1)),), inner=True, scored=False)
    answers = [
        Segment((Span(64, 16, 16, (n,), Place(0, 0)),), inner=False, scored=True, trained=16)
        for n in (0, 1)
    ]
    plan = make_plan(Forest((prompt, *answers), (80, 80), (79, 79)), num_ranks)
    return replace(plan, policies=policies(plan.segments, policy))


def test_what_a_step_holds_at_its_peak():
    """In the first answer's backward: prompt, answer, K/V, gK/gV, and rows of one layer's."""
    [memory] = ONE.peaks(small_plan())
    kept, cache = 64 * 100 + 16 * (120 + 40), 2 * 64 * (3 + 5)
    level = 64 * (3 + 5)  # of one layer, while it reads the prompt
    assert memory.action == Action("B", 1) and memory.action.segment == 1
    assert (memory.kept, memory.cache, memory.moment) == (kept, cache, level)
    assert memory.peak == kept + cache + level
    assert memory.held == ((0, 6400.0), (1, 2560.0)) and memory.cache_peak == cache


def test_arenas_that_stay_are_there_all_the_time():
    """As long as in an earlier step, or as this one needs; gradients' from the first action on."""
    for least, cache in ((2000.0, 2000), (800.0, 2 * 64 * (3 + 5))):
        loads = replace(ONE, cache_least=least).of(small_plan()).loads(())
        first, *_, last = loads.cache[0]
        assert (first, loads.cache.max(), last >= least) == (max(least, 2 * 64 * 3), cache, True)
    # Where a segment reads itself alone, its backward makes them layer by layer.
    rollouts, groups = flat_rollouts(64, 16, 2, 1)
    options = TreeOptions(min_gain=4, segment_gain=32, segment_tokens=128, joins=True)
    plan = make_plan(build(rollouts, groups, options), 1)
    assert [segment.inner for segment in plan.segments] == [True]
    late, stays = (replace(ONE, cache_least=n).of(plan).loads(()) for n in (0.0, 1.0))
    assert [*(stays.moment - late.moment)[0]] == [0, plan.segments[0].padded_length * 5]


@pytest.mark.parametrize(("policy", "prompt", "answer"), [
    ("retain", 100, 160), ("recompute", 0, 160), ("offload", 0, 160), ("recompute_act", 90, 150),
])  # fmt: skip
def test_policies(policy, prompt, answer):
    footprint, plan = replace(ONE, act=10.0), small_plan(policy=policy)
    [memory] = footprint.peaks(plan)
    assert dict(memory.held)[0] == 64 * prompt
    if len(memory.held) > 1:
        assert dict(memory.held)[1] == 16 * answer
    if policy == "recompute":  # in the prompt's own backward all of it is there once more
        assert memory.action == Action("B", 0) and memory.moment == 64 * 100
    away = 64 * 100 if policy == "offload" else 0
    assert memory.staged == away
    assert footprint.of(plan).saved(())[0] == 6400
    loads = footprint.of(plan).loads(policies(plan.segments, "offload"))
    last = plan.programs[0].index(Action("B", 0))
    assert loads.moment[0, last] == LAYERS_LOADED / ONE.layers * 6400


def test_a_stage_receives_and_sends():
    """The second stage keeps what it has received, also of a recomputed segment."""
    footprint = replace(ONE, stages=ONE.stages * 2, payloads=((KEYS,), (KEYS,)))
    plan = small_plan(2, "recompute")
    first, last = footprint.of(plan).loads(plan.policies).own[:, 0]
    assert (first, last) == (0, 64 * 7)
    assert all(m.moment >= MESSAGES * 7 * 64 for m in footprint.peaks(plan))


def test_ranks_share_positions_and_keys():
    """With two context-parallel ranks, which keep halves of K/V, or all of them."""
    [whole] = ONE.peaks(small_plan())
    [half] = replace(ONE, parts=2, shares=2).peaks(small_plan())
    [gathered] = replace(ONE, parts=2).peaks(small_plan())
    assert (half.kept, half.cache_peak) == (64 * 50 + 8 * 120 + 8 * 40, whole.cache_peak / 2)
    assert (gathered.kept, gathered.cache_peak) == (half.kept, whole.cache_peak)


def test_a_state_is_no_row_of_every_position():
    """A recurrent layer leaves one row a span, of megabytes; levels read rows of positions."""
    state = Payload(Form("spans"), 1e6, 2e6)
    [keys] = ONE.peaks(small_plan())
    [both] = replace(ONE, payloads=((*ONE.payloads[0], state),)).peaks(small_plan())
    assert keys.peak < both.peak < keys.peak + 10 * 3e6


@pytest.mark.parametrize("seed", range(20))
def test_the_moment_is_found_from_the_peak(seed):
    """Whatever the tree: what `least_moment` says of a peak that was reached gives that peak, and
    of a higher one nothing lower."""
    rng = random.Random(seed)
    plan = make_plan(random_forest(rng), rng.randint(1, 3))
    numbers = StageBytes(rng.uniform(50, 100), rng.uniform(60, 120), 30.0, 5.0)
    empty = Footprint((numbers,) * plan.num_stages, ((KEYS,),) * plan.num_stages, 2.0, 4)
    stages = (numbers._replace(moment=rng.uniform(1, 50)),) * plan.num_stages
    for rank, memory in enumerate(replace(empty, stages=stages).peaks(plan)):
        if memory.peak:
            moment = least_moment(plan, empty, rank, memory.peak)
            assert moment == pytest.approx(stages[0].moment)
            assert least_moment(plan, empty, rank, 2 * memory.peak) > moment
