"""Reads the files of a checkpoint, which may be truncated, mixed up or written by others.

Two of them can hold more than data: `.metadata` is a pickle, and so is every entry of a shard that
is not a tensor. The first is read here by an unpickler that knows the few classes of an index,
before Megatron reads it; the others, and `common.pt`, by torch's own that knows tensors and plain
values.
"""

from __future__ import annotations

import contextlib
import enum
import io
import math
import os
import pathlib
import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import dict_utils
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedTensor,
)
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.api import CheckpointException
from torch.serialization import _get_layout

from megatron_prefix.errors import shown
from megatron_prefix.lab.rl.checkpoint_state import (
    CheckpointError,
    opened_file,
    read_json,
    reading,
    reason,
)

COMMON, INDEX, BACKEND = "common.pt", ".metadata", "metadata.json"
_SHARD = re.compile(r"__\d+_\d+\.distcp", re.ASCII)
_CLASSES = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module, names in (
        (
            metadata,
            "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta"
            " TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
        ),
        (filesystem, "_StorageInfo"),
        (planner, "BytesIOWriteData SavePlan TensorWriteData WriteItem WriteItemType"),
        (pathlib, "PosixPath"),
    )
    for name in names.split()
}


def load(wanted: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Reads Megatron's files into a sharded state; every rank of the job calls this.

    Args:
        wanted: as Megatron's `sharded_state_dict` makes it.
        checkpoint: the folder.

    Returns:
        `wanted` with values in place of shards.

    Raises:
        UserError: naming the file that cannot be used.
    """
    with warnings.catch_warnings(), _plain_values_only():
        warnings.simplefilter("ignore", FutureWarning)  # torch about its own functions
        _check_backend(checkpoint / BACKEND)
        _check_common(checkpoint / COMMON, wanted)
        entries = _entries(checkpoint / INDEX)
        _check_dtypes(checkpoint / INDEX, entries, wanted)
        _check_shards(entries)
        try:
            loaded = dist_checkpointing.load(wanted, str(checkpoint))
        except torch.OutOfMemoryError:
            raise
        except (Exception, CheckpointException) as error:  # noqa: BLE001  # as in _reading
            _blame(entries)
            raise CheckpointError(checkpoint, f"does not fit this run ({reason(error)})") from None
    for name, value in loaded.items():
        # transformer-engine unpickles what its layers in 8 bit leave here; we train in no such.
        for key in value if name.startswith("model") else ():
            if key.endswith("_extra_state") and torch.is_tensor(value[key]) and value[key].numel():
                raise CheckpointError(checkpoint, f"{key} holds state of layers in 8 bit")
    return loaded


@contextlib.contextmanager
def _plain_values_only() -> Iterator[None]:
    """Makes torch load only tensors and plain values, also where Megatron or torch's own checkpoint
    code asks for more."""
    allow, force = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = {name: os.environ.pop(name, None) for name in (allow, force)}
    os.environ[force] = "1"
    try:
        yield
    finally:
        del os.environ[force]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def _check_backend(path: Path) -> None:
    names = {f"{kind}_backend{end}" for kind in ("sharded", "common") for end in ("", "_version")}
    entries = read_json(path)
    kinds = entries.get("sharded_backend"), entries.get("common_backend")
    if set(entries) != names or kinds != ("torch_dist", "torch"):
        raise CheckpointError(path, "not what Megatron writes here")


def _check_common(path: Path, wanted: Mapping[str, Any]) -> None:
    with reading(path):
        with opened_file(path) as file:
            _check_sums(file)
        stored = torch.load(path, map_location="cpu", weights_only=True)
    fault = _difference({"optimizer": wanted["optimizer"]}, stored, "")
    if fault:
        raise CheckpointError(path, fault)


def _difference(ours: Any, theirs: Any, place: str) -> str:
    """Where the part outside of shards differs in form from ours; "" if nowhere."""
    if isinstance(ours, Mapping):
        if not isinstance(theirs, Mapping):
            return f"{place or 'the file'} holds no names"
        kept = {name: value for name, value in ours.items() if _in_common(value)}
        faults = (
            f"{place}{name} is missing"
            if name not in theirs
            else _difference(value, theirs[name], f"{place}{name}.")
            for name, value in kept.items()
        )
        return next(filter(None, faults), "")
    if isinstance(ours, list | tuple):
        groups = bool(ours) and isinstance(ours[0], Mapping)  # other layouts have more, or fewer
        if not isinstance(theirs, list | tuple) or not (groups or len(theirs) == len(ours)):
            return f"{place[:-1]} is {str(theirs)[:40]}"
        pairs = enumerate(zip([ours[0]] * len(theirs) if groups else ours, theirs, strict=True))
        return next(filter(None, (_difference(*two, f"{place}{n}.") for n, two in pairs)), "")
    numbers = (int, float)
    alike = ours is None or type(theirs) is type(ours)
    alike = alike or (type(ours) in numbers and type(theirs) in numbers)
    if not alike or (isinstance(theirs, float) and not math.isfinite(theirs)):
        return f"{place[:-1]} is {str(theirs)[:40]}"
    return ""


def _in_common(value: Any) -> bool:
    """Whether something of a sharded state is in `common.pt`."""
    if isinstance(value, Mapping):
        return not value or any(map(_in_common, value.values()))
    return not isinstance(value, ShardedBase | LocalNonpersistentObject)


class _Sealed(type):
    """A class as an index gets it: what the index holds cannot change it.

    Python's own `getattr` replaces `_member` when Megatron reads the index. Both give the
    same as long as no class is another than here.
    """

    def __setattr__(cls, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"{cls.__name__}.{name} does not belong into an index")


class _Members:
    """An enum as an index gets it, sealed likewise; it takes a value, as the enum does."""

    def __init__(self, kind: type[enum.Enum]) -> None:
        self.by_name = dict(kind.__members__)
        self._kind = kind

    def __call__(self, value: Any) -> enum.Enum:
        return self._kind(value)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("a changed enum does not belong into an index")


def _member(kind: Any, name: Any) -> enum.Enum:
    """What `getattr` is in an index: Python 3.11.0 to 3.11.3 write an enum's member as
    `getattr(enum, name)` (`Enum.__reduce_ex__`).

    Raises:
        pickle.UnpicklingError: of something else, or anything but a member.
    """
    if type(kind) is not _Members:
        raise pickle.UnpicklingError("builtins.getattr does not belong into an index")
    if type(name) is not str or name not in kind.by_name:
        raise pickle.UnpicklingError(f"the member {shown(name)} does not belong into an index")
    return kind.by_name[name]


_KNOWN: dict[str, Any] = {
    name: _Members(known) if issubclass(known, enum.Enum) else _Sealed(known.__name__, (known,), {})
    for name, known in _CLASSES.items()
} | {
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": _get_layout,
    "builtins.getattr": _member,
}


class _IndexUnpickler(pickle.Unpickler):
    """An unpickler that knows only an index's classes and enums, the function that finds a layout,
    and `getattr` of an enum's members."""

    def find_class(self, module: str, name: str) -> Any:
        """See pickle."""
        known = _KNOWN.get(f"{module}.{name}")
        if known is None and module == "torch":
            dtype = getattr(torch, name, None)
            known = dtype if isinstance(dtype, torch.dtype) else None
        if known is None:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into an index")
        return known


class _Entry(NamedTuple):
    """Where a shard holds one value, and of a tensor the dtype."""

    path: Path
    offset: int
    length: int
    key: str
    dtype: torch.dtype | None


def _entries(path: Path) -> list[_Entry]:
    """The index of the shards.

    Raises:
        UserError: it cannot be read, or holds something else.
    """
    with reading(path):
        with opened_file(path) as file:
            content = file.read()
        for operation, argument, _ in pickletools.genops(content):
            # The unpickler makes room for as much as is announced. What has a length is there, or
            # genops would have raised.
            if "PUT" in operation.name and (argument or 0) > len(content):
                raise ValueError(f"{argument} values announced")
        index = _IndexUnpickler(io.BytesIO(content)).load()
        places = index.storage_data
        known = isinstance(index, metadata.Metadata) and all(map(_possible, places.values()))
        if not known or not places:
            raise CheckpointError(path, "not an index of this checkpoint's shards")
        found = index.state_dict_metadata
        dtypes = {key: one.properties.dtype for key, one in found.items() if _is_tensor(one)}
        return [
            _Entry(path.with_name(p.relative_path), p.offset, p.length, key, dtypes.get(key))
            for key, p in ((at.fqn, place) for at, place in places.items())
        ]


def _possible(place: Any) -> bool:
    numbers = place.offset, place.length
    return (
        all(type(number) is int and number >= 0 for number in numbers)
        and not place.transform_descriptors
        and bool(_SHARD.fullmatch(place.relative_path))
    )


def _is_tensor(one: Any) -> bool:
    return isinstance(one, metadata.TensorStorageMetadata)


def _check_dtypes(path: Path, entries: list[_Entry], wanted: Mapping[str, Any]) -> None:
    """Torch would cast what a checkpoint holds in another dtype.

    Raises:
        UserError: naming the tensor.
    """
    theirs = {entry.key: entry.dtype for entry in entries}
    for one in dict_utils.nested_values(wanted):
        ours = getattr(one, "dtype", None)
        if isinstance(one, ShardedTensor) and theirs.get(one.key, ours) != ours:
            raise CheckpointError(path, f"{one.key} is {theirs[one.key]}, and {ours} in this run")


def _check_shards(entries: list[_Entry]) -> None:
    """Checks that every value is where the index says, undamaged and of its dtype; ranks share the
    reading.

    Raises:
        UserError: naming the shard.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    for number, (path, offset, length, key, dtype) in enumerate(entries):
        with reading(path), opened_file(path) as file:
            if file.seek(0, os.SEEK_END) < offset + length:
                raise ValueError(f"it was cut to {file.tell()} bytes")
            if number % size == rank:
                file.seek(offset)
                value = io.BytesIO(file.read(length))
                _check_sums(value)
                found = None if dtype is None else _dtype_of(value)
                if found != dtype:
                    raise ValueError(f"{key} is {found}, and {dtype} in the index")


def _check_sums(value: BinaryIO) -> None:
    """Checks the check sums that torch.save wrote; torch.load ignores them."""
    with zipfile.ZipFile(value) as archive:
        changed = archive.testzip()
    if changed is not None:
        raise ValueError(f"{changed} is not what was written")


def _dtype_of(value: BinaryIO) -> torch.dtype | None:
    """The dtype of a tensor as torch.save wrote it; None of another value."""
    value.seek(0)
    found = torch.load(value, map_location="cpu", weights_only=True)
    return found.dtype if torch.is_tensor(found) else None


def _blame(entries: list[_Entry]) -> None:
    """Finds the shard that cannot be read, if that is the cause.

    Raises:
        UserError: naming it.
    """
    for path, offset, length, *_ in entries:
        with reading(path), opened_file(path) as file:
            file.seek(offset)
            torch.load(io.BytesIO(file.read(length)), map_location="cpu", weights_only=True)
