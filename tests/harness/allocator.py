"""A counter of bytes on the CPU, in the place of a GPU's allocator: what autograd has saved, what
sidecars hold, and what a test adds."""

import contextlib
from unittest import mock

from megatron_prefix.device import memory
from megatron_prefix.features.host.segment import addresses
from megatron_prefix.features.measure import allocator
from megatron_prefix.features.measure.allocator import Peaks
from megatron_prefix.lab.bench.counted import SavedBytes
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.sidecar.arena import DeviceBytes


class Allocator:
    """Counts while it runs.

    Args:
        models: whose weights are not counted.

    Attributes:
        other: bytes that somebody else holds.
        arenas: bytes of sidecars.
        hot: factor of what autograd saves: this rank's tokens go to more experts.
        highest: the most bytes at once, so far.
    """

    def __init__(self, *models):
        every = [t for m in map(unwrap, models) for t in (*m.parameters(), *m.buffers())]
        self._saved = SavedBytes(addresses(*every), self.note)
        self.other, self.arenas, self.highest, self.hot = 0.0, 0.0, 0.0, 1.0

    @property
    def used(self):
        return self.other + self.arenas + self.hot * self._saved.now

    def note(self):
        self.highest = max(self.highest, self.used)

    @contextlib.contextmanager
    def running(self):
        """The core takes what is counted here for what a GPU's allocator says."""
        add = DeviceBytes.add

        def added(device_bytes, num_bytes):
            add(device_bytes, num_bytes)
            self.arenas += num_bytes
            self.note()

        def peaks(device):
            self._saved.look()
            self.note()
            return Peaks(self.used, self.highest, self.highest)

        with (
            mock.patch.object(DeviceBytes, "add", added),
            mock.patch.object(memory, "counts_bytes", return_value=True),
            mock.patch.object(allocator, "peaks", peaks),
            self._saved.counting(),
        ):
            yield self
