"""What a call changes other than the weights, as it was when the call began."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_prefix.device.modules import modules_of
from megatron_prefix.megatron.logged_losses import logged_losses
from megatron_prefix.run.rank import Rank


class Rewind:
    """Undoes what a call has added to gradients, buffers and logs.

    Gradients are zero when the calls of most trainers begin, after `zero_grad_buffer`: they are
    zeroed again. Where they are not, `keep` copies them to the host. Of the rest there is little:
    buffers of modules (the experts' token counts) and Megatron's log of auxiliary losses.

    The host does not wait for the device. To look for gradients that are not zero is one pass over
    them, besides what the host sends to the device while it plans.
    """

    def __init__(self, rank: Rank) -> None:
        self.models, self._copies_of_totals = rank.models, list[Tensor]()
        self._logged = logged_losses if rank.model.has_experts else dict
        modules = list(modules_of(*rank.models))
        self._parameters = [
            p for module in modules for p in module._parameters.values() if p is not None
        ]
        self._copies = [
            (buffer, buffer.clone())
            for module in modules
            for buffer in module._buffers.values()
            if buffer is not None
        ]
        self._losses = {name: values.clone() for name, values in self._logged().items()}
        self._gradients = {p: p.grad for p in self._parameters if p.grad is not None}
        # Megatron's flag: a fused weight gradient is in the total already.
        flag = "grad_added_to_main_grad"
        self._was_added = [p for p in self._parameters if getattr(p, flag, False)]
        self._watched = None if rank.forward_only else _NotZero(self._totals(), rank.device)

    def looked(self) -> None:
        """From here on the device may change gradients: it has looked at them before."""
        if self._watched is not None:
            self._watched.looked()

    def possible(self) -> bool:
        """Whether `undo` knows the gradients; waits for the device, if `keep` has not."""
        return bool(self._copies_of_totals) or not self._is_dirty()

    def keep(self) -> None:
        """Copies gradients that are not zero to the host, before the first of the call's is added.

        Raises:
            RuntimeError: the host has no room.
        """
        if self._is_dirty():
            self._copies_of_totals = [_host_copy(gradient) for gradient in self._everything()]

    @torch.no_grad()
    def undo(self) -> None:
        """Puts everything back as it was.

        Raises:
            RuntimeError: gradients were not zero, and were not kept.
        """
        if not self.possible():
            raise RuntimeError("gradients were not zero when the step began")
        if self._watched is not None:
            self._undo_gradients()
        for buffer, copy in self._copies:
            buffer.copy_(copy)
        for name, values in self._logged().items():
            if name in self._losses:
                values.copy_(self._losses[name])
            else:
                values.zero_()

    def _undo_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = self._gradients.get(parameter)
            if hasattr(parameter, "grad_added_to_main_grad"):
                parameter.grad_added_to_main_grad = False
        for parameter in self._was_added:
            parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        for total in self._totals():
            total.zero_()
        if self._copies_of_totals:
            for total, copy in zip(self._everything(), self._copies_of_totals, strict=True):
                total.copy_(copy)

    def _is_dirty(self) -> bool:
        return self._watched is not None and (bool(self._gradients) or self._watched.any())

    def _everything(self) -> Iterator[Tensor]:
        yield from self._totals()
        yield from self._gradients.values()

    def _totals(self) -> list[Tensor]:
        return [
            buffer.grad_data
            for model in self.models
            for name in ("buffers", "expert_parallel_buffers")
            for buffer in (getattr(model, name, None) if hasattr(model, "ddp_config") else None)
            or ()
        ]


class _NotZero:
    """Whether any of some tensors is not zero, found beside what else the device does."""

    def __init__(self, totals: list[Tensor], device: torch.device) -> None:
        self._side = _side_stream(device) if device.type == "cuda" else None
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._side):
            flags = [total.any() for total in totals]
            self._flag = torch.stack(flags).any() if flags else torch.zeros((), dtype=torch.bool)
            if self._side is not None:
                pinned = torch.empty((), dtype=torch.bool, pin_memory=True)
                self._flag = pinned.copy_(self._flag, non_blocking=True)

    def looked(self) -> None:
        if self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)

    def any(self) -> bool:
        if self._side is not None:
            self._side.synchronize()
        return bool(self._flag)


def _host_copy(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda":
        return tensor.detach().clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor.detach(), non_blocking=True)


_side_stream = functools.cache(torch.cuda.Stream)
