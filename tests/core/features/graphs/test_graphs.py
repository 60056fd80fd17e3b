"""Layers on CUDA graphs, whose launches are noted and launched again on the CPU."""

import contextlib
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.features.dsa.kind import DSA
from megatron_prefix.features.graphs import cuda, layers, pieces
from megatron_prefix.features.graphs.kinds import without_graphs
from megatron_prefix.features.graphs.part import graphs_of
from megatron_prefix.features.recompute_act.part import RecomputeAct
from megatron_prefix.features.recurrent.gdn import GatedDeltaNet
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.numerics import tolerance
from megatron_prefix.lab.verify import align
from megatron_prefix.layers.mlp import MLP
from megatron_prefix.layers.model import layers_of
from tests.harness import one_group
from tests.harness.hybrid import MAMBA, mamba
from tests.harness.one_rank import small_model
from tests.harness.steps import Contract, call

pytestmark = pytest.mark.usefixtures("on_one_rank")


def steps(model, config, num=1, schedule=None):
    """Traces of some steps of other tokens, without an optimizer."""
    schedule = schedule or PrefixSchedule(config)
    return [shared_step(schedule, model, seed, uneven=True) for seed in range(num)]


def shared_step(schedule, model, seed=0, prompt=24, answer=9, order=None, **more):
    """The trace of a step of two groups of four rollouts."""
    groups = [*generate(2, prompt, answer, 4, vocab_size=64, seed=seed, **more)]
    items = align.microbatches(groups, seed if order is None else order)
    trace = align.run_step(schedule, [model], items, optimize=False)
    assert schedule.report.decision.share
    return trace


def as_without(model, twin, given):
    """A step of a model on graphs is that of its twin without."""
    ours = steps(model, given)
    assert made(model).captures > 0
    same(ours, without(twin, given))


def same(traces, others):
    """Torch's norms read their input twice, so that gradients are added in another order; attention
    inside of graphs adds in another order, too."""
    limit = tolerance(torch.float64, 256)
    for ours, other in zip(traces, others, strict=True):
        assert ours.auxiliary.keys() == other.auxiliary.keys()
        pairs = [(ours.auxiliary[name], of) for name, of in other.auxiliary.items()]
        pairs += [(ours.gradients[name], of) for name, of in other.gradients.items()]
        for values, expected in [(ours.logprobs, other.logprobs), *pairs]:
            assert (values - expected).abs().max() <= limit * expected.abs().max()


def config(**options):
    fields = dict(kernel="math", min_gain=4, segment_tokens=24, memory="retain", graph_tokens=48)
    return PrefixConfig(**fields | options)


def without(model, given, num=1):
    """With the same padding, which changes how positions are summed up, and nothing captured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "SEEN_BEFORE", 10**9)
        return steps(model, given, num)


def made(model):
    graphs = graphs_of(model)
    assert graphs is not None
    return graphs


@pytest.mark.usefixtures("recorded_graphs")
def test_nothing_is_captured_where_a_hook_would_be_left_out():
    plain, watched = small_model(), small_model()
    seen = []
    inside = unwrap(watched).decoder.layers[0].mlp.linear_fc1
    handle = inside.register_forward_hook(lambda *_: seen.append(1))
    ours = steps(watched, config())
    assert made(watched).captures == 0 and len(seen) > 3
    same(ours, without(plain, config()))
    handle.remove()
    steps(watched, config(), 2)
    assert made(watched).captures > 0 and made(watched).used
    inside.new = torch.nn.Identity()
    inside.new.register_forward_hook(print)
    steps(watched, config(), 2)
    assert not made(watched).used


@pytest.mark.usefixtures("recorded_graphs")
def test_a_failure_leaves_no_segment_with_graphs(monkeypatch):
    model = small_model()
    before = steps(model, config())
    with monkeypatch.context() as patch:
        patch.setattr(layers.LayerGraphs, "release", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            steps(model, config(), 1)
    same(steps(model, config()), before)


def change(layer, what):
    """One of the things that the graphs of a layer were captured with."""
    if what == "angles":
        layer.self_attention.rotary_pos_emb.mscale = 2.0
        return
    weight = layer.mlp.linear_fc1.weight
    if what == "scale":
        layer.self_attention.core_attention.softmax_scale = 0.7
    elif what == "gradients":
        weight.main_grad = torch.zeros_like(weight.main_grad)
    elif what == "weights":
        weight.data = 2 * weight.data
    elif what != "policy":
        weight.requires_grad_(what == "trained again")


CHANGES = {
    "tiny-llama": ("weights", "frozen", "trained again", "scale", "policy", "gradients"),
    "tiny-deepseek": ("angles",),
}
"""What a model's graphs are tried with, one after the other."""


