"""Which tensors of a Hugging Face checkpoint make up each of Megatron's parameters.

The names on one side are those of `weights.global_name`, the same in every layout and layer spec,
on the other those of transformers' models. Megatron fuses what transformers keeps apart, and has
what is one tensor there in another order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_prefix.features.recurrent.kind import Recurrent
from megatron_prefix.lab.models.presets import ModelSpec
from megatron_prefix.layers.kind import Slot


class Rows(NamedTuple):
    """Rows of a tensor of a checkpoint.

    name, shape: of the whole tensor.
    start, stop: the rows, of dimension 0; None: to the end.
    """

    name: str
    shape: tuple[int, ...]
    start: int = 0
    stop: int | None = None
    expert: int | None = None
    """Of a stack over experts, which; rows are then those of its own tensor."""
    transposed: bool = False
    """Columns of the stack's tensor are rows of the parameter."""


class Source(NamedTuple):
    """What a parameter is made of: one rank's parts of these rows, joined."""

    parts: tuple[Rows, ...]
    join: Callable[[list[Tensor]], Tensor] = torch.cat


Sources = Iterator[tuple[str, Source]]
"""Names of parameters, and what each is made of."""


def whole(name: str, *shape: int) -> Source:
    """A parameter that is a tensor."""
    return Source((Rows(name, shape),))


def stacked(*tensors: tuple[str, int], width: int) -> Source:
    """A matrix of matrices below each other: names and rows, and the columns of all."""
    return Source(tuple(Rows(name, (rows, width)) for name, rows in tensors))


class Ahead(NamedTuple):
    """Names of a head for multi-token prediction.

    Attributes:
        inner: of its layer, to which those of the layer's tensors are added.
        embedding_norm, hidden_norm, projection, norm: of the tensors around that.
        copies: of tensors that also are the model's embedding and output layer.
    """

    inner: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    copies: tuple[str, str] | None = None


def ahead_as_layer(spec: ModelSpec, depth: int) -> Ahead:
    """DeepSeek-V3 and what has its format: as one more layer each."""
    at = f"model.layers.{spec.num_layers + depth}"
    return Ahead(
        at, f"{at}.enorm.weight", f"{at}.hnorm.weight", f"{at}.eh_proj.weight",
        f"{at}.shared_head.norm.weight",
        (f"{at}.embed_tokens.weight", f"{at}.shared_head.head.weight"),
    )  # fmt: skip


def ahead_apart(_: ModelSpec, depth: int) -> Ahead | None:
    """Qwen3-Next and Qwen3.5, which have one."""
    if depth:
        return None
    return Ahead(
        "mtp.layers.0", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight",
        "mtp.fc.weight", "mtp.norm.weight",
    )  # fmt: skip


def ahead_as_blocks(spec: ModelSpec, depth: int) -> Ahead:
    """Nemotron-H (`mtp_hybrid_override_pattern`): blocks of all depths are numbered in one row;
    what is around a stack is with the first or the last of its blocks."""
    num = len(spec.mtp_hybrid_override_pattern)
    first, last = f"mtp.layers.{depth * num}", f"mtp.layers.{(depth + 1) * num - 1}"
    return Ahead(
        "mtp.layers", f"{first}.enorm.weight", f"{first}.hnorm.weight", f"{first}.eh_proj.weight",
        f"{last}.final_layernorm.weight",
    )  # fmt: skip


@dataclass(frozen=True)
class Format:
    """How a family calls its tensors.

    Attributes:
        prefix: in front of all names but that of the output layer.
        embedding, norm: names of the embedding and of the last norm, behind it.
        recurrent: the tensors of a recurrent layer, from a spec and the layer's name.
        hybrid: a layer is one block, called `mixer`.
        experts_stacked: the experts of a layer are in two tensors, not in two or three each.
        experts: the tensors of router and experts, if they are others than everybody's.
        unread: names of tensors that Megatron's model has no place for: of heads for multi-token
            prediction that it is built without, and of what sees.
        layers_unread: layers behind the last one are such heads, too.
        ahead: the names of such a head, by its depth from 0; None: that family has none there.
    """

    prefix: str = "model"
    embedding: str = "embed_tokens"
    norm: str = "norm"
    recurrent: Callable[[ModelSpec, str], Sources] | None = None
    hybrid: bool = False
    experts_stacked: bool = False
    experts: Callable[[ModelSpec, str], Sources] | None = None
    unread: str = r"^mtp\."
    layers_unread: bool = False
    ahead: Callable[[ModelSpec, int], Ahead | None] = lambda *_: None

    @property
    def names(self) -> tuple[str, str, str]:
        """Of the tensors outside layers: embedding, last norm and output layer."""
        return f"{self.prefix}.{self.embedding}.weight", f"{self.prefix}.{self.norm}.weight", HEAD

    def is_unread(self, name: str, num_layers: int) -> bool:
        """Whether a tensor is left out on purpose; `num_layers` of the checkpoint's model."""
        if re.search(self.unread, name):
            return True
        layer = re.match(rf"{re.escape(self.prefix)}\.layers\.(\d+)\.", name)
        return self.layers_unread and layer is not None and int(layer[1]) >= num_layers


