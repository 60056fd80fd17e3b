"""One packed storage, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from megatron_prefix.offload.pool import Lease


class StorageState(Enum):
    """Life of one packed storage."""

    STAGED = "staged"  # on the device, its layer still runs
    KEPT = "kept"  # on the device for good: its owner discards it and fills it again
    OFFLOADED = "offloaded"  # on the host, or on its way
    LOADED = "loaded"  # on the device again


_NEXT = {
    StorageState.STAGED: {StorageState.OFFLOADED, StorageState.KEPT},
    StorageState.OFFLOADED: {StorageState.LOADED},
    StorageState.KEPT: set(),
    StorageState.LOADED: set(),
}


@dataclass(eq=False)
class Entry:
    """One storage.

    Attributes:
        state: where it is.
        tensor: a tensor on its storage, while that is on the device.
        version: of `tensor` when it was packed.
        num_bytes: of its storage when it was packed.
        lease: its bytes on the host.
        layer: number of the last layer that saved it, the first whose backward asks for it.
        mark: of its copy under way, for `Transfers`.
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
            RuntimeError: there is no such way.
        """
        if state not in _NEXT[self.state]:
            raise RuntimeError(
                f"a saved tensor is {self.state.value} and cannot become {state.value}"
            )
        self.state = state

    def as_bytes(self) -> Tensor | None:
        """A packed storage as uint8 [num_bytes]; None where its owner has discarded it.

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
