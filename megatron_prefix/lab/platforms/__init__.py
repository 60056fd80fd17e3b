"""Where the work runs: Megatron-Core on GPUs with NCCL, or on the CPU with gloo."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_prefix.errors import UserError

if TYPE_CHECKING:  # torch is imported late: the CPU platform wants to be first (see cpu.py)
    import torch

logger = logging.getLogger(__name__)

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Platform:
    """What the rest of the package must know about the machine.

    device_type: "cpu" or "cuda", as torch spells it.
    backend: the torch.distributed backend, "gloo" or "nccl".
    name: for reports, e.g. "CPU" or "NVIDIA H200".
    """

    device_type: str
    backend: str
    name: str

    def device(self, local_rank: int = 0) -> torch.device:
        """The device of one rank; `local_rank` counts the ranks of this host from 0."""
        import torch

        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", local_rank % torch.cuda.device_count())


def check(device: str) -> None:
    """Refuses a device that is not there.

    Raises:
        UserError: unknown device, or "cuda" where torch sees none.
    """
    if device not in DEVICES:
        raise UserError(f"device {device!r} is not known; choose one of {', '.join(DEVICES)}")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UserError(
                "device 'cuda': torch sees no GPU (CPU-only build, or none visible); "
                "use device 'cpu' or a torch build for this GPU's driver"
            )


def select(device: str) -> Platform:
    """Make `device` ("cpu" or "cuda") ready in this process and describe it.

    Choosing "cpu" applies the CPU platform, for the life of the process; on a machine with a GPU
    that hides the GPU from it. Call it before the first import of Megatron.

    Raises:
        UserError: unknown device, or "cuda" if torch sees none.
    """
    check(device)
    if device == "cpu":
        from megatron_prefix.lab.platforms import cpu

        cpu.enable(hide_gpus=True)
        return Platform("cpu", "gloo", "CPU")

    import torch

    return Platform("cuda", "nccl", torch.cuda.get_device_name())
