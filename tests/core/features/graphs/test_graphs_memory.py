"""What sets of CUDA graphs hold, where launches are noted and launched again on the CPU."""

import contextlib
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_prefix.features.graphs import choice, cuda, cut_layer, layers, part
from megatron_prefix.features.graphs.pieces import Piece
from megatron_prefix.features.graphs.placed import LevelForm, PlacedForm, SpanForm
from megatron_prefix.features.graphs.placed_arenas import FEW_ROWS
from megatron_prefix.features.graphs.segment_graphs import GraphForm, SegmentGraphs
from megatron_prefix.features.host.segment import addresses
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.verify import align
from megatron_prefix.plan.memory import Footprint
from megatron_prefix.plan.sizes import StageBytes
from megatron_prefix.run.schedule import PrefixSchedule
from megatron_prefix.tree.payload_map import Form
from tests.core.features.graphs.test_graphs import config, made, shared_step, steps
from tests.harness.hybrid import MAMBA, mamba
from tests.harness.one_rank import small_model

LAYERS = 3

pytestmark = pytest.mark.usefixtures("on_one_rank")


class Held:
    """What is saved for backward, by its address."""

    def __init__(self, model):
        self.model, self.tensors = model, {}

    def saving(self):
        return torch.autograd.graph.saved_tensors_hooks(self._take, lambda one: one)

    def _take(self, one):
        address = one.untyped_storage().data_ptr()
        # Now: buffers may be replaced, and others then lie where they were.
        if address not in addresses(*self.model.parameters(), *self.model.buffers()):
            self.tensors[address] = one.detach()
        return one

    def bytes(self):
        return sum(one.untyped_storage().nbytes() for one in self.tensors.values())


def as_long_as_segments(patch):
    """Places of sets of graphs."""
    for module in (choice, layers):
        patch.setattr(module, "place_of", lambda positions, longest: positions)


def saved_by_sets(model, patch):
    """Of every new set of some steps the bytes that its pieces save, and that its layers save
    without graphs; between forward and backward."""
    found, captures, rehearsals = [], Held(unwrap(model)), Held(unwrap(model))
    capture, backward = SegmentGraphs.capture, Piece.capture_backward
    between = list[tuple[int, int]]()

    class Holding(cuda.Graph):
        def begin(self):
            super().begin()
            self._hooks = captures.saving()
            self._hooks.__enter__()

        def end(self):
            self._hooks.__exit__(None, None, None)
            super().end()

    def captured(sets, *given):
        is_first = not sets.made
        for one in (captures.tensors, rehearsals.tensors, between):
            one.clear()
        with rehearsals.saving():
            seconds = capture(sets, *given)
        if is_first:
            found.append(between[0])
        return seconds

    def capturing_backward(*arguments):
        between.append((captures.bytes(), rehearsals.bytes()))
        backward(*arguments)

    as_long_as_segments(patch)
    patch.setattr(cuda, "Graph", Holding)
    patch.setattr(SegmentGraphs, "capture", captured)
    patch.setattr(Piece, "capture_backward", capturing_backward)
    steps(model, config())
    assert found
    return found


@pytest.mark.parametrize("name", ["tiny-gpt-oss", "tiny-deepseek", MAMBA])
@pytest.mark.usefixtures("recorded_graphs")
def test_pieces_save_what_their_layers_do(name, monkeypatch):
    """Places are not copies of what they save as well."""
    fields = mamba("M*-") if name == MAMBA else {"num_layers": LAYERS}
    model = small_model(name, spec=fields)
    for saved, without in saved_by_sets(model, monkeypatch):
        assert saved == without > 0


@pytest.mark.parametrize("name", ["tiny-gpt-oss", "tiny-deepseek"])
@pytest.mark.usefixtures("recorded_graphs")
def test_attention_writes_where_the_next_piece_reads(name, monkeypatch):
    """What it saves of its output is there, and nowhere else; hidden states are there already."""
    monkeypatch.setattr(cut_layer, "inside_form", lambda _: None)  # as with CP
    there, run = [], Piece.run_forward

    def noted(piece, given):
        if len(given) > 1:
            there.append([x.data_ptr() for x in given] == [x.data_ptr() for x in piece.inputs])
        return run(piece, given)

    monkeypatch.setattr(Piece, "run_forward", noted)
    steps(small_model(name, spec={"num_layers": LAYERS}), config())
    assert there and all(there)


