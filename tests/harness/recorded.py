"""CUDA graphs without CUDA: what is launched is noted and launched again, on the same tensors.

As on a GPU a replay reads and writes what the capture did, nothing of Python runs again, and what
was there before a capture is as before.  Memory is not shared with other graphs, but what nothing
holds at the end of a capture, where later ones would write, is NaN after every replay.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers as tensor_layers
from megatron.core.tensor_parallel import mappings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_prefix import features
from megatron_prefix.features.graphs import cuda
from megatron_prefix.features.graphs.choice import GraphChoice
from megatron_prefix.features.graphs.cut_layer import CutLayer
from megatron_prefix.features.mla import latent
from megatron_prefix.lab.models.local import Float64Kept
from megatron_prefix.run.schedule import PrefixSchedule


def choice_of(schedule: PrefixSchedule) -> GraphChoice:
    """What a schedule that has run one model chooses; closed without a part for graphs."""
    [kept] = schedule.requests.kept.values()
    choice: GraphChoice = kept.get("the use of CUDA graphs", {}).get("choice", GraphChoice(0))
    return choice


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.launches: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._made: set[int] = set()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one._cdata for one in _storages([args, kwargs])}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(value)
        result = func(*args, **(kwargs or {}))
        _wait(result)
        self._made |= {one._cdata for one in _storages(result)} - given
        self.launches.append((func, args, kwargs or {}, _tensors(result)))
        return result

    def of_storage(self, call: Any) -> Any:
        """A method of storages, whose calls are noted."""

        def noted(*args: Any) -> Any:
            self.launches.append((call, args, {}, []))
            with torch.utils._python_dispatch._disable_current_modes():  # it may copy by a tensor
                return call(*args)

        return noted

    def _keep(self, tensor: Tensor) -> None:
        """What is there before the first write, unless it was made in the capture."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._made | self._before.keys():
            with torch.utils._python_dispatch._disable_current_modes():
                whole = torch.empty(0, dtype=tensor.dtype).set_(storage)
                self._before[storage._cdata] = whole, whole.clone()

    def undo(self) -> None:
        """A capture computes nothing."""
        for whole, before in self._before.values():
            whole.copy_(before)

    def forgotten(self) -> list[Tensor]:
        """Storages of floating-point numbers that were made in the capture, and are held by nothing
        but this; it then holds tensors of its own in the place of those that it has seen."""
        seen: dict[int, tuple[Tensor, Tensor]] = {}

        def own(one: Any) -> Any:
            if not isinstance(one, Tensor) or one.untyped_storage()._cdata not in self._made:
                return one
            if id(one) not in seen:
                storage = one.untyped_storage()
                size, where = storage.nbytes(), (one.storage_offset(), one.size(), one.stride())
                seen[id(one)] = one, torch.empty(0, dtype=one.dtype).set_(storage, *where)
                if storage.nbytes() != size:  # given back in the capture, and grown by this
                    _RESIZE(storage, size)
            return seen[id(one)][1]

        self.launches = [
            (func, _each(own, args), _each(own, kwargs), _each(own, written))
            for func, args, kwargs, written in self.launches
        ]
        owns = [mine for _, mine in seen.values()]
        seen.clear()
        left = [one[0] for one in _by_storage(owns) if _is_held_by(one)]
        return [torch.empty(0, dtype=one.dtype).set_(one.untyped_storage()) for one in left]


def _by_storage(tensors: list[Tensor]) -> list[list[Tensor]]:
    found: dict[int, list[Tensor]] = {}
    for one in tensors:
        found.setdefault(one.untyped_storage()._cdata, []).append(one)
    return [*found.values()]


def _is_held_by(tensors: list[Tensor]) -> bool:
    """Whether a storage of floating-point numbers is held by these alone, and by Python's object
    of it."""
    storage = tensors[0].untyped_storage()
    uses: int = torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
    return tensors[0].is_floating_point() and uses <= len(tensors) + 1


_RESIZE, _COPY = torch.UntypedStorage.resize_, torch.UntypedStorage.copy_
"""What features/recompute_act calls of storages, which no dispatch mode sees."""


