"""Hugging Face weights of the families that hf.py knows into Megatron's models.

Every rank reads its own part of every tensor that its pipeline chunks hold; nothing is sent. Which
tensors make up a parameter is in hf_tensors.py.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from megatron_prefix.errors import UserError, listed, shown
from megatron_prefix.lab.models import hf
from megatron_prefix.lab.models.hf_tensors import (
    HEAD,
    Format,
    Rows,
    Source,
    ahead_apart,
    ahead_as_blocks,
    ahead_as_layer,
    biased_experts,
    delta_by_heads,
    delta_by_piece,
    mamba,
    shapes,
    sources,
)
from megatron_prefix.lab.models.presets import ModelSpec
from megatron_prefix.lab.models.shards import Shards
from megatron_prefix.lab.models.weights import expert_biases, global_name, tensor_split

logger = logging.getLogger(__name__)

# Tables that old releases of transformers saved, and that follow from the config.
_COMPUTED = re.compile(r"\.rotary_emb\.inv_freq$")
# Fields that change no logits, so that a config.json and --model or --set may differ in them.
_FREE = {
    "name", "num_layers", "init_method_std", "max_position", "moe_layer_freq",
    "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff",
    "moe_router_bias_update_rate", "mtp_num_layers", "mtp_hybrid_override_pattern",
}  # fmt: skip


_FORMATS: dict[str, Format] = {
    "qwen3_next": Format(recurrent=delta_by_heads, ahead=ahead_apart),
    "qwen3_5_text": Format(recurrent=delta_by_piece, ahead=ahead_apart),
    "qwen3_5_moe_text": Format(recurrent=delta_by_piece, ahead=ahead_apart),
    "nemotron_h": Format(
        "backbone", "embeddings", "norm_f", mamba, hybrid=True, ahead=ahead_as_blocks
    ),
    "deepseek_v3": Format(layers_unread=True, ahead=ahead_as_layer),
    "glm4_moe_lite": Format(layers_unread=True, ahead=ahead_as_layer),
    "gpt_oss": Format(experts=biased_experts),
}
"""Of families that differ from Llama's and Qwen3's, by `model_type`."""
for _text in ("qwen3_5", "qwen3_5_moe"):  # what sees has them one level deeper
    _FORMATS[_text] = dataclasses.replace(
        _FORMATS[f"{_text}_text"], prefix="model.language_model", unread=r"^mtp\.|^model\.visual\."
    )


def format_of(family: str, given: Collection[str] = ()) -> Format:
    """How a family calls its tensors.

    Args:
        family: `model_type` in config.json.
        given: names of a checkpoint's tensors; some have experts stacked, others not.
    """
    form = _FORMATS.get(family, Format())
    if any(name.endswith(".mlp.experts.gate_up_proj") for name in given):
        return dataclasses.replace(form, experts_stacked=True)
    return form


def check_folder(folder: str | Path) -> None:
    """Refuses what is not a folder, with a UserError."""
    if not os.path.isdir(folder):  # never raises, unlike Path's, for what no path can be
        raise UserError(
            f"{shown(str(folder), 99)}: no such folder; give a Hugging Face checkpoint's"
        )


class HFWeights:
    """The weights in one folder, checked against its config.json and against the model.

    Args:
        folder: a Hugging Face checkpoint: config.json and safetensors.
        spec: the model they are for. It may have fewer layers, which are then the first ones, and
            multi-token prediction, of which config.json says nothing.

    Raises:
        UserError: the folder's files cannot be used, tensors are missing, unknown or of another
            shape, or the model is another one than config.json's.
    """

    def __init__(self, folder: str | Path, spec: ModelSpec) -> None:
        self.folder, self.spec = Path(folder), spec
        check_folder(folder)
        self.whole = hf.load(self.folder)
        _check_same(self.folder, self.whole, spec)
        self._shards = Shards(self.folder)
        self._format = format_of(hf.model_type(self.folder), self._shards.names)
        num = spec.mtp_num_layers or 0
        if num and self._format.ahead(spec, 0) is None:
            raise UserError(
                f"{self.folder}: MTP weights of this model family cannot be read; give --set"
                " mtp_num_layers=none"
            )
        if num and self._format.ahead(spec, num - 1) is None:
            raise UserError(
                f"{self.folder}: this model family has one MTP layer; give --set mtp_num_layers=1"
            )
        further = "mtp_num_layers", "mtp_hybrid_override_pattern"
        given = {name: getattr(spec, name) for name in further}
        self.whole = dataclasses.replace(self.whole, **given)
        self.sources = sources(self.whole, self._format)
        self._copies = self._known_copies()
        self._check_tensors()

    def _known_copies(self) -> dict[str, list[str]]:
        """Tensors that must be what another one is, by that one: the output layer of a model that
        ties it, and what is in a head for multi-token prediction, too."""
        embedding, _, head = self._format.names
        copies: dict[str, list[str]] = {embedding: [], head: []}
        if self.whole.tie_embeddings:
            copies = {embedding: [HEAD]}
        for depth in range(self.whole.mtp_num_layers or 0):
            ahead = self._format.ahead(self.whole, depth)
            for table, copy in zip((embedding, head), (ahead and ahead.copies) or (), strict=False):
                copies[table if table in copies else embedding].append(copy)
        return {one: [c for c in some if c in self._shards.names] for one, some in copies.items()}

    def _check_tensors(self) -> None:
        wanted, given = shapes(self.sources), self._shards.names
        for table, copies in self._copies.items():  # `_check_copies` compares values
            wanted.update(dict.fromkeys(copies, wanted[table]))
        missing = wanted.keys() - given
        extra = {name for name in given - wanted.keys() if not _COMPUTED.search(name)}
        unread = {n for n in extra if self._format.is_unread(n, self.whole.num_layers)}
        if unread:
            _tell_unread(self.folder, len(unread), listed(unread))
        extra -= unread
        for names, problem in ((missing, "missing"), (extra, "unknown")):
            if names:
                raise UserError(
                    f"{self.folder}: {problem} tensors, by config.json: {listed(names)};"
                    " use config.json and safetensors of one checkpoint"
                )
        wrong = {n: shape for n, shape in wanted.items() if self._shards.shape(n) != shape}
        if wrong:
            told = (f"{n} {[*self._shards.shape(n)]} instead of {[*wrong[n]]}" for n in wrong)
            raise UserError(
                f"{self.folder}: tensors whose shape does not fit config.json: {listed(told)};"
                " use config.json and safetensors of one checkpoint"
            )

    def fingerprint(self) -> str:
        """Tells checkpoints of one shape apart: a hash of every norm's weights."""
        digest = hashlib.sha256()
        for name in sorted(self._shards.names):
            shape = self._shards.shape(name)
            if len(shape) == 1 and not _COMPUTED.search(name):
                values = self._shards.read(name, 0, 0, shape[0])
                digest.update(values.double().numpy().tobytes())
        return digest.hexdigest()[:16]

    @torch.no_grad()
    def fill(self, model: Any) -> None:
        """Gives every parameter of one pipeline chunk its values, file by file.

        Args:
            model: a GPTModel (unwrapped) of the spec, on any device.

        Raises:
            UserError: a tied model's own output layer differs from its embedding.
        """
        named: list[tuple[str, torch.Tensor]] = [
            (global_name(model, name), one) for name, one in model.named_parameters()
        ]
        named += expert_biases(model)
        named.sort(key=lambda pair: self._shards.file(self._source(pair[0]).parts[0].name))
        for name, parameter in named:
            dim, rank, size = tensor_split(model, name, parameter)
            source = self._source(name)
            if source.parts[0].name in self._tables:
                values = self._vocabulary(source.parts[0].name, parameter, rank, size)
            else:
                parts = [self._part(one, dim, rank, size) for one in source.parts]
                values = source.join([part.to(parameter.dtype) for part in parts])
            if values.shape != parameter.shape:
                raise ValueError(f"{name}: {values.shape} is not {parameter.shape}")
            parameter.copy_(values)

    @property
    def _tables(self) -> tuple[str, str]:
        """The tensors of embedding and output layer, whose rows are padded."""
        embedding, _, head = self._format.names
        return embedding, head

    def _source(self, name: str) -> Source:
        """Of a parameter, by its `global_name`."""
        if name not in self.sources:
            raise ValueError(f"no Hugging Face tensor is known for parameter {name!r}")
        return self.sources[name]

    def _part(self, rows: Rows, dim: int, rank: int, size: int) -> torch.Tensor:
        """What tensor-parallel rank `rank` of `size` keeps of some rows, cut in `dim`."""
        own = rows.shape if rows.expert is None else rows.shape[1:]
        if rows.transposed:
            own = own[::-1]
        start, stop = rows.start, own[0] if rows.stop is None else rows.stop
        if dim == 1 and (start, stop) != (0, own[0]):
            raise ValueError(f"{rows}: of some rows no columns can be read")
        if dim == 1:
            start, stop = 0, own[1]
        length = (stop - start) // size
        start += rank * length
        if not rows.transposed:
            return self._shards.read(rows.name, dim, start, start + length, rows.expert)
        return self._shards.read(rows.name, 1 - dim, start, start + length, rows.expert).t()

    def _vocabulary(self, name: str, parameter: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """This rank's rows of an embedding or output layer; those that pad it are zeros."""
        rows, vocab = parameter.shape[0], self._shards.shape(name)[0]
        start, stop = min(rank * rows, vocab), min((rank + 1) * rows, vocab)
        values = torch.zeros(parameter.shape, dtype=parameter.dtype)
        if start == stop:
            return values
        present = self._shards.read(name, 0, start, stop)
        self._check_copies(name, present, start, stop)
        values[: stop - start] = present
        if rank == 0 and rows * size > vocab:
            tell_padding(self.folder, vocab, rows * size)
        return values

    def _check_copies(self, name: str, present: torch.Tensor, start: int, stop: int) -> None:
        """Some checkpoints hold the embedding or the output layer twice."""
        for copy in self._copies.get(name, ()):
            if torch.equal(self._shards.read(copy, 0, start, stop), present):
                continue
            if copy != HEAD:
                raise UserError(
                    f"{self.folder}: the tensors {copy} and {name} differ, and Megatron's model has"
                    " one for both; leave MTP out: --set mtp_num_layers=none"
                )
            raise UserError(
                f"{self.folder}: config.json ties the embeddings, but {HEAD} differs from"
                f' {name}; set "tie_word_embeddings": false in config.json'
            )


@functools.cache  # once for all tables and chunks of a process
def tell_padding(folder: Path, vocab: int, padded: int) -> None:
    """Warns that a folder's vocabulary of so many tokens is padded."""
    logger.warning(
        "%s: %d tokens are padded to %d; the softmax counts the padding, whose logits are zero",
        folder, vocab, padded,
    )  # fmt: skip


@functools.cache
def _tell_unread(folder: Path, number: int, names: str) -> None:
    logger.warning(
        "%s: %d tensors are not loaded (vision tower; MTP layers unless mtp_num_layers is set):"
        " %s", folder, number, names,
    )  # fmt: skip


def _check_same(folder: Path, whole: ModelSpec, spec: ModelSpec) -> None:
    """Refuses a model that would compute something else with these weights."""
    wrong = []
    for field in dataclasses.fields(ModelSpec):
        own, other = getattr(whole, field.name), getattr(spec, field.name)
        if field.name not in _FREE and own != other:
            wrong.append(f"{field.name} {other!r} instead of {own!r}")
    if spec.num_layers > whole.num_layers:
        wrong.append(f"num_layers {spec.num_layers} instead of {whole.num_layers}")
    if not wrong and spec.layers != whole.layers[: spec.num_layers]:
        wrong.append("experts in different layers")
    if not wrong and spec.mtp_num_layers and spec.layers[-1] != whole.layers[-1]:
        wrong.append("a different last layer, which the MTP layer copies")
    if wrong:
        raise UserError(
            f"model {spec.name} does not fit {folder / 'config.json'}: {listed(wrong)};"
            " leave out --model, and --set for these fields"
        )
