"""A vision tower that runs once for every different image of a step, or frame of a video.

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
from torch.utils import (
    _pytree as pytree,  # torch's own; torch.utils.pytree is not public before 2.9
)

from megatron_prefix.device.transfer import to_host
from megatron_prefix.errors import refused
from megatron_prefix.features.vision import models
from megatron_prefix.features.vision.fingerprints import fingerprints
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
        patches: of it.
        grid: int64 [3]: frames, height, width.
        microbatch: the first one that has it.
        version: of the patches, as torch counts writes to them.
        rows: of every tensor that the tower returns.
        sums: of the gradients of these; None before the first.
    """

    patches: Tensor
    grid: Tensor
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
    """Takes the place of a tower's `forward` for the time of a step; see `running`.

    Args:
        tower: (patches [n, ...], grids [images, 3]) -> a tree of rows, or a list of those of every
            image; one of the table of models.py, or called as most of these.
        step: tells which of the trainer's microbatches runs; -1: none, and it runs as ever.

    Attributes:
        waits: gradients are added up until `backward`; else they go on when a microbatch has all.
    """

    def __init__(self, tower: nn.Module, step: Callable[[], int]) -> None:
        self._tower, self._step = tower, step
        self._kind = models.tower(tower) or models.Tower("")
        self._stock: Callable[..., Any] = tower.forward
        self._signature = inspect.signature(self._stock)
        self._images: dict[Key, Image] = {}
        self._structure: Any = None
        self._plain: list[Any] = []  # what a call returns; `Tensor` for each tensor
        self._settings = Settings.now()
        self._calls: Counter[int] = Counter()
        self._waiting: dict[int, list[tuple[list[Key], list[list[Tensor]]]]] = defaultdict(list)
        self._trains = any(parameter.requires_grad for parameter in tower.parameters())
        self.waits = False

    @contextlib.contextmanager
    def running(self) -> Iterator[TowerOnce]:
        """Inside, the tower runs once an image.

        Raises:
            RuntimeError: a microbatch's gradients have not reached all that the tower gave it.
        """
        with replaced(self._tower, self._forward):
            yield self
        if any(self._waiting.values()):
            raise RuntimeError("gradients of images have not come back to the vision tower")

    def begin(self) -> None:
        """Begins the backward of a step, or begins it again."""
        self.waits = True
        for image in self._images.values():
            image.sums = [None] * len(image.rows)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        provided = self._signature.bind(*args, **kwargs).arguments
        grids = provided.pop(self._kind.grids, None)
        patches = [value for value in provided.values() if value is not None]
        is_plain = grids is not None and len(patches) == 1 and isinstance(patches[0], Tensor)
        if not is_plain or not len(grids) or self._step() < 0:
            return self._stock(*args, **kwargs)
        keys = self._seen(patches[0].detach(), grids)
        copies = [self._images[key].rows for key in keys]
        lengths = [len(rows[0]) for rows in copies]
        rows = [torch.cat(parts) for parts in zip(*copies, strict=True)]
        if self._trains and torch.is_grad_enabled():
            number = self._step()
            self._calls[number] += 1
            anchor = torch.zeros((), requires_grad=True)
            rows = [*_ImageRows.apply(self, number, keys, anchor, *rows)]
        if self._kind.listed:
            return [*rows[0].split(lengths)]
        remaining = iter(rows)
        leaves = [next(remaining) if leaf is Tensor else leaf for leaf in self._plain]
        return pytree.tree_unflatten(leaves, self._structure)

    def _seen(self, patches: Tensor, grids: Tensor) -> list[Key]:
        """Which images a call has; those that are new go through the tower."""
        if self._kind.apart:
            grids = grids.repeat_interleave(grids[:, 0], 0)
            grids[:, 0] = 1  # some models join images of one size, as if they were a video
        counts = grids.prod(-1).tolist()
        numbers = to_host(fingerprints(patches.flatten(1)))
        keys: list[Key] = []
        new: dict[Key, Image] = {}
        for part, grid, count in zip(patches.split(counts), grids, counts, strict=True):
            keys.append((tuple(grid.tolist()), numbers[:count].tobytes()))
            numbers = numbers[count:]
            if keys[-1] not in self._images:
                new.setdefault(keys[-1], Image(part, grid, self._step(), _version(part)))
        if new:
            with torch.no_grad():
                output = self._run([*new.values()])
            self._settings = Settings.now()
            for image, rows in zip(
                new.values(), self._by_image(output, [*new.values()]), strict=True
            ):
                image.rows, image.sums = rows, [None] * len(rows)
            self._images |= new
        return keys

    def _run(self, images: Sequence[Image]) -> Any:
        patches = torch.cat([image.patches for image in images])
        grids = torch.stack([image.grid for image in images])
        return self._stock(patches, **{self._kind.grids: grids})

    def _by_image(self, output: Any, images: Sequence[Image]) -> list[list[Tensor]]:
        """The rows of every image, of every tensor that the tower has returned."""
        if self._kind.listed:
            return [[rows] for rows in output]
        leaves, self._structure = pytree.tree_flatten(output)
        self._plain = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        parts = [_split_images(leaf, images) for leaf in leaves if isinstance(leaf, Tensor)]
        return [[*rows] for rows in zip(*parts, strict=True)]

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

    def _go_on(self, images: Sequence[Image]) -> None:
        """Raises UserError where the trainer has written other patches into an image's."""
        for image in images:
            if image.version != _version(image.patches):
                raise refused(OVERWRITTEN, "an argument of the vision tower", image.microbatch)
        with torch.enable_grad(), self._settings.autocasting():
            leaves = pytree.tree_leaves(self._run(images))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        by_image = [image.sums for image in images]
        for image in images:
            image.sums = [None] * len(image.rows)
        if self._kind.listed:
            sums: list[Any] = [total for (total,) in by_image]
        else:
            sums = [torch.cat(parts) for parts in zip(*by_image, strict=True)]  # type: ignore[arg-type]
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


def _split_images(rows: Tensor, images: Sequence[Image]) -> list[Tensor]:
    """Rows of every image, which are as many as it has patches, or a share of that."""
    total = sum(len(image.patches) for image in images)
    return [*rows.split([len(image.patches) * len(rows) // total for image in images])]