@pytest.mark.usefixtures("recorded_graphs")
def test_pieces_of_the_longest_segment_copy_little(monkeypatch):
    """What they compute is its own place, but for values that are cut from a projection, and for
    latents and what shared experts make, which have one place for all layers."""
    monkeypatch.setattr(cut_layer, "inside_form", lambda _: None)  # as with CP
    copies, capture = [], SegmentGraphs.capture

    def captured(sets, form, hidden, given):
        is_first, seconds = not sets.made, capture(sets, form, hidden, given)
        for sides in sets.made[form].values():
            graphs = [g for piece in sides.pieces for g in (piece.forward, piece.rest) if g]
            launched = [call for graph in graphs for call in graph.launched]
            copies.append((is_first, launched.count("aten.copy_.default")))
        return seconds

    as_long_as_segments(monkeypatch)
    monkeypatch.setattr(SegmentGraphs, "capture", captured)
    steps(small_model("tiny-deepseek", spec={"num_layers": LAYERS}), config())
    assert max(num for is_first, num in copies if is_first) == 2
    assert all(num > 2 for is_first, num in copies if not is_first)


@pytest.mark.usefixtures("recorded_graphs")
def test_sets_that_a_step_does_not_use_are_dropped():
    model, schedule = small_model(), PrefixSchedule(config())
    sizes = []
    for prompt, answer in [(40, 9), (10, 4)]:
        for seed in range(3):
            shared_step(schedule, model, seed, prompt, answer)
        sizes.append({sets.most for sets in made(model).sets})
    assert sizes == [{24, 48}, {48}]


@pytest.mark.usefixtures("recorded_graphs")
def test_waves_of_all_lengths_share_a_set():
    """One of them is there at a time, and so much is planned for."""
    model, schedule = small_model(), PrefixSchedule(config(segment_tokens=24, graph_tokens=64))
    groups = [*generate(1, 24, 20, 4, vocab_size=64), *generate(1, 24, 6, 2, vocab_size=64, seed=1)]
    for seed in range(4):
        align.run_step(schedule, [model], align.microbatches(groups, seed), optimize=False)
    sets = [graphs.made for graphs in made(model).sets]
    waves = [{form.positions for form in forms if not form.placed.inner} for forms in sets]
    assert max(map(len, waves)) > 1 and sum(map(bool, waves)) == 1, sets


@pytest.mark.usefixtures("recorded_graphs")
def test_places_have_room_for_the_longest_segment():
    """Also those that a form of another kind needs first, for a shorter segment."""
    model, schedule = small_model(spec={"num_layers": 3}), PrefixSchedule(config(graph_tokens=64))
    handle = None
    for answer in (8, 8, 4, 4, 8, 8):
        if answer == 4 and handle is None:  # from here on layers are launched one by one
            first = unwrap(model).decoder.layers[0]
            handle = first.register_forward_hook(lambda *_: None)
        shared_step(schedule, model, answer=answer)
    assert len(made(model).layers) == 2


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_a_first_step_has_no_graphs_where_bytes_are_counted(mode, monkeypatch, recorded_graphs):
    """Nothing would be known of memory: a step with graphs is not measured."""
    given = config(mode=mode, min_speedup=0.01)
    model, schedule, replayed = small_model(), PrefixSchedule(given), []
    monkeypatch.setattr(part, "counts_bytes", lambda device: True)
    for order in range(3):
        before = recorded_graphs.replays
        shared_step(schedule, model, prompt=40, order=order)
        replayed.append(recorded_graphs.replays > before)
    assert replayed == [False, True, True]


def test_captures_have_one_stream(monkeypatch):
    """What one has freed is free on it alone. It waits for the current one, and that for it."""
    used, waited = [], []

    class Stream:
        def __init__(self, *_):
            pass

        def wait_stream(self, other):
            waited.append((self, other))

    def on(stream):
        used.append(stream)
        return contextlib.nullcontext()

    for name, fake in {"Stream": Stream, "current_stream": Stream, "stream": on}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # none that there is
    for _ in range(2):
        with cuda.apart():
            pass
    assert used[0] is used[1]
    for first, last in (waited[:2], waited[2:]):
        assert first[0] is used[0] and last == first[::-1]


