"""Watches what a step keeps outside of autograd: its arenas, and what takes tensors to the host."""

from torch.multiprocessing.reductions import StorageWeakRef

from megatron_prefix.features.host.segment import Offloader
from megatron_prefix.sidecar.arena import Arena


class Storages:
    """Memory on the device that must not outlive a step."""

    def __init__(self):
        self.seen = set()

    def add(self, tensor):
        """Remembers the memory of a tensor, without holding it."""
        self.seen.add(StorageWeakRef(tensor.untyped_storage()))

    @property
    def num_alive(self):
        return sum(not storage.expired() for storage in self.seen)


def watch_arenas(patch, payload, gradient=None):
    """Calls `payload` and `gradient` with what an arena takes on the device."""
    allocate = Arena.allocate

    def allocated(self, likes, *, sums=False):
        allocate(self, likes, sums=sums)
        for tensor in self.sums if sums else self.values:
            (gradient or id if sums else payload)(tensor)

    patch.setattr(Arena, "allocate", allocated)


def offloaders(patch):
    """All that take tensors to the host from now on, each once."""
    found = []
    begin = Offloader.begin_step

    def watched(self, *given):
        if self not in found:
            found.append(self)
        begin(self, *given)

    patch.setattr(Offloader, "begin_step", watched)
    return found
