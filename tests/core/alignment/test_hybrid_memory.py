"""What recurrent layers save for backward, measured, and where their states are in a step."""

import pytest
import torch

from tests.harness import hybrid, saving_kernels
from tests.harness.hybrid import GDN, MAMBA
from tests.harness.one_group import schedule_with
from tests.harness.predicted import counted_step

pytestmark = pytest.mark.usefixtures("on_one_rank")

SPECS = {GDN: hybrid.gated_delta(4, every=4), MAMBA: hybrid.mamba("M-M*M-")}
FAMILIES = pytest.mark.parametrize("name", [GDN, MAMBA])


def step(model, items=None, **fields):
    """The most bytes that autograd holds in a step, and the step's report."""
    ours = schedule_with(**fields)
    saved, _ = counted_step(ours, model, items or hybrid.items())
    assert ours.report is not None and ours.report.memory is not None
    return saved - ours.report.cache_bytes, ours.report


SAVED = [(name, recompute, memory) for name in SPECS for recompute in ("none", "full")
         for memory in ("retain", "recompute")
         if (name, recompute, memory) != (MAMBA, "none", "recompute")]  # fmt: skip


@pytest.mark.parametrize(("name", "recompute", "memory"), SAVED)
def test_saved_bytes_are_those_that_were_predicted(name, recompute, memory, monkeypatch):
    """Within 6%, with spans of all lengths."""
    model = hybrid.model_of(name, spec=SPECS[name], dtype=torch.float32, recompute=recompute)
    saving_kernels.install(monkeypatch, model)
    shapes = ({"chunk_tokens": 7}, {"segment_tokens": 30})
    for fields in shapes if recompute == "none" else shapes[:1]:
        saved, report = step(model, memory=memory, **fields)
        ratio = report.memory.saved / (saved + report.cache_bytes)
        assert 0.94 <= ratio <= 1.06, f"{fields}, {memory}: {ratio:.3f}"
        # Without the padding of batches it would be less.
        assert name == GDN or ratio >= 0.97, f"{fields}, {memory}: {ratio:.3f}"


@FAMILIES
def test_layers_on_the_host_are_those_that_are_predicted(name):
    """One account of bytes for K/V and states, here and there."""
    model = hybrid.model_of(name, spec=SPECS[name], dtype=torch.float32)
    (_, here), (_, some), (_, there) = (step(model, cache_host_layers=n) for n in (0, 2, 9))
    whole = here.memory.cache_peak
    assert whole == pytest.approx(here.cache_bytes) and here.memory.cache_staged == 0
    for report in (some, there):
        assert report.memory.cache_peak + report.memory.cache_staged == pytest.approx(whole)
        assert report.memory.cache_peak < report.cache_bytes < whole  # those that come and go
    assert there.memory.cache_peak == 0 < some.memory.cache_peak
    assert there.memory.temporary >= there.cache_bytes