class RecordedGraph(cuda.Graph):
    """Takes the place of `Graph`."""

    captured_in_all = replays = 0

    def __init__(self, pool: Any) -> None:
        self._recorder, self._left = _Recorder(), list[Tensor]()
        self._stack = contextlib.ExitStack()

    def begin(self) -> None:
        type(self).captured_in_all += 1
        self._stack.enter_context(self._recorder)
        patch = self._stack.enter_context(pytest.MonkeyPatch.context())
        for name, call in (("resize_", _RESIZE), ("copy_", _COPY)):
            patch.setattr(torch.UntypedStorage, name, self._recorder.of_storage(call))

    def end(self) -> None:
        self._stack.close()
        self._recorder.undo()
        self._left = self._recorder.forgotten()

    abandon = end

    @property
    def launched(self) -> list[str]:
        return [str(func) for func, *_ in self._recorder.launches]

    def replay(self) -> None:
        type(self).replays += 1
        with torch.no_grad():
            for func, args, kwargs, written in self._recorder.launches:
                again = func(*args, **kwargs)
                _wait(again)
                for old, new in zip(written, _tensors(again) if written else (), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        _there(old).copy_(new)
            for one in self._left:
                one.fill_(torch.nan)


def _wait(result: Any) -> None:
    """For messages to other ranks: Python, which waits for them, does not run again."""
    for one in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(one, torch.ScriptObject):
            dist.distributed_c10d.Work.unbox(one).wait()


def _there(old: Tensor) -> Tensor:
    """A tensor whose memory may have been given back in the capture: a graph writes there again."""
    size = old.element_size() * (old.storage_offset() + old.numel())
    if old.untyped_storage().nbytes() < size:
        _RESIZE(old.untyped_storage(), size)
    return old.detach()


# torch's own functions for trees take half of the time of a test.


def _tensors(values: Any) -> list[Tensor]:
    """In what an operation is given or returns: sequences and mappings, one in another."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return []
    return [one for value in values for one in _tensors(value)]


def _each(function: Callable[[Any], Any], values: Any) -> Any:
    """The same sequences and mappings of what the function makes of all else in them."""
    if isinstance(values, dict):
        return {name: _each(function, value) for name, value in values.items()}
    if isinstance(values, (tuple, list)):
        return type(values)(_each(function, value) for value in values)
    return function(values)


def _storages(values: Any) -> list[Any]:
    return [one.untyped_storage() for one in _tensors(values)]


class _Done:
    """Of a message that was waited for."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


def _reduce_scatter(output, given, group=None, async_op=False):
    """gloo's own copies its sums whenever somebody waits for it, and no replay has made these."""
    total = given.clone()
    dist.all_reduce(total, group=group)
    output.copy_(total.chunk(group.size())[group.rank()])
    return _Done() if async_op else None


@contextlib.contextmanager
def recording() -> Iterator[type[RecordedGraph]]:
    class Counted(RecordedGraph):
        captured_in_all = replays = 0

    with pytest.MonkeyPatch.context() as patch:
        for module in (mappings, tensor_layers):
            patch.setattr(module, "dist_reduce_scatter_func", _reduce_scatter)
        own = SimpleNamespace(**vars(dist) | {"reduce_scatter_tensor": _reduce_scatter})
        patch.setattr(latent, "dist", own)
        patch.setattr(features, "may_have_graphs", lambda config, _: config.graph_tokens != 0)
        patch.setattr(cuda, "Graph", Counted)
        patch.setattr(cuda, "why_not", lambda *_, **__: "")
        patch.setattr(cuda, "apart", contextlib.nullcontext)
        for name in ("settle", "recover", "pool"):
            patch.setattr(cuda, name, lambda: None)
        yield Counted


@pytest.fixture
def recorded_graphs() -> Iterator[type[RecordedGraph]]:
    with recording() as counted:
        yield counted


@contextlib.contextmanager
def in_fp64() -> Iterator[None]:
    """Recurrent layers of models in fp64 compute in it in their forward (lab/models/local.py), and
    what runs between two graphs is in none."""
    stock = CutLayer.replayed

    def replayed(*args: Any, **kwargs: Any) -> Any:
        with Float64Kept():
            return stock(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CutLayer, "replayed", replayed)
        yield


@pytest.fixture
def cores_in_fp64() -> Iterator[None]:
    with in_fp64():
        yield
