"""What recurrent layers save for backward, measured, and where their states are in a step."""

import gc
from typing import Any

import pytest
import torch

from megatron_prefix.lab.bench.counted import SavedBytes
from megatron_prefix.sidecar.cache import SegmentState, SidecarCache
from tests.harness import failures, hybrid, saving_kernels, steps
from tests.harness.arenas import Storages, offloaders, watch_arenas
from tests.harness.failures import Countdown, Fault, raised
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


WAYS: dict[str, dict[str, Any]] = {
    "retain": {"memory": "retain"},
    "host": {"memory": "retain", "cache_host_layers": 2},
    "offload, host": {"memory": "offload", "cache_host_layers": 9},
    "recompute, host": {"memory": "recompute", "cache_host_layers": 9},
}


class Watch:
    """The memory of a step's arenas, the sidecars, and what takes tensors to the host."""

    def __init__(self, patch):
        self.arenas = Storages()
        self.caches: list[SidecarCache] = []
        made = SidecarCache.__init__

        def known(cache, *args):
            self.caches.append(cache)
            made(cache, *args)

        watch_arenas(patch, self.arenas.add, self.arenas.add)
        self.offloaders = offloaders(patch)
        patch.setattr(SidecarCache, "__init__", known)

    def check(self, saved):
        """Nothing is left, without the help of the garbage collector."""
        assert self.arenas.seen and not self.arenas.num_alive
        for cache in self.caches:
            assert cache.device_bytes.peak > cache.device_bytes.held == 0
            states = {
                cache.state(layer, index)
                for layer in range(len(cache.forms))
                for index in range(len(cache.map.parents))
            }
            assert states == {SegmentState.EMPTY}
        # What was ready to run when a backward failed is in this thread's queue until the next one.
        # (On CUDA a thread of torch's drops it at once.)
        torch.zeros((), requires_grad=True).backward()
        assert saved.peak > saved.now == 0
        for offloader in self.offloaders:
            assert offloader.counts.stored > offloader.pool.used_bytes == 0


LEFT = [(GDN, "capture", "recompute, host"), (MAMBA, "capture", "offload, host"),
        (GDN, "add", "retain"), (MAMBA, "add", "host")]  # fmt: skip
"""Where memory is has nothing to do with the kind of states, nor has what fails."""


@pytest.mark.parametrize(("name", "place", "way"), LEFT)
def test_nothing_is_left(name, place, way, monkeypatch):
    """Of a step that fails in a forward or a backward, and of the next, which is the same as ever:
    states, host memory, saved tensors."""
    model = hybrid.model_of(name)
    ours, saved = schedule_with(**WAYS[way]), SavedBytes(set())

    def run():
        with saved.counting():
            return steps.run(ours, steps.Contract().step, model, hybrid.items()).gradients

    expected = run()
    gc.collect()
    gc.disable()
    try:
        watch = Watch(monkeypatch)
        with monkeypatch.context() as patch:
            failures.before_call(SidecarCache, place)(patch, model, Countdown(Fault, 5))
            assert raised(Fault, run) == "injected"
            watch.check(saved)
        found = run()
        watch.check(saved)
    finally:
        gc.enable()
    assert bool(watch.offloaders) == ("host" in way)
    assert all(torch.equal(found[one], wanted) for one, wanted in expected.items())
