"""Bytes that one slot of a layer saves for backward, by its kind.  Pure."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megatron_prefix.features.dsa.kind import DSA
from megatron_prefix.features.experts.kind import Experts, expert_widths
from megatron_prefix.features.mla.kind import MLA, latent_widths
from megatron_prefix.features.mtp.kind import NextToken
from megatron_prefix.features.own_gdn.kind import OwnGatedDeltaNet
from megatron_prefix.features.recurrent.gdn import GatedDeltaNet
from megatron_prefix.features.recurrent.kind import CHUNK, Recurrent
from megatron_prefix.features.recurrent.mamba import CONV_WIDTH, Mamba2
from megatron_prefix.features.windows.kind import Window
from megatron_prefix.lab.predict.execution import Execution
from megatron_prefix.lab.predict.precision import less, projected_bytes
from megatron_prefix.layers.attention import Attention, is_gated
from megatron_prefix.layers.kind import Kind
from megatron_prefix.layers.mlp import MLP, activation_name, can_drop_activation
from megatron_prefix.layers.precision import is_fp8
from megatron_prefix.plan.layer_numbers import Payload


@dataclass(frozen=True)
class SavedPayload(Payload):
    """What a span leaves for its children, and what is saved by the span.

    Attributes:
        initial: saved for a span with a parent, whose payload it begins with.
        edge: saved for any span: its first positions once more.
        batched: saved for a position, not a span, where a batch of spans has a row for each, as
            long as the longest (tree/payload_map.py, `length_batches`); 0 elsewhere.
    """

    initial: float = 0.0
    edge: float = 0.0
    batched: float = 0.0

    @classmethod
    def of_kind(cls, kind: Kind, config: Any, form: Execution, **saved: float) -> SavedPayload:
        payload = kind.payload(config, form.sharding)
        if payload is None:
            raise RuntimeError(f"{kind.name} leaves nothing")
        return cls(payload.form, payload.values, payload.gradients, **saved)


@dataclass(frozen=True)
class LayerMemory:
    """Bytes a position on one rank, without those of the norm in front.

    Attributes:
        inner: saved for the backward of an inner segment.
        wave: the same for a wave, whose payload is not in the sidecar.
        recomputed: by Megatron's selective recomputation during backward.
        unused_output: saved for an inner segment whose output nobody reads, where only the payload
            is computed (layers/blocks/unread.py); None if everything is, in any case.
        read: besides `unused_output`, saved of all positions as soon as one of them is read.
        temporary: peak transient bytes.
        seen: transient bytes a key of an ancestor in a backward.
        payload: what a span leaves; None: nothing.
        tail: transient bytes a row of ancestors' last positions, as often as spans see it.
        keys, keys_grad: K and V as attention sees them, and their sums on context-parallel ranks;
            None: the payload's.
        act: of `inner` and of `wave`, what "recompute_act" drops.
        norm_output: what is kept of the output of the norm in front; None: as it is.
    """

    inner: float
    wave: float
    recomputed: float = 0.0
    unused_output: float | None = None
    read: float = 0.0
    temporary: float = 0.0
    seen: float = 0.0
    payload: SavedPayload | None = None
    tail: float = 0.0
    keys: float | None = None
    keys_grad: float | None = None
    act: float = 0.0
    norm_output: float | None = None


def memory_of(kind: Kind, config: Any, form: Execution) -> LayerMemory:
    """What a layer of a kind takes.

    Args:
        kind: of the slot.
        config: the model's.
        form: how it is computed.

    Raises:
        NotImplementedError: nothing is known of the kind.
    """
    return _memory(kind, config, form)


@functools.singledispatch
def _memory(kind: Kind, config: Any, form: Execution) -> LayerMemory:
    raise NotImplementedError(f"bytes of a layer of kind {kind.name}")


@_memory.register
def of_attention(kind: Attention, config: Any, form: Execution) -> LayerMemory:
    """Of self-attention. A storage that several operators save counts once: K and V of an inner
    segment are in the sidecar."""
    size, wide, heads = form.itemsize, max(4, form.itemsize), config.num_attention_heads
    queries, normed = heads * config.kv_channels / form.tp, bool(config.qk_layernorm)
    keys = max(1, (config.num_query_groups or heads) / form.tp) * config.kv_channels
    projected = queries + 2 * keys  # saved whole by Megatron's norms, and by checkpoints
    lse = heads / form.tp * wide
    ends = queries * size + lse  # the output and its log-sum-exp
    # A gate on the output: its sigmoid in fp32, and the product in front of the projection.
    gate = queries * (size + wide) if is_gated(config) else 0.0
    unused_output = 0.0 if form.fused_rope else 4 * config.kv_channels * size
    # Megatron's local norms keep the whole projection.
    norms_hold = normed and not form.fused_layers
    if norms_hold:
        unused_output += (2 * queries + keys + projected) * size
    elif normed:
        unused_output += (queries + keys) * size  # copies, which the norms keep
    inner = unused_output + queries * size + ends + gate
    wave, recomputed = inner + (1 if norms_hold else 2) * keys * size, 0.0
    if form.recompute == "selective":
        extra = keys * size + (0 if norms_hold else projected * size)
        wave, unused_output = inner + extra, unused_output + extra
        if "core_attn" in form.modules:  # its inputs are saved, in inner segments as in waves
            inner = wave = wave - lse
            recomputed = queries * size + lse
    payload = SavedPayload.of_kind(kind, config, form)
    return LayerMemory(
        inner, wave, recomputed, unused_output, queries * size + ends,
        seen=2 * (queries + keys) * size, payload=payload,
        norm_output=projected_bytes(config, form),
    )  # fmt: skip


@_memory.register
def _of_window(kind: Window, config: Any, form: Execution) -> LayerMemory:
    """An inner segment saves its own K and V as a wave does; K and V of a call, and their
    gradients, are copies."""
    full = of_attention(kind, config, form)
    of = full.payload
    if of is None:
        raise RuntimeError("attention that leaves nothing")
    # Both end to end and span by span; gradients of both, and their sums.
    copies = 3 * of.values + of.gradients
    return replace(
        full, inner=full.wave, seen=0.0, temporary=full.temporary + copies,
        tail=copies, keys=of.values, keys_grad=of.gradients,
    )  # fmt: skip


@_memory.register
def of_latents(kind: MLA, config: Any, form: Execution) -> LayerMemory:
    """Of multi-latent attention. Queries, keys and values are saved by attention, which copies the
    last two; latents by norms and projections. What `mla_up_proj` recomputes is there in a
    backward. Two projections have the same input, of which each makes its own copy in FP8."""
    size, wide = form.itemsize, max(4, form.itemsize)
    heads, (width, value_width) = config.num_attention_heads / form.tp, latent_widths(config)
    expanded = heads * (width - config.qk_pos_emb_head_dim + value_width)
    core_inputs, ends = heads * (2 * width + value_width), heads * value_width
    lse = heads * wide
    ranks = config.kv_lora_rank + (config.q_lora_rank or 0)
    copies = (2 if form.fused_layers else 3) if config.qk_layernorm else 1
    latents = ranks / form.sequence_ranks
    unused_output = (latents * copies + core_inputs) * size - less(latents, config, form)
    inner, recomputed = unused_output + ends * size + lse, 0.0
    if form.selects("core_attn"):  # its inputs are saved
        inner, recomputed = inner - lse, ends * size + lse
    if form.selects("mla_up_proj"):
        inner, recomputed = inner - core_inputs * size, recomputed + core_inputs * size
    keys = heads * (width + value_width)
    return LayerMemory(
        inner, inner, recomputed, min(unused_output, inner),
        temporary=(core_inputs + 2 * ends) * size, seen=(2 * expanded + 2 * keys) * size,
        payload=SavedPayload.of_kind(kind, config, form),
        keys=keys * size, keys_grad=keys * wide,
        norm_output=(2 if is_fp8(config) else 1) * projected_bytes(config, form),
    )  # fmt: skip


@_memory.register
def _of_mlp(kind: MLP, config: Any, form: Execution) -> LayerMemory:
    """It does not run where nobody reads its output."""
    width = config.ffn_hidden_size / form.tp
    numbers = _numbers_between(width, config, form)
    saved = numbers * form.itemsize - less(width, config, form)
    memory = replace(
        saving(saved, numbers, config, form),
        norm_output=projected_bytes(config, form),
        unused_output=0.0,
    )
    layer_input = config.hidden_size / form.sequence_ranks * form.itemsize
    if form.selects("mlp"):  # Megatron keeps its input, and runs it again
        recomputed = memory.inner - layer_input
        return replace(memory, inner=layer_input, wave=layer_input, recomputed=recomputed)
    return replace(memory, act=width * form.itemsize * can_drop_activation(config))


@_memory.register
def _of_experts(kind: Experts, config: Any, form: Execution) -> LayerMemory:
    """Every expert gets a copy of the input and weighs what its second product gets, in the kernel
    of the activation function if there is one; routers save scores, and count all positions.
    Megatron's `recompute_modules` has "mlp" for dense ones, and "moe_act" for the activation
    functions of routed ones.
    What the norm in front gives is in no product alone. All tokens go through shared ones, which
    run first: in a backward what the others save has gone when they run again."""
    width = expert_widths(config)[0] / form.tp
    cut = getattr(config, "expert_tensor_parallel_size", None) or form.tp
    copied, copies = config.hidden_size * cut / form.tp, config.moe_router_topk
    scores = 3 * (config.num_moe_experts or 0) / form.sequence_ranks
    inside = _numbers_between(width, config, form) + width * (not form.fused_activation)
    numbers = copies * (copied + inside) + scores
    narrow = less(copies * (copied + width), config, form)
    memory = saving(numbers * form.itemsize - narrow, numbers, config, form)
    shared = _of_shared(config, form)
    run = memory.inner + shared * (not form.selects("shared_experts"))
    # What activation functions save and give, besides what they get.
    act = copies * (inside - width * (1 + config.gated_linear_unit)) * form.itemsize
    act -= less(copies * width, config, form)
    saved = (run - act * form.selects("moe_act")) * (not form.selects("moe"))
    return replace(memory, inner=saved, wave=saved, recomputed=max(run, shared) - saved)


def _of_shared(config: Any, form: Execution) -> float:
    """Bytes a position that shared experts save, without their input, unless it is gathered outside
    of their product; a gate saves what it is made of, and what it multiplies."""
    _, shared = expert_widths(config)
    if not shared:
        return 0.0
    width = shared / form.tp
    numbers = _numbers_between(width, config, form)
    if getattr(config, "moe_shared_expert_gate", False):
        numbers += config.hidden_size / form.sequence_ranks + 1
    if form.sequence_parallel and getattr(config, "moe_shared_expert_overlap", False):
        numbers += config.hidden_size
    return numbers * form.itemsize - less(width, config, form)


def _numbers_between(width: float, config: Any, form: Execution) -> float:
    """Numbers a position that an MLP of a width saves, without its input."""
    gated = config.gated_linear_unit
    inputs = 2 if gated else 1
    clamped = getattr(config, "activation_func_clamp_value", None) is not None
    if form.fused_activation:  # what is clamped is a tensor of its own
        return width * (inputs * (1 + clamped) + 1)
    # Megatron's quick_gelu saves a sigmoid, too; a ModelSpec has no function, but says so.
    quick = getattr(config, "quick_geglu", False) or activation_name(config) == "quick_gelu"
    return width * (inputs + (3 if gated else 1) + clamped + quick)


def saving(num_bytes: float, numbers: float, config: Any, form: Execution) -> LayerMemory:
    """Of what saves so many bytes a position of so many numbers, and is not recomputed; gradients
    of these are not in FP8."""
    hidden = config.hidden_size / form.sequence_ranks
    return LayerMemory(num_bytes, num_bytes, temporary=(numbers + 2 * hidden) * form.itemsize)


# Recurrent layers --------------------------------------------------------------------------------


class SavedBytes(NamedTuple):
    """Bytes that all tensor-parallel ranks together save; names as of Payload.

    Attributes:
        position: for a position.
        edge: for a span; all context-parallel ranks together, too.
        batched: for a position of a batch of spans.
    """

    position: float
    edge: float
    batched: float = 0.0


def of_recurrent(kind: Recurrent, saved: SavedBytes, config: Any, form: Execution) -> LayerMemory:
    """Of a layer with a state; context-parallel ranks have all positions of a part of the heads."""
    shape, wide = kind.shape(config), max(4, form.itemsize)
    ranks, num_bytes = form.tp * form.cp, saved.position / form.tp
    payload = SavedPayload.of_kind(
        kind, config, form, initial=shape.state * wide / ranks, edge=saved.edge / ranks,
        batched=saved.batched / form.tp,
    )  # fmt: skip
    normed = projected_bytes(config, form)
    return LayerMemory(num_bytes, num_bytes, payload=payload, norm_output=normed)


@_memory.register
def _of_mamba(kind: Mamba2, config: Any, form: Execution) -> LayerMemory:
    """The kernel saves its input, and what it multiplies by the gate
    (`MambaSplitConv1dScanCombinedFn` in mamba-ssm 2.2), in rows that begin with the parent's tail
    and are padded; the gated norm (`LayerNormFn` of mamba-ssm) and, Megatron's own, the output
    projection their inputs."""
    shape = kind.shape(config)
    kernel, values = shape.rows * form.itemsize, shape.values * form.itemsize
    num_bytes = kernel + 2 * values - less(shape.values, config, form)
    saved = SavedBytes(num_bytes, (CONV_WIDTH - 1) * kernel, kernel)
    return of_recurrent(kind, saved, config, form)


@_memory.register
def _of_delta(kind: GatedDeltaNet, config: Any, form: Execution) -> LayerMemory:
    """`edge` is the convolution of a parent's tail and a span's first positions.

    Megatron's module, run as it stands (megatron/core/ssm/gated_delta_net.py, 0.16.1): the output
    norm's input and output, the gate and its SiLU in fp32 (torch.compile may keep less), the output
    projection's input; of alpha its sum with a bias, and its softplus. Megatron's local norms save
    the scaled input, too.

    Its kernels (flash-linear-attention 0.4.2, causal-conv1d 1.5): the convolution its input;
    `L2NormFunction` its output; `ChunkGatedDeltaRuleFunction` queries and keys of every value head,
    values, g, beta, and A, `CHUNK` numbers a head. Norms a number a head, in fp32.

    Since 0.18 the convolution's input is a part of what is projected, and keeps all of it.
    """
    size, shape = form.itemsize, kind.shape(config)
    keys, _, values = shape.convolved
    heads, key_heads = config.linear_num_value_heads, config.linear_num_key_heads
    repeated = 2 * heads * config.linear_key_head_dim if heads > key_heads else 0
    kernels = 2 * keys + values + 2 * keys + repeated + values + heads * CHUNK
    norm = (2 if form.fused_layers else 3) * values
    gates, scales = 2 * values + 3 * heads, heads + 2 * key_heads
    narrow = kernels + norm + values + heads
    narrow += (values + 2 * heads) * form.holds_projection
    num_bytes = narrow * size - less(values, config, form) + (gates + scales) * max(4, size)
    return of_recurrent(kind, SavedBytes(num_bytes, 2 * shape.tail * size), config, form)


@_memory.register
def _of_own_delta(kind: OwnGatedDeltaNet, config: Any, form: Execution) -> LayerMemory:
    """Every rank has all heads of all positions, also in the norm inside, which takes the place of
    the one in front and computes in fp32; its products are torch's own.

    Read from the modules, and from flash-linear-attention 0.4.2: the convolution its input; the
    rule queries and keys of every value head, normalised, values, beta, g, and A; the gated norm
    both inputs; the output projection its input. In fp32 what g is made of, and norms a number a
    head. `edge` as of Megatron's.
    """
    unsplit = replace(form, tp=1, cp=1, sequence_parallel=False)
    size, wide, shape = form.itemsize, max(4, form.itemsize), kind.shape(config)
    heads, (keys, _, values) = config.linear_num_value_heads, shape.convolved
    rule = 2 * heads * config.linear_key_head_dim + values + heads * CHUNK + heads
    narrow = 2 * keys + values + rule + 3 * values
    saved = SavedBytes(narrow * size + 6 * heads * wide, 2 * shape.tail * size)
    numbers = of_recurrent(kind, saved, config, unsplit)
    counted = (2 if form.fused_layers else 3) * size / form.sequence_ranks
    norm = config.hidden_size * (2 * wide + size - counted)
    return replace(numbers, inner=numbers.inner + norm, wave=numbers.wave + norm, norm_output=None)


# Features ----------------------------------------------------------------------------------------


@_memory.register
def _of_sparse(kind: DSA, config: Any, form: Execution) -> LayerMemory:
    """Which keys were chosen instead of a log-sum-exp; scores, as many as pairs, are transient, and
    not counted."""
    full = of_latents(kind, config, form)
    lse = config.num_attention_heads / form.tp * max(4, form.itemsize)
    extra = 4 * config.dsa_indexer_topk - lse
    return replace(full, inner=full.inner + extra, wave=full.wave + extra)


@_memory.register
def _of_next_token(kind: NextToken, config: Any, form: Execution) -> LayerMemory:
    """Without one norm: two more, of which nobody saves the output, and what the projection is
    given, two rows wide."""
    hidden = config.hidden_size / form.sequence_ranks
    local = 0 if form.fused_layers else 2 * hidden + 2  # norms save what they have normed
    numbers = 3 * hidden + local
    saved = numbers * form.itemsize - less(2 * hidden, config, form)
    return saving(saved, numbers, config, form)
