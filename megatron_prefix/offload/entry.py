"""The state of one saved storage."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from megatron_prefix.offload.pool import Lease


class StorageState(Enum):
    """Where one saved storage is."""

    STAGED = "staged"  # on the device; its layer still runs
    KEPT = "kept"  # stays on the device: its owner discards it and fills it again
    OFFLOADED = "offloaded"  # on the host, or being copied there
    LOADED = "loaded"  # on the device again


_NEXT = {
    StorageState.STAGED: {StorageState.OFFLOADED, StorageState.KEPT},
    StorageState.OFFLOADED: {StorageState.LOADED},
    StorageState.KEPT: set(),
    StorageState.LOADED: set(),
}


@dataclass(eq=False)
class Entry:
    """One saved storage.

    Attributes:
        state: where it is.
        tensor: a tensor with this storage, while it is on the device.
        version: of `tensor` when it was saved.
        num_bytes: of the storage when it was saved.
        lease: its memory on the host.
        layer: number of the last layer that saved it, whose backward needs it first.
        mark: of a running copy, for `Transfers`.
    """

    state: StorageState
    tensor: Tensor | None
    version: int
    num_bytes: int
    lease: Lease | None = None
    layer: int = 0
    mark: Any = None

    def become(self, state: StorageState) -> None:
        """Changes the state.

        Raises:
            RuntimeError: this change is not allowed.
        """
        if state not in _NEXT[self.state]:
            raise RuntimeError(
                f"a saved tensor is {self.state.value} and cannot become {state.value}"
            )
        self.state = state

    def as_bytes(self) -> Tensor | None:
        """The storage as uint8 [num_bytes]; None if its owner has discarded it.

        Raises:
            RuntimeError: it was changed in place after it was saved.
        """
        tensor = self.tensor
        if tensor is None:
            raise RuntimeError("a staged tensor is not there")
        storage = tensor.untyped_storage()
        if storage.nbytes() != self.num_bytes:
            return None
        if tensor._version != self.version:
            raise RuntimeError(
                f"a tensor {tuple(tensor.shape)} that backward needs was changed in place after it"
                " was saved"
            )
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
