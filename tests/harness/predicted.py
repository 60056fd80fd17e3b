"""What is predicted of a configuration, in the place of what a GPU would measure."""

import contextlib
from unittest import mock

import torch

from megatron_prefix.features.host.segment import addresses
from megatron_prefix.lab.bench.counted import SavedBytes
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.predict.of_rank import footprint_of_rank
from megatron_prefix.run.costs import Costs
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness import steps
from tests.harness.steps import Contract


@contextlib.contextmanager
def predicted_bytes():
    """Schedules inside take what is predicted as if they had measured it: on a CPU, which counts no
    bytes, policies are chosen as on a GPU."""

    def footprint(costs, rank, *, gathers, stock=False):
        return footprint_of_rank(rank, gathers=gathers)

    with (
        mock.patch.object(Costs, "footprint", footprint),
        mock.patch.object(Costs, "is_known", True),
    ):
        yield


def counted_step(schedule, model, items, contract=None):
    """The most bytes that autograd and the sidecar hold in a step inside of `predicted_bytes`, and
    its gradients, one behind the other; `model` may be a list of chunks."""
    chunks = [unwrap(one) for one in (model if isinstance(model, list) else [model])]
    own = (tensor for chunk in chunks for tensor in (*chunk.parameters(), *chunk.buffers()))
    count = SavedBytes(addresses(*own))
    with count.counting(), predicted_bytes():
        found = steps.run(schedule, (contract or Contract()).step, model, items)
    assert count.now == 0
    cache = schedule.report.cache_bytes if isinstance(schedule, PrefixSchedule) else 0
    return count.peak + cache, torch.cat([one.flatten() for one in found.gradients.values()])