HEAD = "lm_head.weight"


def sources(spec: ModelSpec, form: Format) -> dict[str, Source]:
    """Every parameter of a model, by its `weights.global_name`; a tied output layer is none."""
    vocab, hidden = spec.vocab_size or 0, spec.hidden_size
    embedding, norm, head = form.names
    last = "final_norm" if form.hybrid else "final_layernorm"
    found = {
        "embedding.word_embeddings.weight": whole(embedding, vocab, hidden),
        f"decoder.{last}.weight": whole(norm, hidden),
    }
    if not spec.tie_embeddings:
        found["output_layer.weight"] = whole(head, vocab, hidden)
    for layer in range(spec.num_layers):
        at = f"{form.prefix}.layers.{layer}"
        for name, source in (_block if form.hybrid else _layer)(spec, form, layer, at):
            found[f"decoder.layers.{layer}.{name}"] = source
    for depth in range(spec.mtp_num_layers or 0):
        if own := form.ahead(spec, depth):
            parts = _ahead(spec, form, own, depth)
            found |= {f"mtp.layers.{depth}.{name}": source for name, source in parts}
    return found


def _ahead(spec: ModelSpec, form: Format, own: Ahead, depth: int) -> Sources:
    """Of multi-token prediction, whose layer is as the model's last, or in a hybrid model a stack;
    both sides put the embedding in front of the hidden states."""
    hidden = spec.hidden_size
    yield "enorm.weight", whole(own.embedding_norm, hidden)
    yield "hnorm.weight", whole(own.hidden_norm, hidden)
    yield "eh_proj.weight", whole(own.projection, hidden, 2 * hidden)
    yield "final_layernorm.weight", whole(own.norm, hidden)
    if not form.hybrid:
        for name, source in _layer(spec, form, spec.num_layers - 1, own.inner):
            yield f"transformer_layer.{name}", source
        return
    symbols = spec.mtp_hybrid_override_pattern
    stack = replace(
        spec, num_layers=len(symbols), hybrid_override_pattern=symbols, mtp_num_layers=None,
        mtp_hybrid_override_pattern="",
    )  # fmt: skip
    for place in range(len(symbols)):
        at = f"{own.inner}.{depth * len(symbols) + place}"
        for name, source in _block(stack, form, place, at):
            yield f"transformer_layer.layers.{place}.{name}", source