@pytest.mark.usefixtures("recorded_graphs")
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_between_steps_is_captured_again(name, monkeypatch):
    plain, changed = (small_model(name) for _ in range(2))
    given = config(memory="recompute_act" if "policy" in CHANGES[name] else "retain")
    schedule = PrefixSchedule(given)
    monkeypatch.setattr(RecomputeAct, "_drops", lambda *_: False)

    def captures(num):
        """After each of so many steps more."""
        numbers = [0] * num
        for number in range(num):
            steps(changed, given, schedule=schedule)
            numbers[number] = made(changed).captures
        return numbers

    *_, before, first = captures(5)  # until each set has graphs of each form
    assert before == first > 0
    for what in CHANGES[name]:
        if what == "policy":  # inner segments drop activations from here on
            monkeypatch.undo()
        for layer in (*unwrap(plain).decoder.layers, *unwrap(changed).decoder.layers):
            change(layer, what)
        ours = steps(changed, given, schedule=schedule)
        assert made(changed).captures > first and not made(changed).refused, what
        same(ours, without(plain, given))
        if what != CHANGES[name][-1]:
            *_, before, first = captures(3)
            assert before == first, what


def test_models_that_cannot_run_on_graphs_are_named():
    def why(name, **fields):
        spec = resolve(name, **fields)
        return layers.why_not(spec, layers_of(spec))

    for name in (
        *("qwen3-8b", "qwen3-30b-a3b", "tiny-gpt-oss", "moonlight-16b-a3b"),
        *("qwen3-next-80b-a3b", "qwen3.5-9b", "tiny-nemotron-h"),
    ):
        assert not why(name)
    sparse = [(DSA(), MLP())]
    assert "sparse attention" in layers.why_not(resolve("qwen3-8b"), sparse)
    assert "MLP" not in layers.why_not(resolve("qwen3-8b"), sparse)
    assert not layers.why_not(resolve("qwen3-8b"), [*sparse, (MLP(),)])
    ranks = SimpleNamespace(context_parallel_size=2)
    assert without_graphs(ranks, [GatedDeltaNet(), MLP()]) == "GatedDeltaNet"
    assert "fp8" in why("qwen3-8b", fp8="e4m3", fp8_recipe="blockwise")


@pytest.mark.parametrize(
    ("collectives", "register", "allocator", "said"),
    [
        (True, "1", "expandable_segments:True", "NCCL_GRAPH_REGISTER=0"),
        (True, "0", "expandable_segments:True", ""),
        (False, "1", "expandable_segments:True", ""),
        (True, "1", "", ""),
    ],
)
def test_nccl_must_not_register_memory_that_moves(
    collectives, register, allocator, said, monkeypatch
):
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", register)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", allocator)
    assert said in cuda.why_not(torch.device("cuda"), collectives=collectives)
    assert cuda.why_not(torch.device("cpu"), collectives=collectives)


