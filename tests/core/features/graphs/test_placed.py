"""Attention inside of graphs: lengths and rows on the device."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_prefix import PrefixSchedule
from megatron_prefix.features.graphs import kinds, layers, placed
from megatron_prefix.features.graphs.kinds import has_known_chunks, inside_form
from megatron_prefix.features.graphs.part import Graphs
from megatron_prefix.features.graphs.pieces import CannotCaptureError
from megatron_prefix.features.graphs.placed_arenas import FEW_ROWS, PlacedArenas
from megatron_prefix.features.graphs.placed_runs import PlacedKernel, PlacedRuns
from megatron_prefix.features.graphs.placed_spans import PlacedSpans
from megatron_prefix.features.graphs.placed_tails import PlacedTails, TailForm
from megatron_prefix.features.graphs.segment_graphs import SegmentGraphs
from megatron_prefix.features.recurrent.spans import Spans
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.layers.attention import Attention
from megatron_prefix.layers.blocks.interface import Runs
from megatron_prefix.layers.blocks.kernels import KERNELS
from megatron_prefix.layers.kind import Part
from megatron_prefix.sidecar.arena import DeviceBytes
from megatron_prefix.tree.payload_map import Form, Level, RowMap, Run
from megatron_prefix.tree.tails import Tail
from tests.core.features.graphs.test_graphs import config, made, same, shared_step, steps, without
from tests.harness.hybrid import GDN, gated_delta
from tests.harness.one_rank import small_model

pytestmark = pytest.mark.usefixtures("on_one_rank")

CPU = torch.device("cpu")
WAVE = Level((Run(2, 5, 10, 14), Run(5, 6, 20, 27)))
"""Of eight queries three see the keys from 10 to 14, and one those from 20 to 27."""


def starts(lengths, more=2):
    """As a sheet has them, with empty runs behind."""
    ends = torch.tensor([0, *lengths, *[0] * more]).cumsum(0)
    return ends.int()


def test_queries_without_keys_add_nothing():
    q, k = torch.ones(5, 2, 4, dtype=torch.float64), torch.ones(3, 2, 4, dtype=torch.float64)
    placed = PlacedRuns(starts([2, 3]), starts([0, 3]), False, 5, 3)
    part = PlacedKernel(KERNELS["math"]).forward(q, k, k, placed, 1.0)
    assert part.out[:2].eq(0).all() and part.lse[:, :2].isneginf().all()
    torch.testing.assert_close(part.out[2:], torch.ones_like(part.out[2:]))
    assert part.lse[:, 2:].isfinite().all()


def test_every_query_is_in_a_run():
    assert placed.runs_of(WAVE, 8) == [(2, 0), (3, 4), (1, 7), (2, 0)]
    assert placed.runs_of(Level((Run(0, 8, 3, 9),)), 8) == [(8, 6)]


def test_a_sheet_says_where_a_segment_lies():
    """Rows that its form has more than it are spare ones."""
    form = placed.PlacedForm(8, True, 2, (placed.LevelForm(4, 16),))
    sheet = placed.Sheet(form, CPU)
    planned = SimpleNamespace(levels=[[WAVE]], positions=RowMap(48, (slice(40, 48),), ((),)))
    context = SimpleNamespace(runs=Runs.own((3, 5)), cache=SimpleNamespace(map=planned), index=0)
    sheet.of_segment(context, {Form.POSITIONS: 100})
    assert sheet.runs[0].queries.tolist() == [0, 3, 8]
    assert sheet.runs[1].queries.tolist() == [0, 2, 5, 6, 8]
    assert sheet.runs[1].keys.tolist() == [0, 0, 4, 11, 11]
    assert sheet.levels[0].tolist() == [*range(10, 14), *range(20, 27), *range(100, 105)]
    assert sheet.written.tolist() == [*range(40, 48)]
    sheet.of_none({Form.POSITIONS: 100})
    assert {*sheet.levels[0].tolist(), *sheet.written.tolist()} == {*range(100, 116)}
    assert sheet.runs[1].keys.tolist() == [0, 16, 16, 16, 16]


def test_windows_of_placed_runs_end_with_their_keys():
    """Of whose last the last query sees two more; keys of nobody have no gradient."""
    kernel, draw = KERNELS["math"].windowed(2), torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(n, 2, 4, generator=draw).double() for n in (7, 14, 14, 7))

    def results(chosen, runs, num):
        out, lse, aux = chosen.forward(q, k[:num], v[:num], runs, 0.5)
        grads = chosen.backward(dout, q, k[:num], v[:num], out, lse, aux, runs, 0.5)
        return out, lse, grads[0], *(grad[:12] for grad in grads[1:]), grads[1][12:], grads[2][12:]

    placed = PlacedRuns(starts([3, 4]), starts([5, 7]), True, 4, 7)
    *ours, of_nobody, _ = results(PlacedKernel(kernel), placed, 14)
    *theirs, _, _ = results(kernel, Runs((3, 4), (5, 7), causal=True), 12)
    torch.testing.assert_close(ours, theirs)
    assert len(of_nobody) == 2 and of_nobody.eq(0).all()


def test_tails_of_a_sheet_are_those_of_its_segment():
    """What is left twice is written twice, to the same row."""
    form = Form("positions", 3)
    above = Tail((), ((10, 13), (15, 16)), (((0, 3),), ((1, 3), (3, 4))))
    planned = SimpleNamespace(
        tails={form: (RowMap(20, (slice(4, 9),), ((),)), (above,))}, lengths=[[2, 6]]
    )
    tails = PlacedTails(TailForm(form, 6, 8, 7), 3, 8, CPU)
    tails.of_segment(planned, 0, spare=30)
    keys = tails.keys
    assert [keys.runs.queries.tolist(), keys.runs.keys.tolist()] == [[0, 2, 8, 8], [0, 5, 14, 14]]
    assert keys.order.tolist() == [0, 1, 2, 6, 7, 1, 2, 3, *range(8, 14), 0, 0]
    assert keys.reading.rows.tolist() == [10, 11, 12, 15, 30, 31]
    assert keys.last.tolist() == [0, 1, 5, 6, 7, 0, 0]
    assert tails.written.tolist() == [4, 5, 6, 7, 8, 4, 4]
    tails.of_none(spare=30)
    assert {*keys.reading.rows.tolist(), *tails.written.tolist()} <= {*range(30, 38)}


def of_spans(lengths, parents, written=()):
    spans = PlacedSpans(4, 3, 160, CPU)
    spans.of_segment(lengths, parents, written, spare=9)
    return spans


def test_spans_of_a_sheet_are_those_of_its_segment():
    """Those that are missing are empty, and begin and end with the spare row."""
    lengths, parents = [2, 88, 70], [5, 0, 0]
    spans, plain = of_spans(lengths, parents, [6, 7, 8]), Spans(lengths, parents, CPU)
    assert spans.starts.tolist() == [*plain.cu_seqlens.tolist(), 160]
    assert spans.reading.rows.tolist() == [*parents, 9]
    assert [part.tolist() for part in spans.runs] == [[1, 2, 0, 0], [5, 0, 9, 9]]
    assert spans.written.tolist() == [6, 7, 8, 9]
    ours, theirs = spans.edges(3), plain.edges(3)
    for name in ("first", "kept", "repeats", "tail"):
        own = getattr(ours, name).tolist()
        assert own[:9] == [*map(int, getattr(theirs, name))], name
    assert ours.first[9:].tolist() == ours.kept[9:].tolist() == [0] * 3 and ours.repeats[9:].all()
    assert ours.ends[12:21].tolist() == theirs.ends[9:].tolist()
    assert ours.tail[9:].tolist() == [27, 28, 29]  # what its parent has left
    with pytest.raises(CannotCaptureError, match="several widths"):
        spans.edges(4)


def test_chunks_of_a_sheet_are_those_of_its_spans():
    """What is missing is behind the end of the last."""
    spans = of_spans([2, 88, 70], [0, 0, 0])
    assert spans.offsets.tolist() == [0, 1, 3, 5, 5]
    chunks = spans.chunks.tolist()
    assert chunks == [[0, 0], [1, 0], [1, 1], [2, 0], [2, 1], [3, 0]]


def test_rules_have_chunks_of_the_spans_that_are_captured(monkeypatch):
    """Of these alone; and no longer than that."""
    spans, others = of_spans([160], [0]), torch.tensor([0, 4])
    module, stock = ModuleType("fla.ops.rule"), lambda lengths, size: "stock"
    module.prepare_chunk_indices = module.prepare_chunk_offsets = stock
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with spans.known():
        assert module.prepare_chunk_indices(spans.starts.view(-1), 64) is spans.chunks
        assert module.prepare_chunk_offsets(spans.starts.view(-1), 64) is spans.offsets
        assert module.prepare_chunk_indices(others, 64) == "stock"
        with pytest.raises(CannotCaptureError, match="32 positions"):
            module.prepare_chunk_indices(spans.starts, 32)
    assert module.prepare_chunk_indices is module.prepare_chunk_offsets is stock


def test_rules_of_others_run_outside(monkeypatch):
    """On a GPU; they may read lengths on the host."""
    weight = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    for module, is_known in (("fla.ops.gated_delta_rule.chunk", True), ("trainer.rules", False)):
        holder = SimpleNamespace(rule=SimpleNamespace(__module__=module))
        forward = SimpleNamespace(__self__=holder)
        layer = SimpleNamespace(conv1d=SimpleNamespace(weight=weight), forward=forward)
        assert has_known_chunks(layer) is is_known
    monkeypatch.setenv("FLA_USE_TMA", "1")
    holder.rule.__module__ = "fla.ops.gated_delta_rule.chunk"
    assert not has_known_chunks(layer)


@pytest.mark.usefixtures("recorded_graphs")
def test_arenas_that_no_graph_reads_do_not_stay(monkeypatch):
    monkeypatch.setattr(kinds, "has_known_chunks", lambda _: False)
    model = small_model(GDN, spec=gated_delta(3))
    steps(model, config(), 3)
    assert {*made(model).arenas.values} == {1}  # attention's


def arena_of(places, num):
    rows = RowMap(num, ((slice(0, 4)), slice(2, 6), None), ((), (), ()))
    return places.begin([Form.POSITIONS], {Form.POSITIONS: num}).arena(0, rows, DeviceBytes())


def test_arenas_stay_where_they_are_until_they_are_too_short():
    places, payload, addresses = PlacedArenas(), (torch.ones(4, 2, 8),) * 2, []
    for num in (6, 4, FEW_ROWS + 1):
        arena = arena_of(places, num)
        arena.write(0, payload)
        addresses.append(arena.values[0].data_ptr())
        assert all(len(tensor) == num for tensor in arena.values)
        arena.drop()
    assert addresses[0] == addresses[1] and places.changes == 2
    assert places.capacity[Form.POSITIONS] == 2 * FEW_ROWS
    assert places.device_bytes == 2 * 3 * FEW_ROWS * 2 * 8 * 4


def test_payloads_of_another_dtype_have_places_of_their_own():
    """A copy would round them without a word."""
    places, payload = PlacedArenas(), (torch.ones(4, 2, 8),) * 2
    for dtype in (torch.float32, torch.float64):
        arena = arena_of(places, 6)
        arena.write(0, tuple(part.to(dtype) for part in payload))
        arena.reuse_sums()
        assert {part.dtype for part in (*arena.values, *arena.sums)} == {dtype}
    assert places.changes == 3  # the first places, and other values and gradients


def test_passes_without_gradients_have_plain_arenas():
    """Theirs may be longer, and gradients would be as long from then on."""
    rank = SimpleNamespace(forward_only=True)
    part = SimpleNamespace(even=8, rank=rank, config=SimpleNamespace(cache_host_layers=0))
    assert Graphs.arenas(part, None, (), None) is None


def test_cores_with_quantisers_run_outside():
    """A trainer may turn them off between two steps."""
    core = SimpleNamespace()
    mixer = Part(Attention(), SimpleNamespace(core_attention=core))
    assert inside_form(mixer)
    core.q_bmm_quantizer = None
    assert not inside_form(mixer) and not inside_form(Part(None))


def test_gradients_of_an_earlier_segment_are_zeroed():
    places = PlacedArenas()
    arena = arena_of(places, 6)
    arena.write(0, (torch.ones(4, 2, 8),) * 2)
    arena.reuse_sums()
    arena.sums[0].fill_(1.0)
    arena.reuse(1)
    assert arena.sums[0][:, 0, 0].tolist() == [1, 1, 0, 0, 0, 0]
    with pytest.raises(RuntimeError, match="is a wave"):
        arena.reuse(2)


def _passed_on(monkeypatch, model, module):
    """Its block is of another module, and doubles what the first layer gives the second."""
    block = unwrap(model).decoder
    base, stock = type(block), type(block.layers[1]).__call__

    def call(layer, *args, hidden_states, **named):
        hidden = hidden_states * 2 if layer is block.layers[1] else hidden_states
        return stock(layer, *args, hidden_states=hidden, **named)

    own = type("Block", (base,), {"forward": lambda *args, **named: base.forward(*args, **named)})
    own.forward.__module__ = module
    monkeypatch.setattr(type(block.layers[1]), "__call__", call)
    block.__class__ = own


@pytest.mark.usefixtures("recorded_graphs")
@pytest.mark.parametrize("what", ["nothing", "hook", "block"])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-deepseek", "tiny-gpt-oss", GDN])
def test_whole_layers_are_one_launch(name, what, monkeypatch):
    """Unless somebody looks at, or changes, what they give each other."""
    spec = gated_delta(3) if name == GDN else {"num_layers": 3, "num_moe_experts": None}
    model, twin = small_model(name, spec=spec), small_model(name, spec=spec)
    for either in (model, twin):
        first = unwrap(either).decoder.layers[0]
        if what == "hook":
            first.register_forward_hook(lambda *given: (given[-1][0] * 2, None))
        elif what == "block":
            _passed_on(monkeypatch, either, "trainer.models")
    same(steps(model, config(), 3), without(twin, config(), 3))
    forms = [form for sets in made(model).sets for form in sets.made.values()]
    pieces = [[side for side in form.values() if side.pieces] for form in forms]
    assert forms and {*map(len, pieces)} == {1 if what == "nothing" else len(made(model).layers)}


@pytest.mark.usefixtures("recorded_graphs")
def test_a_hook_that_comes_within_a_step_ends_the_chain(monkeypatch):
    """As the marks of the last backward (features/overlap), which are around one segment."""
    model, twin = small_model(spec={"num_layers": 3}), small_model(spec={"num_layers": 3})
    expected = without(twin, config(), 3)
    taking, second = layers.LayerGraphs._take, unwrap(model).decoder.layers[1]
    handles, taken = [], []

    def marked(_, args, named):
        hidden = named["hidden_states"]
        return args, {**named, "hidden_states": hidden.view_as(hidden)}

    def take(graphs, context, hidden):
        while handles:
            handles.pop().remove()
        if context.index == 2:
            handles.append(second.register_forward_pre_hook(marked, with_kwargs=True))
        taking(graphs, context, hidden)
        chosen = graphs._taken.get(context.index)
        taken.append((context.index == 2, chosen is not None and chosen.form.chained))

    monkeypatch.setattr(layers.LayerGraphs, "_take", take)
    same(steps(model, config(), 3), expected)
    assert (False, True) in taken and (True, True) not in taken


@pytest.mark.usefixtures("recorded_graphs")
def test_what_changes_between_chained_layers_is_an_error(monkeypatch):
    model = small_model(spec={"num_layers": 3})
    _passed_on(monkeypatch, model, "megatron.core.block")
    with pytest.raises(RuntimeError, match="replaced between them"):
        steps(model, config(), 3)


@pytest.mark.usefixtures("recorded_graphs")
def test_layers_rehearse_without_what_is_nobodys(monkeypatch):
    """Else NaN that kernels leave behind a level's keys comes into gradients of weights."""
    rehearse, spare = SegmentGraphs._rehearse, []

    def checked(sets, *arguments):
        arenas = sets._arenas
        first = arenas.capacity[Form.POSITIONS]
        rows = [place[first:] for places in arenas.sums.values() for place in places]
        spare.extend(rows.isfinite().all() for rows in rows)
        rehearse(sets, *arguments)

    monkeypatch.setattr(SegmentGraphs, "_rehearse", checked)
    steps(small_model(), config(chunk_tokens=8), 3)
    assert spare and all(spare)


@pytest.mark.usefixtures("recorded_graphs")
def test_a_read_before_its_capture_is_an_error(monkeypatch):
    """In graphs as without: a payload that is not there."""
    enter = layers.LayerGraphs._enter

    def early(self, context, layer):
        context.cache._layers[layer].live.clear()
        enter(self, context, layer)

    monkeypatch.setattr(layers.LayerGraphs, "_enter", early)
    with pytest.raises(RuntimeError, match="reads segment"):
        steps(small_model(), config(), 3)


@pytest.mark.usefixtures("recorded_graphs")
def test_a_wave_that_reads_fewer_keys_has_the_same_graphs(monkeypatch):
    def traces(model):
        schedule = PrefixSchedule(config())
        return [shared_step(schedule, model, prompt=prompt) for prompt in (300, 200, 260)]

    model = small_model()
    ours = traces(model)
    assert made(model).captures == 1
    monkeypatch.setattr(layers, "SEEN_BEFORE", 10**9)  # nothing is captured
    same(ours, traces(small_model()))