@pytest.mark.usefixtures("recorded_graphs")
def test_places_are_counted_once(monkeypatch):
    """Some lie in what others have computed."""
    place, sizes = SegmentGraphs.place, dict[int, dict[int, int]]()

    def placed(sets, *args, **kwargs):
        there = place(sets, *args, **kwargs)
        storage = there.untyped_storage()
        sizes.setdefault(id(sets), {})[storage.data_ptr()] = storage.nbytes()
        return there

    monkeypatch.setattr(SegmentGraphs, "place", placed)
    model = small_model(spec={"num_layers": LAYERS})
    steps(model, config(), 3)
    here = [sizes[id(one)] for one in made(model).sets]
    of_arenas = made(model).arenas.device_bytes
    assert made(model).device_bytes - of_arenas == sum(sum(one.values()) for one in here) > 0
    rows = made(model).arenas.capacity[Form.POSITIONS] + FEW_ROWS
    assert of_arenas == rows * LAYERS * 2 * 2 * 2 * 16 * 8  # K, V and gradients, fp64


def test_what_only_graphs_use_is_what_torch_reserves(monkeypatch):
    """Of their pools, without what is allocated there."""
    segments = [
        {"segment_pool_id": (0, number), "total_size": 10**number, "allocated_size": number}
        for number in (1, 2, 3)
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert cuda.uncounted_bytes([(0, 1), (0, 3), (0, 4)]) == 10 - 1 + 1000 - 3
    assert cuda.uncounted_bytes([]) == 0


def test_places_are_longer_than_what_has_been_captured(monkeypatch):
    """So bytes of a position are of another number of positions."""
    monkeypatch.setattr(cuda, "uncounted_bytes", lambda _: 80)
    fields = dict(pool=0, placed_bytes=160, most=16, passes=True)
    sets = SimpleNamespace(longest=lambda *, taps_mlps: 8 * (not taps_mlps), **fields)
    graphs = SimpleNamespace(sets=[sets], _ranks=2, arenas=SimpleNamespace(device_bytes=7))
    held = choice.Held(pool=10.0, arenas=7)
    assert layers.LayerGraphs.held.fget(graphs) == held


def test_plans_know_what_graphs_hold():
    """Of all ranks the most; until that is known, as much as segments without graphs."""
    graphs = object.__new__(part.Graphs)
    graphs.kept, graphs.rank = {}, SimpleNamespace(forward_only=False, models=[0, 1])
    vars(graphs)["even"] = 64
    plain = Footprint((StageBytes(2.0, 3.0), StageBytes(4.0, 1.0)), ((), ()), 0.0, 2, parts=2)
    assert graphs.footprint(plain) == replace(
        plain, pool=3.0 * part.ROOM, pool_length=64, spared=3.0
    )
    graphs.learn(choice.Held.most([choice.Held(5.0, 1.5, arenas=9), choice.Held(4.0)]))
    assert graphs.footprint(plain).cache_least == 18
    graphs.learn(choice.Held())  # a stock step has freed arenas
    # As much as an inner segment keeps.
    known = dict(pool=10.0 * part.ROOM, pool_length=64, spared=2.0, placed=3.0 * part.ROOM)
    assert graphs.footprint(plain) == replace(plain, **known)
    # Of sets for segments whose activations run again others' bytes are known, too.
    graphs.learn(choice.Held(light_pool=6.0))
    assert graphs.footprint(replace(plain, act=0.5)).pool == 12.5 * part.ROOM
    copied = graphs.footprint(replace(plain, message=0.5))  # hidden states at both ends of graphs
    assert (copied.spared, copied.placed) == (0.5, 3.0 * part.ROOM)
    vars(graphs)["even"] = 0
    assert graphs.footprint(plain) is plain


@pytest.mark.parametrize("held", [choice.Held(), choice.Held(arenas=7.0), choice.Held(pool=1.0)])
def test_a_step_was_planned_by_a_guess_until_some_were_captured(held, monkeypatch):
    """By what was known before it, although it captures some, in mode on."""
    graphs = object.__new__(part.Graphs)
    graphs.kept = {"held": held, "choice": choice.GraphChoice(4096, True, True, (1.0, 1.0), 4000)}
    graphs.rank = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    monkeypatch.setattr(choice.Held, "most", lambda _: choice.Held(pool=1.0))
    decision = SimpleNamespace(share=True, over_limit=True)
    report = SimpleNamespace(decision=decision, retried=False)
    graphs.timed(SimpleNamespace(groups=(), times=None, report=report))
    assert graphs.kept["held"] == choice.Held(pool=1.0)
    assert graphs.choice.tokens == 2048
    assert graphs.choice.guessed == (0 if held.pool else 4096)


def _after_two_steps():
    """What has the sets of graphs, and the last step's plan."""
    model, schedule = small_model(), PrefixSchedule(config(memory="retain"))
    for order in range(2):
        shared_step(schedule, model, prompt=40, order=order)
    return made(model), schedule.report.plan


def test_sets_that_a_plan_does_not_count_go_before_it_runs(recorded_graphs):
    graphs, plan = _after_two_steps()
    needs = choice.Needs.of(plan, graphs.most)
    passes, kept = ([g.most for g in graphs.sets if g.passes == flag] for flag in (True, False))
    assert passes == [needs.longest] and kept and not Counter(kept) - Counter(needs.kept)
    for needed, there in [
        (needs, passes + kept),
        (needs._replace(kept=needs.kept[:1]), [*passes, *needs.kept[:1]]),
        (needs._replace(longest=needs.longest // 2, kept=needs.kept[:1]), [*needs.kept[:1]]),
        (choice.Needs(0), []),
    ]:
        graphs.begin_step(needs=needed)
        assert Counter(g.most for g in graphs.sets) == Counter(there)
    twins = [SimpleNamespace(most=24, passes=False, longest=lambda **_: 0) for _ in range(2)]
    graphs._free = [*twins]
    graphs.begin_step(needs=choice.Needs(0, kept=(24, 12)))
    assert [*graphs.sets] == twins[:1]
    assert graphs._unused(12, GraphForm(9), passes=False) is None  # it has another place


@pytest.mark.parametrize(("lighter", "stay"), [(0.0, False), (1.0, True)])
def test_graphs_that_save_more_than_a_plan_counts_go(lighter, stay, monkeypatch, recorded_graphs):
    """Activations of all segments run again, from this step on, and these were captured without."""
    graphs, plan = _after_two_steps()
    monkeypatch.setattr(layers, "LIGHTER", lighter)
    needs, there = choice.Needs.of(plan, graphs.most), [*graphs.sets]
    light = needs._replace(plain=0, kept_plain=False)
    graphs.begin_step(needs=needs)
    assert [*graphs.sets] == there
    graphs.begin_step(needs=light)
    assert [*graphs.sets] == there * stay


@pytest.mark.usefixtures("recorded_graphs")
def test_lengths_that_come_again_are_captured_once():
    """Steps of other lengths in between drop nothing, as long as places are alike."""
    model, schedule = small_model(), PrefixSchedule(config(segment_tokens=48))
    captures = []
    for answer in [9, 11, 12, 10] * 3:
        groups = list(generate(2, 30, answer, 4, vocab_size=64, seed=0))
        align.run_step(schedule, [model], align.microbatches(groups, 0), optimize=False)
        captures.append(made(model).captures)
    assert captures[0] < captures[3] == captures[-1]


def test_graphs_serve_segments_with_fewer_runs_and_keys():
    level = LevelForm(4, 512)
    form = GraphForm(64, placed=PlacedForm(64, False, 8, (level,)))

    def other(**changes):
        return form._replace(placed=form.placed._replace(**changes))

    served = [other(), other(runs=2), other(levels=(LevelForm(1, 384),))]
    not_served = [
        other(runs=16), other(inner=True), other(positions=32), other(levels=()),
        other(spans=SpanForm(1, 3)),
        other(levels=(LevelForm(8, 512),)), other(levels=(LevelForm(4, 640),)),
        other(levels=(LevelForm(4, 256),)), form._replace(placed=None),
        form._replace(positions=32), form._replace(taps_mlps=True), form._replace(chained=True),
    ]  # fmt: skip
    assert all(map(form.covers, served)) and not any(map(form.covers, not_served))
    assert form._replace(placed=None).covers(form._replace(placed=None))
    covered = [(few, most) for few, most in [(2, 8), (12, 16), (8, 12), (10, 16), (9, 8)]
               if SpanForm(most, 3).covers(SpanForm(few, 3))]  # fmt: skip
    assert covered == [(2, 8), (12, 16), (8, 12)] and SpanForm.of(9, 3) == (10, 3)