def shapes(found: dict[str, Source]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint, with its shape."""
    return {rows.name: rows.shape for source in found.values() for rows in source.parts}


def _layer(spec: ModelSpec, form: Format, layer: int, at: str) -> Sources:
    """Attention or a recurrent mixer, and an MLP or experts."""
    hidden = spec.hidden_size
    yield "input_layernorm.weight", whole(f"{at}.input_layernorm.weight", hidden)
    yield "pre_mlp_layernorm.weight", whole(f"{at}.post_attention_layernorm.weight", hidden)
    if form.recurrent and any(isinstance(kind, Recurrent) for kind in spec.layers[layer]):
        yield from form.recurrent(spec, f"{at}.linear_attn")
    else:
        attention = _latent if spec.multi_latent_attention else _attention
        yield from attention(spec, f"{at}.self_attn")
    if spec.has_experts(layer):
        yield from _experts(spec, form, f"{at}.mlp")
    else:
        yield from _mlp(spec, f"{at}.mlp", "mlp", spec.ffn_hidden_size)


def _block(spec: ModelSpec, form: Format, layer: int, at: str) -> Sources:
    """One block of a hybrid model."""
    [kind] = spec.layers[layer]
    mixer, norm = f"{at}.mixer", whole(f"{at}.norm.weight", spec.hidden_size)
    if form.recurrent and isinstance(kind, Recurrent):
        yield "norm.weight", norm
        yield from form.recurrent(spec, mixer)
    elif kind.slot is Slot.MIXER:
        yield "input_layernorm.weight", norm
        yield from _attention(spec, mixer)
    else:
        yield "pre_mlp_layernorm.weight", norm
        if spec.has_experts(layer):
            yield from _experts(spec, form, mixer)
        else:
            yield from _mlp(spec, mixer, "mlp", spec.ffn_hidden_size)


# Attention ----------------------------------------------------------------------------------------


def _attention(spec: ModelSpec, at: str) -> Sources:
    """Of a query group Megatron has its query heads, their gates, its key and its value head."""
    head, hidden, gates = spec.kv_channels, spec.hidden_size, spec.attention_output_gate
    queries, keys = spec.num_attention_heads * head, spec.num_query_groups * head
    rows = (("q_proj", queries * (2 if gates else 1)), ("k_proj", keys), ("v_proj", keys))
    join = partial(_grouped, head=head, gates=gates)
    weights = stacked(*((f"{at}.{name}.weight", size) for name, size in rows), width=hidden)
    yield "self_attention.linear_qkv.weight", weights._replace(join=join)
    if spec.add_qkv_bias or spec.add_bias_linear:
        biases = tuple(Rows(f"{at}.{name}.bias", (size,)) for name, size in rows)
        yield "self_attention.linear_qkv.bias", Source(biases, join)
    if spec.add_bias_linear:
        yield "self_attention.linear_proj.bias", whole(f"{at}.o_proj.bias", hidden)
    if spec.softmax_type == "learnable":
        sinks = whole(f"{at}.sinks", spec.num_attention_heads)
        yield "self_attention.core_attention.softmax_offset", sinks
    yield "self_attention.linear_proj.weight", whole(f"{at}.o_proj.weight", hidden, queries)
    if spec.qk_layernorm:
        yield "self_attention.q_layernorm.weight", whole(f"{at}.q_norm.weight", head)
        yield "self_attention.k_layernorm.weight", whole(f"{at}.k_norm.weight", head)


def _grouped(parts: list[Tensor], head: int, gates: bool) -> Tensor:
    """Rows of queries, keys and values -> by query group; a gate comes behind each query head, and
    then behind those of the group."""
    groups, rest = parts[1].shape[0] // head, parts[0].shape[1:]
    if gates:
        split = parts[0].view(groups, -1, 2, head, *rest)
        parts = [split.transpose(1, 2), *parts[1:]]
    grouped = [part.reshape(groups, -1, *rest) for part in parts]
    return torch.cat(grouped, 1).reshape(-1, *rest)


def _latent(spec: ModelSpec, at: str) -> Sources:
    """Multi-latent attention: the same tensors by other names. Both sides turn neighbours, whose
    order in the weights is the same."""
    heads, hidden, latent = spec.num_attention_heads, spec.hidden_size, spec.kv_lora_rank
    queries = heads * (spec.qk_head_dim + spec.qk_pos_emb_head_dim)
    tensors = {
        "linear_kv_down_proj": ("kv_a_proj_with_mqa", (latent + spec.qk_pos_emb_head_dim, hidden)),
        "kv_layernorm": ("kv_a_layernorm", (latent,)),
        "linear_kv_up_proj": ("kv_b_proj", (heads * (spec.qk_head_dim + spec.v_head_dim), latent)),
        "linear_proj": ("o_proj", (hidden, heads * spec.v_head_dim)),
    }
    if spec.q_lora_rank is None:
        tensors["linear_q_proj"] = ("q_proj", (queries, hidden))
    else:
        tensors["linear_q_down_proj"] = ("q_a_proj", (spec.q_lora_rank, hidden))
        tensors["q_layernorm"] = ("q_a_layernorm", (spec.q_lora_rank,))
        tensors["linear_q_up_proj"] = ("q_b_proj", (queries, spec.q_lora_rank))
    for ours, (theirs, shape) in tensors.items():
        yield f"self_attention.{ours}.weight", whole(f"{at}.{theirs}.weight", *shape)


# Recurrent layers ---------------------------------------------------------------------------------


def _pieces(name: str, sizes: tuple[int, ...], *rest: int) -> Source:
    """Pieces of one tensor, of which a rank has its part of each."""
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    shape = (ends[-1], *rest)
    return Source(
        tuple(Rows(name, shape, end - size, end) for size, end in zip(sizes, ends, strict=True))
    )


def _delta(spec: ModelSpec, at: str, projected: Source) -> Sources:
    """GatedDeltaNet, of which families have the input projection in different tensors. Its norm is
    never centered there, in Megatron it is as all are."""
    heads, keys = spec.linear_num_value_heads, spec.linear_num_key_heads * spec.linear_key_head_dim
    values, width = heads * spec.linear_value_head_dim, spec.linear_conv_kernel_dim
    norm = whole(f"{at}.norm.weight", spec.linear_value_head_dim)
    if spec.layernorm_zero_centered_gamma:
        norm = norm._replace(join=_less_one)
    own = "self_attention"
    yield f"{own}.in_proj.weight", projected
    convolved = _pieces(f"{at}.conv1d.weight", (keys, keys, values), 1, width)
    yield f"{own}.conv1d.weight", convolved
    yield f"{own}.conv1d_weight", convolved  # since 0.19
    yield f"{own}.dt_bias", whole(f"{at}.dt_bias", heads)
    yield f"{own}.A_log", whole(f"{at}.A_log", heads)
    yield f"{own}.out_norm.weight", norm
    yield f"{own}.out_proj.weight", whole(f"{at}.out_proj.weight", spec.hidden_size, values)


def _less_one(parts: list[Tensor]) -> Tensor:
    return parts[0] - 1


def delta_by_heads(spec: ModelSpec, at: str) -> Sources:
    """Qwen3-Next: the projection in two tensors, each by key heads: queries, keys, values and gate,
    and beta and alpha."""
    heads, key_heads = spec.linear_num_value_heads, spec.linear_num_key_heads
    keys, values = key_heads * spec.linear_key_head_dim, heads * spec.linear_value_head_dim
    first, second = 2 * keys + 2 * values, 2 * heads
    tensors = (f"{at}.in_proj_qkvz.weight", first), (f"{at}.in_proj_ba.weight", second)
    each = [size // key_heads for size in (keys, keys, values, values, heads, heads)]
    projected = stacked(*tensors, width=spec.hidden_size)
    return _delta(spec, at, projected._replace(join=partial(_by_piece, sizes=each)))


def _by_piece(parts: list[Tensor], sizes: list[int]) -> Tensor:
    """Rows by key head -> by piece; `sizes` of one head's pieces, the first four in one tensor."""
    split = []
    for part, own in zip(parts, (sizes[:4], sizes[4:]), strict=True):
        split += part.view(-1, sum(own), part.shape[1]).split(own, 1)
    return torch.cat([piece.flatten(0, 1) for piece in split])


def delta_by_piece(spec: ModelSpec, at: str) -> Sources:
    """Qwen3.5: the projection in Megatron's order, in four tensors."""
    heads, hidden = spec.linear_num_value_heads, spec.hidden_size
    keys, values = (
        spec.linear_num_key_heads * spec.linear_key_head_dim,
        heads * spec.linear_value_head_dim,
    )
    first = _pieces(f"{at}.in_proj_qkv.weight", (keys, keys, values), hidden)
    rest = ("in_proj_z", values), ("in_proj_b", heads), ("in_proj_a", heads)
    more = stacked(*((f"{at}.{name}.weight", size) for name, size in rest), width=hidden)
    return _delta(spec, at, Source(first.parts + more.parts))


def mamba(spec: ModelSpec, at: str) -> Sources:
    """Mamba2 of Nemotron-H, whose tensors Megatron has, too."""
    heads, hidden = spec.mamba_num_heads or 0, spec.hidden_size
    values = heads * spec.mamba_head_dim
    groups = spec.mamba_num_groups * spec.mamba_state_dim
    convolved = (values, groups, groups)
    projected = _pieces(f"{at}.in_proj.weight", (values, *convolved, heads), hidden)
    yield "mixer.in_proj.weight", projected
    for dot in ".", "_":  # since 0.19
        yield f"mixer.conv1d{dot}weight", _pieces(f"{at}.conv1d.weight", convolved, 1, 4)
        yield f"mixer.conv1d{dot}bias", _pieces(f"{at}.conv1d.bias", convolved)
    for name in ("dt_bias", "A_log", "D"):
        yield f"mixer.{name}", whole(f"{at}.{name}", heads)
    yield "mixer.norm.weight", whole(f"{at}.norm.weight", values)
    yield "mixer.out_proj.weight", whole(f"{at}.out_proj.weight", hidden, values)


# MLPs and experts ---------------------------------------------------------------------------------


def _mlp(spec: ModelSpec, at: str, own: str, width: int) -> Sources:
    """An MLP or an expert, called `own`; the gate is in front of the up projection."""
    names = ("gate_proj", "up_proj") if spec.gated_linear_unit else ("up_proj",)
    rows = ((f"{at}.{name}.weight", width) for name in names)
    yield f"{own}.linear_fc1.weight", stacked(*rows, width=spec.hidden_size)
    yield f"{own}.linear_fc2.weight", whole(f"{at}.down_proj.weight", spec.hidden_size, width)


def _experts(spec: ModelSpec, form: Format, at: str) -> Sources:
    if form.experts:
        yield from form.experts(spec, at)
        return
    number, hidden = spec.num_moe_experts or 0, spec.hidden_size
    yield "mlp.router.weight", whole(f"{at}.gate.weight", number, hidden)
    if spec.moe_router_enable_expert_bias:
        yield "mlp.router.expert_bias", whole(f"{at}.gate.e_score_correction_bias", number)
    width, shared = spec.moe_ffn_hidden_size or 0, spec.moe_shared_expert_intermediate_size
    for expert in range(number):
        own = f"mlp.experts.{expert}"
        if form.experts_stacked:
            yield from _of_stack(f"{at}.experts", own, expert, (number, width, hidden))
        else:
            yield from _mlp(spec, f"{at}.experts.{expert}", own, width)
    if shared:
        name = "shared_expert" if spec.moe_shared_expert_gate else "shared_experts"
        yield from _mlp(spec, f"{at}.{name}", "mlp.shared_experts", shared)
    if shared and spec.moe_shared_expert_gate:
        yield "mlp.shared_experts.gate_weight", whole(f"{at}.shared_expert_gate.weight", 1, hidden)


def _of_stack(at: str, own: str, expert: int, sizes: tuple[int, int, int]) -> Sources:
    """One of a stack of experts with gates; `sizes`: experts, width, hidden size."""
    number, width, hidden = sizes
    rows = Rows(f"{at}.gate_up_proj", (number, 2 * width, hidden), expert=expert)
    halves = rows._replace(stop=width), rows._replace(start=width)
    yield f"{own}.linear_fc1.weight", Source(halves)
    down = Rows(f"{at}.down_proj", (number, hidden, width), expert=expert)
    yield f"{own}.linear_fc2.weight", Source((down,))


def biased_experts(spec: ModelSpec, at: str) -> Sources:
    """Of gpt-oss: stacks of transposed matrices, a row of the gate before each of the up
    projection, and biases."""
    number, hidden, width = (
        spec.num_moe_experts or 0,
        spec.hidden_size,
        spec.moe_ffn_hidden_size or 0,
    )
    yield "mlp.router.weight", whole(f"{at}.router.weight", number, hidden)
    yield "mlp.router.bias", whole(f"{at}.router.bias", number)
    up, down = f"{at}.experts.gate_up_proj", f"{at}.experts.down_proj"
    for expert in range(number):
        own = f"mlp.experts.{expert}"
        pairs = Rows(up, (number, hidden, 2 * width), expert=expert, transposed=True)
        yield f"{own}.linear_fc1.weight", Source((pairs,), _halves)
        biases = Rows(f"{up}_bias", (number, 2 * width), expert=expert)
        yield f"{own}.linear_fc1.bias", Source((biases,), _halves)
        outputs = Rows(down, (number, width, hidden), expert=expert, transposed=True)
        yield f"{own}.linear_fc2.weight", Source((outputs,))
        yield (
            f"{own}.linear_fc2.bias",
            Source((Rows(f"{down}_bias", (number, hidden), expert=expert),)),
        )


def _halves(parts: list[Tensor]) -> Tensor:
    """Every second row, and then the others."""
    return torch.cat([parts[0][::2], parts[0][1::2]])
