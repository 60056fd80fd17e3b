"""Random weights that do not depend on the layout.

Every full tensor is drawn from a generator seeded by the seed and the parameter's name in the whole
model; a rank then keeps its tensor-parallel part. So all layouts and both layer specs start from
the same model, and runs can be compared. Values are drawn in float32 on the model's device and
rounded to the parameter's dtype; a GPU draws other numbers than the CPU.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_prefix.features.recurrent.kind import Recurrent
from megatron_prefix.lab.models.presets import ModelSpec

VOCAB_MULTIPLE = 128
"""Embedding tables are padded to a multiple of this and of tp, so padding rarely varies with tp."""

NORM_NOISE = 0.1
"""Norm weights are 1 plus this times a normal number; weights of exactly 1 would hide mistakes."""

SLOW_DECAY = -4.0
"""Mean of A_log: recurrent states then last for some hundred positions. With Megatron's own they
last for a few, and a mistake in what crosses a segment's end would not show."""

_PLAIN = ("mixer.norm.weight", "mixer.D")
"""Of Mamba2, whose own norm Megatron never centers."""

# transformer-engine fuses a norm into the next linear; its names are mapped to the local ones.
_FUSED_NORMS = (
    ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    ("self_attention.linear_q_up_proj.layer_norm_weight", "self_attention.q_layernorm.weight"),
    ("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attention.kv_layernorm.weight"),
    ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    ("self_attention.in_proj.layer_norm_weight", "input_layernorm.weight"),
    ("mixer.in_proj.layer_norm_weight", "norm.weight"),
)


_IN_LAYERS = re.compile(
    r"(?:decoder\.layers\.(\d+)|mtp\.layers\.(\d+)\.(?:transformer|mtp_model)_layer"
    r"(?:\.layers\.(\d+))?)\.(.*)"
)


