"""A vision tower that runs once for every different image of a step, or frame of a video; or one of
sound, for every clip, which is called an image here.

Forward steps run up to their language model's call, all of them before the first segment, and each
would keep its tower's graph until its backward.  So the tower runs without gradients there, and
again with them when the gradients of its rows are known: after the last segment's backward, all
copies of an image at once, a few images at a time; or, if the stock schedule takes the step, in the
microbatch's own backward, as Megatron's recomputation does.

Copies of an image get the very same rows, so that they are equal bit by bit, whatever else is in a
call.  Towers are known by name (models.py): a frame's rows do not depend on others, so
[t, h, w] is t images; or they do, and it is one.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megatron_prefix.device.transfer import to_host
from megatron_prefix.errors import refused
from megatron_prefix.features.vision import models
from megatron_prefix.features.vision.fingerprints import fingerprints
from megatron_prefix.features.vision.forms import Item
from megatron_prefix.megatron.install import replaced
from megatron_prefix.refusals.table import OVERWRITTEN
from megatron_prefix.run.read.forward_step_state import Settings
from megatron_prefix.sidecar.arena import wider

IMAGES = 8
"""Images whose graphs are there at the same time, behind the last segment's backward."""
Key = tuple[tuple[int, ...], bytes]


@dataclass
class Image:
    """One different image.

    Attributes:
        item: it.
        microbatch: the first one that has it.
        version: of its patches, as torch counts writes to them.
        rows: of every tensor that the tower returns.
        sums: of the gradients of these; None before the first.
    """

    item: Item
    microbatch: int
    version: int
    rows: list[Tensor] = field(default_factory=list)
    sums: list[Tensor | None] = field(default_factory=list)

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Adds what one copy's rows have got."""
        for place, gradient in enumerate(gradients):
            before = self.sums[place]
            if before is None:  # a copy: autograd may have given several outputs one tensor
                self.sums[place] = gradient.to(wider(gradient.dtype), copy=True)
            else:
                before.add_(gradient)


