"""States of recurrent layers: where they lie, who reads them, and that wrong orders raise."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_prefix.features.recurrent import moves, probe, states
from megatron_prefix.features.recurrent.definition import (
    chunk_gated_delta_rule,  # its module has it
)
from megatron_prefix.features.recurrent.spans import Spans
from megatron_prefix.lab.platforms import cpu
from megatron_prefix.lab.platforms.linear_kernels import causal_conv1d, causal_conv1d_fn
from megatron_prefix.megatron import features
from megatron_prefix.refusals.table import DELTA_KERNEL
from tests.harness import ranks  # noqa: F401  # applies the CPU platform


@pytest.mark.parametrize("kernels", [torch.float32, torch.bfloat16])
def test_final_states_are_kept_in_fp32_and_tails_as_they_are(kernels):
    spans = Spans((3, 4), (0, 0), torch.device("cpu"))
    segment = mock.Mock(between={("spans", None): spans}, inner=True, backward=False)
    state = torch.full((2, 3), 1 + 2**-12).to(kernels)
    layer = states.LayerStates(segment, 0, state, before=3)
    row, _ = layer.edges(torch.ones(7, 4, dtype=torch.bfloat16))
    layer.leave(row, state)
    (_, _, kept), _ = segment.cache.capture.call_args
    assert [one.dtype for one in kept] == [torch.float32, torch.bfloat16]
    assert torch.equal(kept[0], state.float())


def test_gradients_of_neighbours_are_summed_in_fp32():
    """In bf16 what is small beside the sum would be lost: 256 and eight halves."""
    sent = torch.full((10, 3), 0.5, dtype=torch.bfloat16)
    sent[0] = 256.0
    found = states.summed(sent, torch.tensor([9, 1]))
    assert found.dtype == torch.float32
    assert found.tolist() == [[260.0] * 3, [0.5] * 3]


# Moves of positions in recurrent layers: their gradients, and the memory that they write ----------

BEFORE, WIDTH = 3, 4
LENGTHS = pytest.mark.parametrize("lengths", [[9], [5, 4], [1, 2, 3, 9, 1]])
INNER = pytest.mark.parametrize("inner", [False, True])


def random(*shape, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_()


def spans_of(lengths):
    return Spans(lengths, [0] * len(lengths), torch.device("cpu"))


def segment_of(lengths, inner):
    return mock.Mock(inner=inner, backward=False, between={("spans", None): spans_of(lengths)})


def test_gradients_of_batches():
    spans = spans_of([1, 2, 3, 9, 1])
    x, front = random(16, WIDTH), random(5, BEFORE, WIDTH)

    def there(*given):
        return moves.to_batches(*given, torch.ones(WIDTH, dtype=torch.float64), spans)

    assert torch.equal(moves.from_batches(there(x, front), spans, BEFORE), x)
    assert torch.autograd.gradcheck(there, (x, front))
    given = [batch.detach().clone().requires_grad_() for batch in there(x, front)]
    assert torch.autograd.gradcheck(lambda *y: moves.from_batches(y, spans, BEFORE), given)


def test_an_overwritten_output_that_its_kernel_needs_is_an_error():
    y = random(1, 5, WIDTH).exp()  # saves what it returns
    changed = moves.overwritten(y, torch.tensor([1]), random(1, WIDTH), None)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        changed.sum().backward()


class Mixer:
    """The part of a GatedDeltaNet that calls a convolution, by the global names of its module."""

    def __init__(self, positions_first):
        self.positions_first = positions_first

    def forward(self, x):
        if self.positions_first:
            return causal_conv1d(x.mT, WEIGHT, None, activation="silu")[0].mT
        return causal_conv1d_fn(x, WEIGHT, None, activation="silu")


def convolution_of(lengths, inner, positions_first=False):
    """The convolution of a GatedDeltaNet's layer, in a segment with spans of these lengths."""
    cpu.load_recurrent_layers()
    from megatron_prefix.features.recurrent.delta import GatedDeltaLayer

    running = SimpleNamespace(current=segment_of(lengths, inner), tap=None)
    ((_, name, forward),) = GatedDeltaLayer(Mixer(positions_first), 0, running).overrides()
    assert name == "forward"
    return forward


WEIGHT = random(WIDTH, BEFORE + 1, seed=2).detach()