def padded_vocab(vocab_size: int, tp: int) -> int:
    """The rows of the embedding table: `vocab_size` rounded up for `tp` ranks."""
    multiple = VOCAB_MULTIPLE
    while multiple % tp:
        multiple += VOCAB_MULTIPLE
    return -(-vocab_size // multiple) * multiple


def global_name(model: Any, name: str) -> str:
    """The name of a parameter of one pipeline chunk in the whole model.

    Layers are numbered from 0 over all stages, experts over all expert-parallel ranks. A copy of
    the embedding that serves as output layer on the last stage has the embedding's name.

    Args:
        model: the GPTModel (unwrapped) that holds the parameter.
        name: as `model.named_parameters()` gives it.
    """
    if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    match = _IN_LAYERS.match(name)
    if match is None:
        return name
    layer, prefix = _layer_of(model, match)
    rest = match[4]
    for fused, plain in _FUSED_NORMS:
        if rest == fused:
            rest = plain
    expert = re.match(
        r"mlp\.experts\.(?:local_experts\.(\d+)\.(\w+)|(\w+))\.(weight|bias)(\d*)$", rest
    )
    if expert is not None:
        number = layer.mlp.local_expert_indices[int(expert[1] or expert[5])]
        rest = f"mlp.experts.{number}.{expert[2] or expert[3]}.{expert[4]}"
    return f"{prefix}.{rest}"


def _layer_of(model: Any, match: re.Match[str]) -> tuple[Any, str]:
    """A layer of one pipeline chunk, and its name in the whole model, by a match of `_IN_LAYERS`:
    its number in the decoder, or of multi-token prediction the depth and, in a hybrid model, the
    place in the stack there."""
    number, depth, place = match.groups()[:3]
    if number is not None:
        layer = model.decoder.layers[int(number)]
        return layer, f"decoder.layers.{layer.layer_number - 1}"
    block = model.mtp.layers[int(depth)]
    name = f"mtp.layers.{depth}.transformer_layer"  # its name before 0.17
    layer = getattr(block, "transformer_layer", None) or block.mtp_model_layer
    if place is not None:
        layer, name = layer.layers[int(place)], f"{name}.layers.{place}"
    return layer, name


def global_parameters(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters of one GPTModel (unwrapped), each with its `global_name`."""
    for name, parameter in model.named_parameters():
        yield global_name(model, name), parameter


def expert_biases(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The biases on scores of experts, which are no parameters, each with its `global_name`.

    They are float32 in every model, but a cast of the model casts them, until its first step.
    """
    for name, buffer in model.named_buffers():
        if name.endswith("router.expert_bias"):
            buffer.data = buffer.data.to(torch.float32)
            yield global_name(model, name), buffer


def _generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def tensor_split(model: Any, whole: str, parameter: torch.Tensor) -> tuple[int, int, int]:
    """The dimension that tensor parallelism cuts, this rank's number, and the number of ranks.

    (0, 0, 1) if every rank has the whole parameter.

    Args:
        model: the GPTModel (unwrapped) that holds the parameter.
        whole: its `global_name`.
    """
    group = model.pg_collection.expt_tp if ".experts." in whole else model.pg_collection.tp
    if whole.endswith("softmax_offset"):  # a number a head, which does not say so
        return 0, group.rank(), group.size()
    # Megatron marks transformer-engine's duplicated weights as cut, too (MLA's projections down);
    # but only a weight that every rank has whole sums its gradient over sequence-parallel ranks.
    duplicated = getattr(parameter, "sequence_parallel", False)
    cut = getattr(parameter, "tensor_model_parallel", False) and not duplicated
    if not cut or group.size() == 1:
        return 0, 0, 1
    # Recurrent layers do not say which: it is the first.
    return max(0, parameter.partition_dim), group.rank(), group.size()  # type: ignore[attr-defined]


def local_part(
    full: torch.Tensor, dim: int, rank: int, size: int, pieces: int | Sequence[int] = 1
) -> torch.Tensor:
    """The part of a full tensor that tensor-parallel rank `rank` of `size` keeps.

    Args:
        pieces: the tensor is a concatenation of that many, or of pieces this long, each split by
            itself (2 for the gate and the up projection of SwiGLU).
    """
    if size == 1:
        return full
    whole = full.chunk(pieces, dim) if isinstance(pieces, int) else full.split([*pieces], dim)
    parts = [piece.chunk(size, dim)[rank] for piece in whole]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def pieces_of(spec: ModelSpec, whole: str) -> int | Sequence[int]:
    """See `local_part`, of a parameter by its `global_name`."""
    if "linear_fc1." in whole:
        return 2 if spec.gated_linear_unit else 1
    match = re.match(r"decoder\.layers\.(\d+)\.\w+\.(in_proj\.weight|conv1d)", whole)
    for kind in spec.layers[int(match[1])] if match else ():
        if isinstance(kind, Recurrent):
            shape = kind.shape(spec)
            return shape.convolved if "conv1d" in whole else shape.projected
    return 1


def _draw(full: torch.Tensor, whole: str, spec: ModelSpec, generator: torch.Generator) -> None:
    """Random values for a parameter, by its `global_name`."""
    if whole.endswith(("norm.weight", "mixer.D")):
        centered = spec.layernorm_zero_centered_gamma and not whole.endswith(_PLAIN)
        full.normal_(0.0 if centered else 1.0, NORM_NOISE, generator=generator)
    elif whole.endswith("A_log"):
        full.normal_(SLOW_DECAY, NORM_NOISE, generator=generator)
    elif whole.endswith(("conv1d.weight", "conv1d_weight")):  # the latter since 0.19
        full.normal_(0.0, full.shape[-1] ** -0.5, generator=generator)
    else:
        full.normal_(0.0, spec.init_method_std, generator=generator)


@torch.no_grad()
def fill(model: Any, spec: ModelSpec, seed: int) -> None:
    """Give every parameter of one pipeline chunk its value; biases of experts begin at zero.

    Args:
        model: a GPTModel (unwrapped) of `spec`.
    """
    for name, parameter in model.named_parameters():
        whole = global_name(model, name)
        dim, rank, size = tensor_split(model, whole, parameter)
        shape = list(parameter.shape)
        shape[dim] *= size
        generator = _generator(seed, whole, parameter.device)
        full = torch.empty(shape, dtype=torch.float32, device=parameter.device)
        _draw(full, whole, spec, generator)
        parameter.copy_(local_part(full, dim, rank, size, pieces_of(spec, whole)))
