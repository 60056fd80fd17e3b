"""Whether kernels written in Triton run here; the same formulas in torch run where they do not."""

from __future__ import annotations

import functools
import logging

import torch

from megatron_prefix.errors import named

logger = logging.getLogger(__name__)


@functools.cache
def has_triton(device_type: str) -> bool:
    """Whether Triton compiles and runs a kernel on this device; a warning says once why not.

    On the CPU it is not asked. Triton comes with torch's CUDA builds, and not with others.
    """
    if device_type != "cuda":
        return False
    try:
        from megatron_prefix.device.triton_probe import doubled

        if doubled(torch.ones(1, device=device_type)).item() == 2:
            return True
        reason = "a kernel gave a wrong result"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - not installed, no compiler, an unknown device, ...
        reason = named(error)
    logger.warning(
        "attention blocks are merged without fused kernels, which is slower; Triton: %s", reason
    )
    return False
