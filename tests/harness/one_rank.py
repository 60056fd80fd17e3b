"""A world of one rank in the test's own process, and small models in it."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.run.rank import Rank
from tests.harness import ranks  # noqa: F401  # applies the CPU platform


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """Megatron's process groups of one rank, for the time of a test module.

    Over torch's "fake" backend: a collective of one rank has nothing to do, and gloo's threads
    would stay (a model in DDP is never freed: its hooks and autograd's nodes hold each other) and
    hang the ranks that later tests fork.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    own = "Options" in vars(FakeProcessGroup)  # not in older releases of torch
    make, fake = dist.new_group, FakeProcessGroup.Options() if own else None

    def without_gloo(*args: Any, **options: Any) -> Any:
        return make(*args, **{**options, "backend": "fake", "pg_options": fake})

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1, pg_options=fake)
    try:
        with mock.patch.object(dist, "new_group", without_gloo):
            parallel_state.initialize_model_parallel()
        torch.manual_seed(1234)
        model_parallel_cuda_manual_seed(1234)
        yield
    finally:
        runtime.shutdown()


def small_model(name="tiny-llama", vocab=64, spec=None, **options):
    """The one chunk of a preset with two layers, in fp64 and in DDP unless `options` differ.

    `spec` changes fields of the preset. Two calls with the same arguments give equal weights.
    """
    shape = resolve(name, **{"num_layers": 2, **(spec or {})}).with_vocab(vocab)
    return build_model(shape, **{"dtype": torch.float64, **options})[0]


def change_rank(patch: pytest.MonkeyPatch, **attributes: Any) -> None:
    """The schedule's ranks say something else of themselves."""

    make = Rank.of

    def changed(*arguments: Any, **options: Any) -> Rank:
        rank = make(*arguments, **options)
        own = {name: value for name, value in attributes.items() if hasattr(rank, name)}
        of_model = {name: attributes[name] for name in attributes.keys() - own}
        return replace(rank, model=replace(rank.model, **of_model), **own)

    patch.setattr(Rank, "of", changed)