@pytest.mark.usefixtures("recorded_graphs")
def test_a_step_that_runs_again_has_the_memory_of_sets(monkeypatch):
    """Its segments that are recomputed share one, and others are not kept beside it."""
    model, given = small_model(), config(min_gain=0, chunk_tokens=8)
    before = steps(model, given, 1)
    release, first = layers.LayerGraphs.release, list[int]()

    def failing(*arguments):
        if not first:
            first.append(len([*made(model).sets]))
            raise torch.OutOfMemoryError("no memory here")
        release(*arguments)

    monkeypatch.setattr(layers.LayerGraphs, "release", failing)
    same(steps(model, given, 1), before)
    assert len([*made(model).sets]) == 1 < first[0]


@pytest.mark.usefixtures("recorded_graphs", "cores_in_fp64")
def test_what_a_recomputed_segment_sends_is_nobodys_place(monkeypatch):
    """Its set is another's while it is on its way."""
    sent, replayed = [], layers.CutLayer.replayed

    def noted(layer, sides, *args, **kwargs):
        found = replayed(layer, sides, *args, **kwargs)
        y, place = found[0], sides.pieces[-1].outputs[0]
        if not torch.is_grad_enabled():
            sent.append((layer.number == 2, y.data_ptr() == place.data_ptr()))
        return found

    monkeypatch.setattr(layers.CutLayer, "replayed", noted)
    model = small_model(MAMBA, spec=mamba("M*M"))
    steps(model, config(memory="recompute", chunk_tokens=8))
    assert {is_last for is_last, _ in sent} == {False, True}
    assert all(in_place != is_last for is_last, in_place in sent)


def test_what_a_failed_capture_has_launched_is_waited_for(monkeypatch):
    """A rehearsal adds zeros to main gradients on a stream of its own, while others add theirs."""
    done = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("waited"))
    monkeypatch.setattr(cuda, "apart", lambda: done.append("apart") or contextlib.nullcontext())
    monkeypatch.setattr(cuda, "pool", lambda: None)
    monkeypatch.setattr(cuda, "Graph", Nothing)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    cuda.recover()
    assert done == ["waited", "apart"]


class Nothing(cuda.Graph):
    """Captures nothing."""

    def __init__(self, pool):
        pass

    def begin(self):
        """See Graph."""

    end = abandon = replay = begin


@pytest.mark.parametrize("is_first", [True, False])  # the first runs whoever's turn it is
def test_what_leaves_the_pieces_is_nobodys_place(is_first, monkeypatch):
    """A gradient that goes to an earlier stage is on its way while others are written. One of what
    a piece passes on is added where it is."""
    monkeypatch.setattr(cuda, "Graph", Nothing)
    piece, x = pieces.Piece(None, is_first), torch.ones(3, requires_grad=True)
    piece.end([x], [2 * x], [torch.zeros(3)], [x])
    piece.uses([], {})
    passed = torch.full((3,), 5.0)
    piece.capture_backward([torch.ones(3), passed], [passed])
    assert torch.equal(passed, torch.full((3,), 7.0))
    [gradient] = piece.run_backward([torch.ones(3), passed])
    assert gradient is not None and torch.equal(gradient, passed)
    assert (gradient.data_ptr() == passed.data_ptr()) != is_first


def test_a_gradient_of_what_is_borrowed_is_its_lenders_own(monkeypatch):
    """Where it came to the borrower, the gradient of a sum, others write before the lender runs."""
    monkeypatch.setattr(cuda, "Graph", Nothing)
    lender, borrower = pieces.Piece(None), pieces.Piece(None)
    x, mixed = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    made, gate = 2 * x, 3 * x
    lender.end([x], [made], [torch.zeros(3)])
    lender.uses([], {})
    borrower.end([mixed], [mixed + gate], [torch.zeros(3)])
    borrower.uses([], {}, [(lender, torch.autograd.graph.get_gradient_edge(gate))])
    place, of_mixed, of_x = torch.full((3,), 5.0), torch.zeros(3), torch.zeros(3)
    borrower.capture_backward([place], [of_mixed])
    for written in (place, of_mixed):
        written.fill_(torch.nan)
    lender.capture_backward([torch.ones(3)], [of_x])
    assert torch.equal(of_x, torch.full((3,), 2.0 + 3 * 5))


