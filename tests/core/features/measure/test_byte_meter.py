"""What mode "auto" and memory "auto" learn of bytes, from counters in the place of a GPU's."""

import contextlib
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.device import memory
from megatron_prefix.features.host.segment import addresses
from megatron_prefix.features.measure import allocator
from megatron_prefix.features.measure.allocator import Peaks
from megatron_prefix.features.measure.byte_meter import StageCount, of_all_ranks
from megatron_prefix.lab import runtime
from megatron_prefix.lab.bench.counted import SavedBytes
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.plan import prediction
from megatron_prefix.plan.sizes import StageBytes
from megatron_prefix.sidecar.arena import DeviceBytes
from tests.core.run.execute.test_memory_limit import batches
from tests.harness import steps
from tests.harness.one_rank import one_rank, small_model
from tests.harness.ranks import run_ranks


class Allocator:
    """Counts bytes of sidecars and what autograd saves, while it runs; no weights of the model.
    `hot` multiplies what is saved, as if this rank's tokens went to more experts."""

    def __init__(self, model):
        inner = unwrap(model)
        self._saved = SavedBytes(addresses(*inner.parameters(), *inner.buffers()), self.note)
        self.arenas, self.highest, self.hot = 0.0, 0.0, 1.0

    @property
    def used(self):
        return self.arenas + self.hot * self._saved.now

    def note(self):
        self.highest = max(self.highest, self.used)

    @contextlib.contextmanager
    def running(self):
        """The core takes what is counted here for what a GPU's allocator says."""
        add = DeviceBytes.add

        def added(device_bytes, num_bytes):
            add(device_bytes, num_bytes)
            self.arenas += num_bytes
            self.note()

        def peaks(device):
            self._saved.look()
            self.note()
            return Peaks(self.used, self.highest, self.highest)

        with (
            mock.patch.object(DeviceBytes, "add", added),
            mock.patch.object(memory, "counts_bytes", return_value=True),
            mock.patch.object(allocator, "peaks", peaks),
            self._saved.counting(),
        ):
            yield self


OPTIONS = dict(segment_tokens=96, min_gain=0, min_speedup=0.01)


@pytest.fixture
def model(monkeypatch):
    """No bytes are too few to count."""
    monkeypatch.setattr(prediction, "LEAST_OVER", 0.0)
    with one_rank():
        yield small_model("tiny-llama", vocab=128, spec={"num_layers": 3}, dtype=torch.float32)


class Step:
    """One step of a schedule: its decision, and the most bytes at once in it alone."""

    def __init__(self, schedule, model, items, allocator):
        before, allocator.highest = allocator.highest, allocator.used
        with allocator.running():
            steps.run(schedule, steps.Contract().step, model, items)
        self.report = schedule.report
        self.limit = schedule.memory.limit
        self.share = schedule.report.decision.share
        self.policies = {*schedule.report.plan.policies}
        self.peak = allocator.highest
        allocator.highest = max(before, allocator.highest)


def schedule_of(mode="auto", **options):
    config = PrefixConfig(mode=mode, **{**OPTIONS, **options})
    with mock.patch.object(memory, "may_count", return_value=True):
        return PrefixSchedule(config, looks_first=mode == "auto")


def run(model, items, number=4, **options):
    """The first steps of a schedule."""
    schedule, allocator = schedule_of(**options), Allocator(model)
    return [Step(schedule, model, items, allocator) for _ in range(number)]


def test_auto_keeps_to_what_stock_has_taken(model):
    """The first step is Megatron's; then none takes more, the first shared one included, and what
    is predicted of later ones is what they take."""
    watched, *shared = run(model, batches("shuffled"), 4)
    assert not watched.share and all(step.share for step in shared)
    weights = sum(2 * p.numel() * p.element_size() for p in model.parameters())
    limit = 1.05 * (watched.peak + weights) - weights
    assert shared[0].peak <= limit
    for step in shared[1:]:
        assert step.limit == pytest.approx(limit, rel=0.01)
        assert step.peak <= 1.02 * limit
        assert step.report.memory.peak == pytest.approx(step.peak, rel=0.06)
    assert not {"recompute", "recompute_act"}.isdisjoint(shared[-1].policies)


