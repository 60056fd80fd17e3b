"""What a forward-backward call changes besides the weights, so that it can be made a second time.

Gradients are not copied: a call can be repeated where they were zero when it began, as they are
after the `zero_grad_buffer` of the usual training loop; then they are zeroed again.  Of the rest
there is little: buffers of modules (the experts' token counts), Megatron's log of auxiliary losses,
and the state of torch's generators.  Megatron's own generators are not drawn from, since dropout is
refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_prefix.moe import versions


class Rewind:
    """The state before a forward-backward call; the host does not wait for the device.

    Args:
        models: the rank's model chunks, wrapped or not.
        device: of the models.
    """

    def __init__(self, models: Sequence[Any], device: torch.device) -> None:
        self._models, self._device = models, device
        modules = [module for model in models for module in model.modules()]
        self._parameters = [p for model in models for p in model.parameters()]
        self._copies = _copies(
            [buffer for module in modules for buffer in module._buffers.values()]
        )
        self._losses = {name: values.clone() for name, values in versions.logged_losses().items()}
        self._generators = (
            torch.get_rng_state(),
            torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        )
        self._has_gradients = any(parameter.grad is not None for parameter in self._parameters)
        # Looked at only when memory has run out; until then it is one pass over the gradients.
        self._is_dirty = [total.any() for total in self._totals()]

    def possible(self) -> bool:
        """Whether gradients were zero; waits for the device."""
        return not (self._has_gradients or any(map(bool, self._is_dirty)))

    @torch.no_grad()
    def undo(self) -> None:
        """Makes everything as it was.

        Raises:
            RuntimeError: gradients were not zero.
        """
        if not self.possible():
            raise RuntimeError("gradients were not zero when the step began")
        for total in self._totals():
            total.zero_()
        for parameter in self._parameters:
            parameter.grad = None
            if hasattr(parameter, "grad_added_to_main_grad"):
                parameter.grad_added_to_main_grad = False
        for buffer, copy in self._copies:
            buffer.copy_(copy)
        for name, values in versions.logged_losses().items():
            if name in self._losses:
                values.copy_(self._losses[name])
            else:
                values.zero_()
        host, device = self._generators
        torch.set_rng_state(host)
        if device is not None:
            torch.cuda.set_rng_state(device, self._device)

    def _totals(self) -> list[Tensor]:
        """Buffers in which DDP adds gradients up."""
        return [
            buffer.grad_data
            for model in self._models
            for name in ("buffers", "expert_parallel_buffers")
            for buffer in (getattr(model, name, None) if hasattr(model, "ddp_config") else None)
            or ()
        ]


def _copies(buffers: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
    return [(buffer, buffer.clone()) for buffer in buffers if buffer is not None]
