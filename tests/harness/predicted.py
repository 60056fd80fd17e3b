"""What is predicted of a configuration, in the place of what a GPU would measure."""

import contextlib
from unittest import mock

from megatron_prefix.lab.predict.of_rank import footprint_of_rank
from megatron_prefix.run.costs import Costs


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