@INNER
@LENGTHS
def test_a_span_is_convolved_as_if_it_were_alone(lengths, inner, monkeypatch):
    x = random(1, WIDTH, sum(lengths))
    parts = x.split(lengths, 2)
    wanted = torch.cat([causal_conv1d_fn(part, WEIGHT, activation="silu") for part in parts], 2)
    for positions_first, kernel in enumerate((causal_conv1d_fn, causal_conv1d)):
        calls = mock.Mock(wraps=kernel)
        monkeypatch.setitem(globals(), kernel.__name__, calls)
        found = convolution_of(lengths, inner, bool(positions_first))(x)
        gradients = [
            torch.autograd.grad(y.sin().sum(), x, retain_graph=True) for y in (found, wanted)
        ]
        torch.testing.assert_close(*gradients)
        torch.testing.assert_close(found, wanted)
        # A lone root is right as it is.
        assert calls.call_count == (1 if len(lengths) == 1 else 2)
    # Without the package causal-conv1d.
    monkeypatch.setitem(globals(), "causal_conv1d_fn", None)
    torch.testing.assert_close(convolution_of(lengths, inner)(x), wanted)


# The probe of recurrent kernels notices wrong ones, and says what is not there --------------------


class _Wrong(torch.autograd.Function):
    """The identity; its gradient is a tenth off in a part, as a miscompiled kernel's."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return torch.cat([gradient[:, :64] * 1.1, gradient[:, 64:]], 1)


def _without_states(*given, **more):
    more["initial_state"] = more["initial_state"] * 0
    return chunk_gated_delta_rule(*given, **more)


def _detached(*given, **more):
    state = more["initial_state"]
    more["initial_state"] = state.detach() + 0 * state
    return chunk_gated_delta_rule(*given, **more)


def _wrong_backward(q, k, v, **more):
    return chunk_gated_delta_rule(q, _Wrong.apply(k), v, **more)


def _one_sequence(*given, **more):
    out, _ = chunk_gated_delta_rule(*given, **{**more, "cu_seqlens": None, "initial_state": None})
    return out, chunk_gated_delta_rule(*given, **more)[1]


def _failing(*_, **__):
    raise ValueError("no kernel image\nand more")


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (_without_states, "wrong output"), (_one_sequence, "wrong output"),
        (_detached, "wrong gradient of initial state"), (_wrong_backward, "wrong gradient of keys"),
        (_failing, "ValueError: no kernel image with "),
    ],
)  # fmt: skip
def test_a_wrong_rule_is_refused(rule, reason):
    found = probe.rule_refusal(rule, "cpu", torch.float64, 16, 8)
    assert found is not None and found.startswith(reason) and "\n" not in found


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_rule_is_tried_in_a_pass_without_gradients(mode):
    with mode():
        assert probe.rule_refusal(chunk_gated_delta_rule, "cpu", torch.float64, 16, 8) is None


def test_what_is_not_installed_is_said_with_the_fix():
    assert probe.refusals("cpu") == {"GatedDeltaNet": None, "MambaMixer": None}
    found = probe.refusals("cuda")
    assert "pip install fla-core==" in (found["GatedDeltaNet"] or "")
    assert "build mamba-ssm" in (found["MambaMixer"] or "")


def test_a_wrong_rule_is_refused_when_a_model_is_installed(monkeypatch):
    """On a GPU only: the CPU's rule is the definition itself."""
    cpu.load_recurrent_layers()
    kind = sys.modules["megatron.core.ssm.gated_delta_net"].GatedDeltaNet
    layer = SimpleNamespace(self_attention=kind.__new__(kind))
    wrong = DELTA_KERNEL.given("GatedDeltaNet", "wrong output")
    for device, found in (("cuda", [wrong]), ("cpu", [])):
        model = SimpleNamespace(
            config=SimpleNamespace(
                linear_key_head_dim=64, linear_value_head_dim=32, linear_num_value_heads=8,
                tensor_model_parallel_size=2, context_parallel_size=1,
            ),
            decoder=SimpleNamespace(layers=[layer]),
            parameters=lambda device=device: iter([SimpleNamespace(device=torch.device(device))]),
        )  # fmt: skip
        asked = []

        def refusals(*given, asked=asked):
            asked.append(given)
            return {"GatedDeltaNet": "wrong output"}

        monkeypatch.setattr(probe, "refusals", refusals)
        assert [*features.layer_refusals(model)] == found
        assert asked == ([("cuda", 64, 32, 4)] if found else [])
