"""The tensors of a folder of safetensors files, read slice by slice.

`model.safetensors`, or `model.safetensors.index.json` and the files it names: the format of Hugging
Face checkpoints. Names, shapes and dtypes come from the files' headers; values are read by `read`
only, and of those only the slice that is asked for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from megatron_prefix.errors import UserError, listed
from megatron_prefix.plan.files import read_text

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
CAST = ("F64", "F32", "F16", "BF16")
"""Dtypes, by their names in a header, whose values a model's parameters can take."""


class Shards:
    """The tensors of one folder, by name.

    Raises:
        UserError: no safetensors, the package is not installed, a file is missing or damaged, the
            index is wrong, or a dtype cannot be cast.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        index = self._index()
        self.files = set(index.values()) if index is not None else {ONE}
        self._check_files()
        self._slices: dict[str, Any] = {}
        self._places: dict[str, str] = {}
        for name in sorted(self.files):
            self._open(name)
        if index is not None and index != self._places:
            names = {n for n in {*index, *self._places} if index.get(n) != self._places.get(n)}
            raise UserError(
                f"{self.folder}: {INDEX} and the files do not agree on where tensors are:"
                f" {listed(names)}; download the folder again"
            )
        self._check_dtypes()

    @property
    def names(self) -> set[str]:
        """Of all tensors."""
        return set(self._places)

    def file(self, name: str) -> str:
        """The file that holds a tensor."""
        return self._places[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""
        return tuple(self._slices[name].get_shape())

    def read(
        self, name: str, dim: int, start: int, stop: int, member: int | None = None
    ) -> torch.Tensor:
        """Elements `start` to `stop` of one dimension (0 or 1) of a tensor, on the host, or of a
        member of a stack of tensors."""
        part = (slice(None),) * dim + (slice(start, stop),)
        values: torch.Tensor = self._slices[name][part if member is None else (member, *part)]
        return values

    def _index(self) -> dict[str, str] | None:
        """Which file holds each tensor; None if there is no index."""
        path = self.folder / INDEX
        if not path.is_file():
            return None
        try:
            files = json.loads(read_text(path))["weight_map"]
            fine = all(Path(name).name == name for name in files.values())
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            fine = False
        if not fine or not files:
            raise UserError(
                f"{path} is not an index of safetensors files; download the folder again"
            )
        return dict(files)

    def _check_files(self) -> None:
        missing = {name for name in self.files if not (self.folder / name).is_file()}
        if missing == {ONE}:
            raise UserError(
                f"{self.folder} holds neither {ONE} nor {INDEX}; give the folder of a Hugging Face"
                " checkpoint that was saved as safetensors"
            )
        if missing:
            raise UserError(
                f"{self.folder}: files that {INDEX} names are missing: {listed(missing)};"
                " download them"
            )

    def _open(self, name: str) -> None:
        """Takes in the header of one file, which stays mapped while its slices are held."""
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise UserError(
                "reading Hugging Face weights needs safetensors: pip install safetensors"
            ) from None
        try:
            file = safe_open(self.folder / name, framework="pt")
        except (SafetensorError, OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"{self.folder / name} cannot be read as safetensors ({reason}); download it again"
            ) from None
        for tensor in file.keys():  # noqa: SIM118  # it is not a dict
            self._slices[tensor] = file.get_slice(tensor)
            self._places[tensor] = name

    def _check_dtypes(self) -> None:
        wrong = {name for name, one in self._slices.items() if one.get_dtype() not in CAST}
        if wrong:
            kinds = sorted({self._slices[name].get_dtype() for name in wrong})
            raise UserError(
                f"{self.folder}: tensors of dtype {', '.join(kinds)}, which is not read:"
                f" {listed(wrong)}; save the model in one of {', '.join(CAST)}"
            )