class TowerOnce:
    """Takes the place of a tower's `forward`, or of a method that runs towers, for the time of a
    step; see `running`.

    Args:
        tower: one of the table of models.py, or called as most of these.
        step: tells which of the trainer's microbatches runs; -1: none, and it runs as ever.

    Attributes:
        waits: gradients are added up until `backward`; else they go on when a microbatch has all.
    """

    def __init__(self, tower: nn.Module, step: Callable[[], int]) -> None:
        self._tower, self._step = tower, step
        line = models.tower(tower) or models.Tower()
        self._form, self._method = line.form(tower), line.method
        self._stock: Callable[..., Any] = getattr(tower, self._method)
        self._signature = inspect.signature(self._stock)
        self._images: dict[Key, Image] = {}
        self._settings = Settings.now()
        self._calls: Counter[int] = Counter()
        self._waiting: dict[int, list[tuple[list[Key], list[list[Tensor]]]]] = defaultdict(list)
        parameters = [own for part in line.parts(tower) for own in part.parameters()]
        self._trains = any(parameter.requires_grad for parameter in parameters)
        self.waits = False

    @contextlib.contextmanager
    def running(self) -> Iterator[TowerOnce]:
        """Inside, the tower runs once an image.

        Raises:
            RuntimeError: a microbatch's gradients have not reached all that the tower gave it.
        """
        with replaced(self._tower, self._forward, self._method):
            yield self
        if any(self._waiting.values()):
            raise RuntimeError("gradients of images have not come back to the vision tower")

    def begin(self) -> None:
        """Begins the backward of a step, or begins it again."""
        self.waits = True
        for image in self._images.values():
            image.sums = [None] * len(image.rows)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        items = None
        if self._step() >= 0:
            items = self._form.items(self._signature.bind(*args, **kwargs).arguments)
        if not items:
            return self._stock(*args, **kwargs)
        keys = self._seen(items)
        copies = [self._images[key].rows for key in keys]
        lengths = [len(rows[0]) for rows in copies]
        rows = [torch.cat(parts) for parts in zip(*copies, strict=True)]
        if self._trains and torch.is_grad_enabled():
            number = self._step()
            self._calls[number] += 1
            anchor = torch.zeros((), requires_grad=True)
            rows = [*_ImageRows.apply(self, number, keys, anchor, *rows)]
        return self._form.joined(rows, lengths, items)

    def _seen(self, items: Sequence[Item]) -> list[Key]:
        """Which images a call has; those that are new go through the tower."""
        rows = [item.patches.flatten(0, -2) for item in items]
        counts = [len(part) for part in rows]
        if len({part.shape[-1] for part in rows}) == 1:
            rows = [torch.cat(rows)]
        numbers = to_host(torch.cat([fingerprints(part) for part in rows]))
        keys: list[Key] = []
        new: dict[Key, Image] = {}
        for item, count in zip(items, counts, strict=True):
            keys.append((item.sizes, numbers[:count].tobytes()))
            numbers = numbers[count:]
            if keys[-1] not in self._images:
                new.setdefault(keys[-1], Image(item, self._step(), _version(item.patches)))
        for images in self._together([*new.values()]):
            own = [image.item for image in images]
            with torch.no_grad():
                output = self._form.run(self._stock, own)
            self._settings = Settings.now()
            for image, rows in zip(images, self._form.rows(output, own), strict=True):
                image.rows, image.sums = rows, [None] * len(rows)
        self._images |= new
        return keys

    def _together(self, images: list[Image]) -> list[list[Image]]:
        """Those that one call of the tower has."""
        if self._form.alone:
            return [[image] for image in images]
        return [images] if images else []

    def receive(self, number: int, keys: list[Key], gradients: list[Tensor]) -> None:
        """Takes the gradients of a call's rows.

        Args:
            number: of the microbatch.
            keys: of the call's images.
            gradients: of every tensor that the call gave.
        """
        images = [self._images[key] for key in keys]
        parts = [
            gradient.split([len(image.rows[place]) for image in images])
            for place, gradient in enumerate(gradients)
        ]
        received = [[*rows] for rows in zip(*parts, strict=True)]
        if self.waits:
            for image, image_gradients in zip(images, received, strict=True):
                image.add(image_gradients)
            return
        self._waiting[number].append((keys, received))
        if len(self._waiting[number]) < self._calls[number]:
            return  # the tower's parameters get their gradients once a microbatch
        for image_keys, of_them in self._waiting.pop(number):
            for key, image_gradients in zip(image_keys, of_them, strict=True):
                self._images[key].add(image_gradients)
        self._go_on([image for image in self._images.values() if image.sums[0] is not None])

    def backward(self) -> None:
        """Runs the tower again, with gradients, for the sums that its rows have got."""
        waiting = [image for image in self._images.values() if image.sums[0] is not None]
        for start in range(0, len(waiting), IMAGES):
            self._go_on(waiting[start : start + IMAGES])

    def _go_on(self, images: list[Image]) -> None:
        """Raises UserError where the trainer has written other patches into an image's."""
        for image in images:
            if image.version != _version(image.item.patches):
                raise refused(OVERWRITTEN, "an argument of the vision tower", image.microbatch)
        for together in self._together(images):
            self._backward(together)

    def _backward(self, images: list[Image]) -> None:
        with torch.enable_grad(), self._settings.autocasting():
            output = self._form.run(self._stock, [image.item for image in images])
        tensors = self._form.leaves(output)
        by_image: list[Any] = [image.sums for image in images]
        for image in images:
            image.sums = [None] * len(image.rows)
        sums = self._form.gradients(by_image)
        pairs = [(t, s.to(t.dtype)) for t, s in zip(tensors, sums, strict=True) if t.requires_grad]
        torch.autograd.backward(
            [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]
        )


class _ImageRows(torch.autograd.Function):
    """Rows that the tower has made without a graph."""

    @staticmethod
    def forward(ctx: Any, tower: TowerOnce, number: int, keys: list[Key], _: Tensor, *rows: Tensor):  # type: ignore[no-untyped-def, override]  # noqa: ANN205
        ctx.call = tower, number, keys
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        tower, number, keys = ctx.call
        tower.receive(number, keys, [*gradients])
        return (None,) * (4 + len(gradients))


def _version(patches: Tensor) -> int:
    return 0 if patches.is_inference() else patches._version
