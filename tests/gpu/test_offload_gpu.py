"""Offloaded tensors on a GPU: the same gradients, less memory, page-locked staging."""

import pytest
import torch

from megatron_prefix.device.memory import free_bytes
from megatron_prefix.features.host.arena import HostLayers
from megatron_prefix.features.host.rates import measured
from megatron_prefix.features.host.segment import Offloader, addresses
from megatron_prefix.features.host.transfers import CudaTransfers
from megatron_prefix.sidecar.cache import SidecarCache
from megatron_prefix.tree.payload_map import Form
from tests.core.features.host.test_offload import expected_gradient, layers
from tests.harness.sidecar import LAYERS, step, tree

pytestmark = pytest.mark.gpu
NUM = 1 << 20


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())


def active():
    return torch.cuda.memory_stats()["active_bytes.all.current"]


@pytest.mark.parametrize("limit", [None, 1.0])
def test_the_same_gradients_with_and_without_room(limit, device):
    owner = Offloader(CudaTransfers(device, limit))
    for _ in range(3):
        owner.begin_step(float(1 << 33))
        for _ in range(4):
            x = torch.randn(NUM, device=device, requires_grad=True)
            segment = owner.segment(addresses(x))
            y = layers(segment, x)
            segment.prefetch(early=True)
            y.sum().backward()
            assert torch.equal(x.grad, expected_gradient(x))
        assert owner.pool.used_bytes == 0
        assert (owner.counts.prefetched == 0) == (limit is not None)
    assert owner.pool.num_bytes and owner.pool.take(1).tensor.is_pinned()


def test_memory_is_given_back_when_the_copies_have_ended(device):
    owner = Offloader(CudaTransfers(device))
    x = torch.randn(NUM, device=device, requires_grad=True)
    before = active()
    y = layers(owner.segment(addresses(x)), x)
    torch.cuda.synchronize()
    torch.empty(1, device=device)  # the allocator looks for ended copies when it is asked
    assert owner.counts.stored == (4 * 2 + 3) * x.nbytes
    assert active() - before <= 2 * y.nbytes + (1 << 20)


def test_what_is_measured_is_possible(device):
    rates = measured(device, torch.bfloat16)
    assert 1e12 < rates.flops < 1e16 and 1e9 < rates.link < 1e12
    assert 0 < free_bytes(device, 1e6) <= 1e6 < free_bytes(device)


def test_a_sidecar_on_the_host_gives_the_same(device):
    """With pieces of 32,768 rows, in several steps with one pool."""
    made = tree(8192)
    expected = step(SidecarCache(made.planned(), [Form.POSITIONS] * LAYERS), made, device="cuda")
    owner = Offloader(CudaTransfers(device))
    peaks = []
    for _ in range(3):
        owner.begin_step()
        cache = SidecarCache(
            made.planned(), [Form.POSITIONS] * LAYERS, special=HostLayers(owner, LAYERS, LAYERS)
        )
        found = step(cache, made, device="cuda")
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        peaks.append(cache.device_bytes.peak)
        cache.clear()
        owner.end_step()
        assert owner.pool.used_bytes == 0
    whole = SidecarCache(made.planned(), [Form.POSITIONS] * LAYERS)
    step(whole, made, device="cuda")
    assert max(peaks) < 0.8 * whole.device_bytes.peak
