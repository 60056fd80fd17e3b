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
from tests.lab.predict.test_peak_memory import VOCAB


@pytest.fixture(scope="module", autouse=True)
def _rank():
    with one_rank():
        yield


def flops(spec, length):
    """Of one forward, as torch counts the products of matrices."""
    model = unwrap(small_model(vocab=VOCAB, spec=spec, wrap_ddp=False, dtype=torch.float32))
    [item] = steps.group(1, 1)
    tokens = item["tokens"].repeat(1, -(-length // item["tokens"].shape[1]))[:, :length]
    places = torch.arange(length)[None]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(tokens, places, None, labels=tokens, loss_mask=torch.ones_like(tokens))
    return int(counter.get_total_flops())


def test_flops_of_the_layer_its_projection_and_its_output():
    length = 16
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