def test_mode_on_learns_from_a_lean_step(model):
    """All inner segments run again in the first; what they keep is known all the same."""
    first, *later = run(model, batches("in groups"), 3, mode="on")
    assert first.policies == {"recompute", "retain"} and first.limit == float("inf")
    assert not first.report.memory.kept
    for step in later:
        assert step.policies == set() and step.peak > first.peak
        assert step.report.memory.peak == pytest.approx(step.peak, rel=0.04)


def test_a_first_step_has_no_longer_segment_than_microbatch(model):
    """Microbatches are of 192 positions, and answers of six rollouts fill one."""
    first, second = run(model, batches("in groups", size=1), 2, mode="on", segment_tokens=2048)
    lengths = ([s.padded_length for s in step.report.plan.segments] for step in (first, second))
    short, long = map(max, lengths)
    assert short <= 192 < long


def test_what_a_policy_drops_is_known_to_be_kept_without_it(model):
    numbers = []
    for policy in ("retain", "recompute", "recompute_act"):
        schedule, allocator = schedule_of("on", memory=policy), Allocator(model)
        Step(schedule, model, batches("in groups"), allocator)
        [costs] = schedule.requests.costs.values()
        numbers.append(costs.num_bytes[True][0])
    for other in numbers[1:]:
        assert other[:2] == pytest.approx(numbers[0][:2], rel=0.05)


def test_without_memory_to_spare_segments_run_again(model):
    """A budget of 0.8 of what sharing wants is kept."""
    items = batches("in groups")
    wanted = max(step.peak for step in run(model, items, 3, mode="on"))
    budget = 0.8 * wanted / 2**30
    for number, step in enumerate(run(model, items, 3, mode="on", memory_budget_gb=budget)):
        assert {"recompute", "recompute_act", "offload"} & step.policies
        assert step.peak <= 1.02 * 0.8 * wanted or number == 0


def test_where_others_had_the_maximum_moments_are_guessed_once(model):
    """A second process, or another phase: the allocator's maximum moves in no step."""
    schedule, allocator = schedule_of(), Allocator(model)
    allocator.highest = 1e12
    with allocator.running():
        for number in range(3):
            steps.run(schedule, steps.Contract().step, model, batches("in groups"))
            assert schedule.report is not None and schedule.report.decision.share == (number > 0)
    [costs] = schedule.requests.costs.values()
    stock, ours = costs.num_bytes[False][0], costs.num_bytes[True][0]
    assert stock.moment == pytest.approx(2 * stock.wave / 3, rel=0.01)
    assert ours.moment == stock.moment  # there is nothing better


def test_a_resume_begins_with_what_is_known(model, tmp_path):
    options = dict(mode="on", cost_file=str(tmp_path / "costs.json"))
    *_, last = run(model, batches("in groups"), 3, **options)
    [first] = run(model, batches("in groups"), 1, **options)
    assert first.policies == last.policies == set()
    assert first.limit == pytest.approx(last.limit, rel=0.01)


def hot(*factors):
    """A rank's part of steps in which the second rank's tokens take more, by so much."""
    runtime.initialize(Layout(dp=2, ep=2))
    parts = [_hot(factor) for factor in factors]
    runtime.shutdown()
    return parts


