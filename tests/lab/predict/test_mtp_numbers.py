"""Costs and memory of multi-token prediction, against what torch counts and autograd holds."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.predict.execution import Execution
from megatron_prefix.lab.predict.model import footprint_of
from megatron_prefix.layers.model import cost_of
from tests.harness import steps
from tests.harness.one_rank import one_rank, small_model
from tests.lab.predict.test_peak_memory import MODELS, SHAPES, VOCAB, counted


@pytest.fixture(scope="module", autouse=True)
def _rank():
    with one_rank():
        yield


@pytest.mark.parametrize(("name", "recompute"), MODELS[::2])
def test_saved_bytes_are_those_that_were_predicted(name, recompute):
    spec = dict(num_layers=3, mtp_num_layers=1)
    options = dict(vocab=VOCAB, spec=spec, dtype=torch.float32)
    model = small_model(name, recompute=recompute, **options)
    for shape in (SHAPES[0], SHAPES[-1]):
        for memory in ("retain", "recompute"):
            saved, cache, predicted = counted(model, shape, memory)
            assert predicted.cache_peak == cache, shape
            ratio = predicted.saved / (saved + cache)
            assert 0.9 <= ratio <= 1.1, f"{shape}, {memory}: {ratio:.3f}"


def test_bytes_of_layers_on_the_host():
    spec = dict(num_layers=3, mtp_num_layers=1)
    model = small_model(vocab=VOCAB, spec=spec, dtype=torch.float32)
    for host_layers in (1, 2, 9):
        _, _, predicted = counted(model, SHAPES[3], "retain", host_layers)
        assert predicted.cache_staged > 0


def flops(spec, length):
    """Of one forward, as torch counts the products of matrices."""
    model = unwrap(small_model(vocab=VOCAB, spec=spec, wrap_ddp=False, dtype=torch.float32))
    [item] = steps.group(1, 1)
    tokens = item["tokens"].repeat(1, -(-length // item["tokens"].shape[1]))[:, :length]
    places = torch.arange(length)[None]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(tokens, places, None, labels=tokens, loss_mask=torch.ones_like(tokens))
    return int(counter.get_total_flops())


@pytest.mark.parametrize("length", [16, 48])
def test_flops_of_the_layer_its_projection_and_its_output(length):
    both = [flops({"mtp_num_layers": num}, length) for num in (None, 1)]
    specs = [resolve("tiny-llama", num_layers=2, mtp_num_layers=num) for num in (None, 1)]
    padded = unwrap(small_model(vocab=VOCAB)).output_layer.weight.shape[0]
    without, with_it = (cost_of(spec, padded).forward for spec in specs)
    more = [a - b for a, b in zip(with_it, without, strict=True)]
    # Megatron's local attention computes all pairs.
    assert both[1] - both[0] == length * (more[0] + more[1]) + length**2 * more[2]
    assert with_it.scored == 2 * without.scored
    assert all(number > 0 for number in more[:3])


def test_the_layer_is_on_the_last_stage():
    spec = resolve("llama3-8b", mtp_num_layers=1)
    plain = replace(spec, mtp_num_layers=None)
    form = Execution(num_stages=4)
    found, before = footprint_of(spec, form), footprint_of(plain, form)
    assert [len(stage) for stage in found.payloads] == [8, 8, 8, 9]
    assert [len(stage) for stage in before.payloads] == [8] * 4
    for policy in ("retain", "offload", "recompute"):
        for inner in (True, False):
            ends = (policy, inner, 0.5)
            assert found.kept(*ends, True, False) == before.kept(*ends, True, False)
            more = found.kept(*ends, False, True) - before.kept(*ends, False, True)
            assert (more > 0) == (policy != "recompute")
    assert found.kept("retain", True, 0.0, False, True) > before.kept(
        "retain", True, 0.0, False, True
    )


def test_a_model_without_the_layer_has_the_same_numbers():
    """A config of Megatron's has the option, and it is off."""
    spec = resolve("llama3-8b")
    config = unwrap(small_model(vocab=VOCAB)).config
    assert config.mtp_num_layers is None and not spec.mtp_num_layers
    found = footprint_of(spec, Execution())
    assert found.behind_inner == found.behind_wave == 0.0
