"""Hugging Face weights of the Llama, Qwen2, Qwen3 and Qwen3-MoE families into Megatron's models.

Every rank reads its own part of every tensor that its pipeline chunks hold; nothing is sent. The
names on one side are those of transformers' LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
and Qwen3MoeForCausalLM, on the other those of `weights.global_name`, the same in every layout and
layer spec. Megatron fuses what transformers keeps apart: in `linear_qkv` the query heads of a group
are followed by its key and its value head, in `linear_fc1` the gate by the up projection.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_prefix.errors import UserError, listed, shown
from megatron_prefix.lab.models import hf
from megatron_prefix.lab.models.presets import ModelSpec
from megatron_prefix.lab.models.shards import Shards
from megatron_prefix.lab.models.weights import global_name, tensor_split

logger = logging.getLogger(__name__)

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_OUTSIDE = {
    "embedding.word_embeddings.weight": _EMBEDDING,
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": _HEAD,
}
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": tuple(f"{name}.weight" for name in _QKV),
    "self_attention.linear_qkv.bias": tuple(f"{name}.bias" for name in _QKV),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.router.weight": ("mlp.gate.weight",),
}
_MLP = {
    "linear_fc1.weight": ("gate_proj.weight", "up_proj.weight"),
    "linear_fc2.weight": ("down_proj.weight",),
}
# Tables that old releases of transformers saved, and that follow from the config.
_COMPUTED = re.compile(r"\.rotary_emb\.inv_freq$")
# Fields that change no logits, so that a config.json and --model or --set may differ in them.
_FREE = {
    "name", "num_layers", "init_method_std", "max_position", "moe_layer_freq",
    "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff",
}  # fmt: skip


def tensors_of(name: str) -> tuple[str, ...]:
    """The Hugging Face tensors that make up one of Megatron's parameters, in their order in it.

    Args:
        name: as `weights.global_name` gives it.
    """
    if name in _OUTSIDE:
        return (_OUTSIDE[name],)
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
    if match is None:
        raise ValueError(f"no Hugging Face tensor is known for parameter {name!r}")
    layer, rest = f"model.layers.{match[1]}", match[2]
    if rest in _LAYER:
        return tuple(f"{layer}.{one}" for one in _LAYER[rest])
    mlp = re.fullmatch(r"(mlp(?:\.experts\.\d+)?)\.(linear_fc[12]\.weight)", rest)
    if mlp is None:
        raise ValueError(f"no Hugging Face tensor is known for parameter {name!r}")
    return tuple(f"{layer}.{mlp[1]}.{one}" for one in _MLP[mlp[2]])


def shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every Hugging Face tensor of a model, with its shape; a tied output layer is not one."""
    hidden, head, vocab = spec.hidden_size, spec.kv_channels, spec.vocab_size or 0
    tensors: dict[str, tuple[int, ...]] = {
        _EMBEDDING: (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.tie_embeddings:
        tensors[_HEAD] = (vocab, hidden)
    queries, keys = spec.num_attention_heads * head, spec.num_query_groups * head
    rows = dict(zip(_QKV, (queries, keys, keys), strict=True))
    attention: dict[str, tuple[int, ...]] = {f"{n}.weight": (r, hidden) for n, r in rows.items()}
    attention["self_attn.o_proj.weight"] = (hidden, queries)
    if spec.add_qkv_bias:
        attention |= {f"{name}.bias": (size,) for name, size in rows.items()}
    norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
    attention |= dict.fromkeys(norms, (hidden,))
    if spec.qk_layernorm:
        names = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
        attention |= dict.fromkeys(names, (head,))
    for layer in range(spec.num_layers):
        every = [*attention.items(), *_mlp_shapes(spec, layer)]
        tensors |= {f"model.layers.{layer}.{name}": shape for name, shape in every}
    return tensors


def _mlp_shapes(spec: ModelSpec, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Of one layer's MLP or of its router and experts."""
    owners, width = ["mlp"], spec.ffn_hidden_size
    if spec.has_experts(layer):
        number, width = spec.num_moe_experts or 0, spec.moe_ffn_hidden_size or 0
        owners = [f"mlp.experts.{expert}" for expert in range(number)]
        yield "mlp.gate.weight", (number, spec.hidden_size)
    for owner in owners:
        yield f"{owner}.gate_proj.weight", (width, spec.hidden_size)
        yield f"{owner}.up_proj.weight", (width, spec.hidden_size)
        yield f"{owner}.down_proj.weight", (spec.hidden_size, width)


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
        spec: the model they are for. It may have fewer layers, which are then the first ones.

    Raises:
        UserError: the folder's files cannot be used, tensors are missing, unknown or of another
            shape, or the model is another one than config.json's.
    """

    def __init__(self, folder: str | Path, spec: ModelSpec) -> None:
        self.folder, self.spec = Path(folder), spec
        check_folder(folder)
        self.whole = hf.load(self.folder)
        if self.whole.recurrent:
            raise UserError(
                f"{self.folder}: weights of recurrent layers cannot be read from Hugging Face"
                " checkpoints; leave --load-hf out, or convert them with Megatron's own tools"
            )
        _check_same(self.folder, self.whole, spec)
        self._shards = Shards(self.folder)
        self._check_tensors()

    def _check_tensors(self) -> None:
        wanted, given = shapes(self.whole), self._shards.names
        if self.whole.tie_embeddings and _HEAD in given:  # a copy; `_check_tied` compares values
            wanted[_HEAD] = wanted[_EMBEDDING]
        missing = wanted.keys() - given
        extra = {name for name in given - wanted.keys() if not _COMPUTED.search(name)}
        for names, problem in ((missing, "missing"), (extra, "unknown")):
            if names:
                raise UserError(
                    f"{self.folder}: {problem} tensors, by its config.json: {listed(names)};"
                    " use the files of one checkpoint"
                )
        wrong = {n: shape for n, shape in wanted.items() if self._shards.shape(n) != shape}
        if wrong:
            told = (f"{n} {[*self._shards.shape(n)]} instead of {[*wrong[n]]}" for n in wrong)
            raise UserError(
                f"{self.folder}: tensors of another shape than config.json's: {listed(told)};"
                " use the files of one checkpoint"
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
        named = [(global_name(model, name), one) for name, one in model.named_parameters()]
        named.sort(key=lambda pair: self._shards.file(tensors_of(pair[0])[0]))
        for name, parameter in named:
            dim, rank, size = tensor_split(model, name, parameter)
            if tensors_of(name)[0] in (_EMBEDDING, _HEAD):
                values = self._vocabulary(tensors_of(name)[0], parameter, rank, size)
            else:
                parts = [self._part(one, dim, rank, size) for one in tensors_of(name)]
                values = self._fused(name, [part.to(parameter.dtype) for part in parts])
            if values.shape != parameter.shape:
                raise ValueError(f"{name}: {values.shape} is not {parameter.shape}")
            parameter.copy_(values)

    def _part(self, name: str, dim: int, rank: int, size: int) -> torch.Tensor:
        """The slice of a tensor that tensor-parallel rank `rank` of `size` keeps."""
        length = self._shards.shape(name)[dim] // size
        return self._shards.read(name, dim, rank * length, (rank + 1) * length)

    def _fused(self, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
        """One parameter of its tensors' parts; q, k and v are interleaved by query group."""
        if "linear_qkv" not in name:
            return torch.cat(parts)
        head = self.spec.kv_channels
        groups = parts[1].shape[0] // head
        rest = parts[0].shape[1:]
        grouped = [part.view(groups, -1, *rest) for part in parts]
        return torch.cat(grouped, 1).reshape(-1, *rest)

    def _vocabulary(
        self, name: str, parameter: torch.nn.Parameter, rank: int, size: int
    ) -> torch.Tensor:
        """This rank's rows of an embedding or output layer; those that pad it are zeros."""
        rows, vocab = parameter.shape[0], self._shards.shape(name)[0]
        start, stop = min(rank * rows, vocab), min((rank + 1) * rows, vocab)
        values = torch.zeros(parameter.shape, dtype=parameter.dtype)
        if start == stop:
            return values
        present = self._shards.read(name, 0, start, stop)
        if name == _EMBEDDING and self.spec.tie_embeddings:
            self._check_tied(present, start, stop)
        values[: stop - start] = present
        if rank == 0 and rows * size > vocab:
            _tell_padding(self.folder, vocab, rows * size)
        return values

    def _check_tied(self, embedding: torch.Tensor, start: int, stop: int) -> None:
        """Some tied checkpoints hold the output layer too; it must be the embedding."""
        if _HEAD in self._shards.names and not torch.equal(
            self._shards.read(_HEAD, 0, start, stop), embedding
        ):
            raise UserError(
                f"{self.folder}: config.json ties the embeddings, but {_HEAD} is not {_EMBEDDING};"
                ' set "tie_word_embeddings": false there'
            )


@functools.cache  # once for all tables and chunks of a process
def _tell_padding(folder: Path, vocab: int, padded: int) -> None:
    logger.warning(
        "%s: %d tokens are padded to %d; the softmax counts the padding, whose logits are zero",
        folder, vocab, padded,
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
        wrong.append("other layers with experts")
    if wrong:
        raise UserError(
            f"model {spec.name} is not that of {folder / 'config.json'}: {listed(wrong)};"
            " leave --model and these fields of --set out"
        )
