"""Calls that give every context-parallel rank one contiguous part of a row.

A pack is cut as a whole, as slime and miles do with `--allgather-cp`, and verl for models that have
it so: a part begins and ends inside a sample.
"""

import numpy as np
from megatron.core import parallel_state

from tests.harness.calls import Trainer


class ContiguousTrainer(Trainer):
    """Packs of samples of any length, padded by a sample at the end, as slime has them."""

    def batch_of(self, members, number, multiple):
        """See `Trainer.batch_of`."""
        batch = super().batch_of(members, number, 1 if self.form.packed else multiple)
        more = -sum(batch["lengths"]) % self._multiple
        for name in ("lengths", "true") if more and self.form.packed else ():
            batch[name].append(more)
        return batch

    def cut(self, rows):
        """See `Trainer.cut`."""
        if self.form.packed:
            whole = np.concatenate(rows)
            rows = [np.pad(whole, (0, -len(whole) % self._multiple))]
        rank = parallel_state.get_context_parallel_rank()
        return [np.split(row, self.layout.cp)[rank] for row in rows]

    @property
    def _multiple(self):
        return 4 * self.layout.cp * self.layout.tp