def test_a_place_without_a_gradient_is_zeroed(monkeypatch):
    monkeypatch.setattr(cuda, "Graph", Nothing)
    piece = pieces.Piece(None)
    x, unused = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    piece.end([x, unused], [2 * x], [torch.zeros(3)])
    piece.uses([], {})
    places = [torch.full((3,), torch.nan) for _ in range(2)]
    piece.capture_backward([torch.ones(3)], places)
    assert places[0].tolist() == [2, 2, 2] and places[1].tolist() == [0, 0, 0]


class Adding(torch.autograd.Function):
    """A product that adds its weight's gradient to `main_grad`, as Megatron's fused ones do."""

    @staticmethod
    def forward(ctx, x, weight):
        """x * weight."""
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        """What stands for the weight's gradient holds nothing."""
        x, weight = ctx.saved_tensors
        ctx.weight.main_grad += gradient * x
        ctx.weight.grad_added_to_main_grad = True
        return gradient * weight, torch.zeros_like(weight)


@pytest.mark.parametrize("fused", [False, True])
def test_a_parameter_says_whether_its_gradient_was_added(fused, monkeypatch):
    """By this backward: another one of the step may have added another product's."""
    monkeypatch.setattr(cuda, "Graph", Nothing)
    module = torch.nn.Module()
    module.weight = weight = torch.nn.Parameter(torch.full((3,), 4.0))
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(3), True
    piece, x = pieces.Piece(None, is_first=True), torch.ones(3, requires_grad=True)
    with pieces.stand_ins([module]) as owners:
        product = Adding.apply if fused else torch.mul
        y = product(x, module.weight)
        piece.end([x], [y], [torch.zeros(3)])
        piece.uses([module.weight], owners)
        piece.capture_backward([torch.full((3,), 2.0)], [torch.zeros(3)])
    weight.grad_added_to_main_grad = False
    _, of_weight = piece.run_backward([torch.full((3,), 2.0)])
    assert weight.grad_added_to_main_grad is fused
    assert weight.main_grad.tolist() == [2 * fused] * 3
    if not fused:
        assert of_weight.tolist() == [2, 2, 2]
        place = of_weight.data_ptr()
        assert [*piece.run_backward([torch.full((3,), 2.0)])][1].data_ptr() != place


@pytest.mark.usefixtures("recorded_graphs")
def test_passes_without_gradients_leave_them():
    """Also those of a schedule of their own, which has measured nothing."""
    model = small_model()
    steps(model, config())
    before = made(model)
    other = PrefixSchedule(config(mode="auto", min_speedup=0.01, graph_tokens="auto"))
    call(other, Contract().step, model, one_group.items(), forward_only=True)
    assert other.report is not None and other.report.decision.share
    assert made(model) is before and before.captures > 0


@pytest.mark.usefixtures("recorded_graphs")
def test_graphs_that_were_turned_off_are_not_kept():
    """Their memory goes at once, though Python finds out later that nobody needs the rest."""
    model = small_model()
    steps(model, config())
    graphs = made(model)
    arenas = [place for places in graphs.arenas.values.values() for place in places]
    there, before = [*map(weakref.ref, [*graphs.sets, *arenas])], weakref.ref(graphs)
    del graphs, arenas
    gc.collect()
    gc.disable()
    try:
        assert there and all(one() is not None for one in there)
        steps(model, config(graph_tokens=0), 1)
        assert not any(one() is not None for one in there)
    finally:
        gc.enable()
    gc.collect()
    assert before() is None


@pytest.mark.usefixtures("recorded_graphs")
def test_tables_are_those_of_the_segment_that_runs():
    """Latents look up rotary tables at their positions, which differ from chunk to chunk."""
    model, twin = small_model("tiny-deepseek"), small_model("tiny-deepseek")
    given = config(chunk_tokens=8)
    same(steps(model, given, 3), without(twin, given, 3))
    assert made(model).captures > 0
