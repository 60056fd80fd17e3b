"""How towers are called: what of a call belongs to which image or clip, and what they return.

A form takes a call apart into images, runs the tower for some of them, and puts what they have got
together as the tower itself returns it.  Rows are those of every image, one tensor for each that
the tower returns, [rows, ...].
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import (
    _pytree as pytree,  # torch's own; torch.utils.pytree is not public before 2.9
)

Stock = Callable[..., Any]


class Item(NamedTuple):
    """One image of a call, or one clip.

    Attributes:
        patches: of it, [n, ...]; of a clip its frames.
        sizes: numbers of which its rows also depend.
        more: arguments of a call for it alone, besides.
    """

    patches: Tensor
    sizes: tuple[int, ...]
    more: Mapping[str, Any]


class Images:
    """(patches [n, ...], grids [images, 3]) -> a tree of rows, or a list of those of every image.

    Args:
        grids: the argument's name.
        apart: whether frames of a video see themselves alone: [t, h, w] is t images.
        listed: whether it returns a list.
    """

    alone = False
    """Whether the tower runs for each image alone: how many rows it has, nothing else says."""

    def __init__(self, grids: str, apart: bool = True, listed: bool = False) -> None:
        self._grids, self._apart, self._listed = grids, apart, listed
        self._structure: Any = None
        self._plain: list[Any] = []  # what a call returns; `Tensor` for each tensor

    def items(self, arguments: Mapping[str, Any]) -> list[Item] | None:
        """Those of a call; None if it is called otherwise."""
        others = {name: value for name, value in arguments.items() if name != self._grids}
        patches = [value for value in others.values() if value is not None]
        grids = arguments.get(self._grids)
        if grids is None or len(patches) != 1 or not isinstance(patches[0], Tensor):
            return None
        if self._apart:
            grids = grids.repeat_interleave(grids[:, 0], 0)
            grids[:, 0] = 1  # some models join images of one size, as if they were a video
        parts = patches[0].detach().split(grids.prod(-1).tolist())
        return [
            Item(part, tuple(grid.tolist()), {self._grids: grid})
            for part, grid in zip(parts, grids, strict=True)
        ]

    def run(self, stock: Stock, items: Sequence[Item]) -> Any:
        """What the tower returns for some images."""
        grids = torch.stack([item.more[self._grids] for item in items])
        return stock(torch.cat([item.patches for item in items]), **{self._grids: grids})

    def leaves(self, output: Any) -> list[Tensor]:
        """The tensors of rows in what the tower returns."""
        return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]

    def rows(self, output: Any, items: Sequence[Item]) -> list[list[Tensor]]:
        """Of every image: as many as it has patches, or a share of that."""
        if self._listed:
            return [[rows] for rows in output]
        leaves, self._structure = pytree.tree_flatten(output)
        self._plain = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        counts = [len(item.patches) for item in items]
        shares = [
            leaf.split([count * len(leaf) // sum(counts) for count in counts])
            for leaf in self.leaves(output)
        ]
        return [[*parts] for parts in zip(*shares, strict=True)]

    def joined(self, rows: list[Tensor], lengths: Sequence[int], items: Sequence[Item]) -> Any:
        """What the tower returns for the images of a call.

        Args:
            rows: of all of them.
            lengths: rows of each.
            items: the call's images.
        """
        if self._listed:
            return [*rows[0].split(lengths)]
        remaining = iter(rows)
        leaves = [next(remaining) if leaf is Tensor else leaf for leaf in self._plain]
        return pytree.tree_unflatten(leaves, self._structure)

    def gradients(self, by_image: list[list[Tensor]]) -> list[Tensor]:
        """Those of `leaves`, of the gradients of every image's rows."""
        if self._listed:
            return [gradient for (gradient,) in by_image]
        return [torch.cat(parts) for parts in zip(*by_image, strict=True)]


class Clips(Images):
    """Sound: (features [bins, frames of all clips], lengths [clips]) -> a tree of rows.

    Chunks of all clips are padded to the longest of a call.

    Args:
        tower: says how long a chunk is.
        masked: whether padding is out of the way; else rows depend on how much there is.
    """

    alone = True

    def __init__(self, tower: Any, masked: bool) -> None:
        super().__init__("feature_lens", apart=False)
        self._longest = 0 if masked else 2 * tower.n_window

    def items(self, arguments: Mapping[str, Any]) -> list[Item] | None:
        """See Images.  What follows from the lengths goes along."""
        features, lengths = arguments.get("input_features"), arguments.get("feature_lens")
        further = arguments.keys() - {"input_features", "feature_lens", "aftercnn_lens"}
        if features is None or lengths is None or any(map(arguments.get, further)):
            return None
        frames = lengths.tolist()
        if self._longest and len({min(num, self._longest) for num in frames}) > 1:
            return None
        given = [{"feature_lens": length[None]} for length in lengths]
        if (derived := arguments.get("aftercnn_lens")) is not None:
            for own, number in zip(given, derived, strict=True):
                own["aftercnn_lens"] = number[None]
        parts = features.detach().T.split(frames)
        return [Item(part, (len(part),), own) for part, own in zip(parts, given, strict=True)]

    def run(self, stock: Stock, items: Sequence[Item]) -> Any:
        """See Images."""
        (item,) = items
        return stock(item.patches.T, **item.more)


class Pixels(Images):
    """Nemotron Omni's: (pixels [frames, 3, height, width] or patches [1, n, ...], sizes of every
    frame) -> rows of all; a video's frames are seen together.

    Args:
        model: whose method it is; it says how large a patch is.
    """

    alone = True

    def __init__(self, model: Any) -> None:
        super().__init__("imgs_sizes", apart=False)
        self._side = model.patch_dim
        self._joins_frames = model.vision_model.temporal_patch_dim > 1

    def items(self, arguments: Mapping[str, Any]) -> list[Item] | None:
        """See Images.  Pixels behind a frame's own are padding, which nobody reads."""
        images, sizes = arguments["images"].detach(), arguments.get("imgs_sizes")
        frames = arguments.get("num_frames")
        if not isinstance(sizes, Tensor) or images.dim() not in (3, 4):
            return None
        if frames is None and self._joins_frames:
            return None
        known = sizes.tolist()  # the host waits once
        counts = [1] * len(known)
        if frames is not None and self._joins_frames:
            counts = [*map(int, frames)]
        if sum(counts) != len(known):
            return None
        starts = [*itertools.accumulate(counts, initial=0)][:-1]
        own = [known[start : start + num] for start, num in zip(starts, counts, strict=True)]
        if any(size != every[0] for every in own for size in every):
            return None
        if images.dim() == 4:
            parts = [
                part[..., :h, :w]
                for part, [(h, w), *_] in zip(images.split(counts), own, strict=True)
            ]
        else:
            numbers = [len(every) * math.prod(n // self._side for n in every[0]) for every in own]
            parts = [part[None] for part in images[0].split(numbers)]
        return [
            Item(part, tuple(every[0]), {"imgs_sizes": size, "num_frames": [num]})
            for part, every, size, num in zip(parts, own, sizes.split(counts), counts, strict=True)
        ]

    def run(self, stock: Stock, items: Sequence[Item]) -> Any:
        """See Images."""
        (item,) = items
        return stock(item.patches, vision_packed_seq_params=None, **item.more)