def _hot(factor):
    prediction.LEAST_OVER = 0.0
    spec = {"num_layers": 2, "num_moe_experts": 4}
    model = small_model("tiny-moe", spec=spec, layout=Layout(dp=2, ep=2), dtype=torch.float32)
    schedule, allocator = schedule_of(kernel="math", across_ranks="off"), Allocator(model)
    allocator.hot = factor if dist.get_rank() else 1.0
    plans = []
    for _ in range(3):
        Step(schedule, model, batches("in groups"), allocator)
        report = schedule.report
        plans.append((report.decision.share, report.plan.policies, schedule.memory.limit))
    [costs] = schedule.requests.costs.values()
    return costs.num_bytes, [share for share, *_ in plans], plans


def test_all_ranks_plan_by_the_one_that_has_most():
    ((even, *_), one), (_, other) = run_ranks(2, hot, 1.0, 1.5)
    assert one == other and True in one[1]
    for share in (False, True):
        for ours, alone in zip(one[0][share][0][:2], even[share][0][:2], strict=True):
            assert 1.3 * alone < ours < 1.6 * alone


def test_numbers_fit_what_was_counted():
    wanted = StageBytes(90.0, 110.0, 7.0, 500.0)
    rows = [(64.0, 0, 0, 0), (0, 32.0, 8.0, 2.0), (0, 48.0, 3.0, 1.0), (0, 9.0, 9.0, 4.0)]
    sizes = [sum(a * b for a, b in zip(row, wanted[:4], strict=True)) for row in rows]
    found = StageCount.of_rows(rows, sizes).numbers()
    again = [sum(a * b for a, b in zip(row, found[:4], strict=True)) for row in rows]
    assert again == pytest.approx(sizes, rel=1e-3)
    assert (*found[:3], found.span) == pytest.approx((*wanted[:3], wanted.span), rel=0.06)
    # Waves alone, all read, do not say what that takes; joined segments do, and count it once.
    waves = StageCount.of_rows([(0, 8.0, 8.0, 0)], [96.0]).numbers()
    joined = StageCount.of_rows([(8.0, 0, 0, 0), (8.0, 0, 8.0, 0)], [72.0, 96.0])
    assert [*waves[:2], *joined.numbers(waves)[:3]] == pytest.approx([12, 12, 9, 9, 3], rel=1e-3)


def test_what_a_backward_frees_besides_is_not_bytes_of_waves():
    """Gradients on their way to a prompt are freed in its backward (context parallelism)."""
    inner = [(2048.0, 0.0, 0.0, 0.0), (2048.0, 0.0, 0.0, 0.0)]
    waves = [(0.0, 514.0 * num, 512.0 * num, float(num)) for num in (7, 7, 7, 1)]
    sizes = [2e9, 2.7e9, *(1.4e6 * row[1] for row in waves)]
    numbers = StageCount.of_rows([*inner, *waves], sizes).numbers()
    assert numbers.wave + numbers.scored == pytest.approx(1.4e6, rel=0.01)
    assert 2e9 / 2048 < numbers.inner < 2.7e9 / 2048


def test_ranks_count_as_the_one_that_has_most():
    """One cannot tell a wave's positions from those with loss; another keeps a half more."""
    row = [(0.0, 10.0, 10.0, 0.0), (0.0, 30.0, 30.0, 0.0)]
    others = [(0.0, 10.0, 2.0, 0.0), (0.0, 30.0, 25.0, 0.0)]

    def count(rows, more=1.0):
        return StageCount.of_rows(rows, [more * (4 * r[1] + 8 * r[2]) for r in rows])

    alone = [{False: {}, True: {0: count(rows)}} for rows in (row, others)]
    for order in itertools.permutations(alone):
        numbers = of_all_ranks(order)[True][0].numbers()
        assert (numbers.wave, numbers.scored) == pytest.approx((4, 8), rel=1e-3)
    hot = {False: {0: count(row)}, True: {0: count(others, 1.5), 1: count(row)}}
    both = of_all_ranks([alone[1], hot])
    assert both[False].keys() == {0} and both[True].keys() == {0, 1}
    assert both[True][0].numbers()[1:3] == pytest.approx((6, 12), rel=1e-3)
