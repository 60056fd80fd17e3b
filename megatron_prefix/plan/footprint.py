"""Bytes of device memory that a position of a segment takes on one rank.  Pure.

Counts what Megatron-Core's layers save for backward. With transformer-engine's layers a norm saves
its input and output, the gated activation its input, every matrix product its input; Megatron's
local, unfused layers save more. A storage that several operators save counts once. ("Reducing
Activation Recomputation in Large Transformer Models", section 4.1, counts another layer likewise.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megatron_prefix.plan.layer_mix import LayerMix
from megatron_prefix.plan.recurrent_spec import GatedDelta, Recurrent


class OfStates(NamedTuple):
    """Bytes a span in one recurrent layer on one rank.

    Attributes:
        state: an inner span's states in the sidecar.
        state_grad: their gradients there.
        initial: saved for a span with a parent, whose state it begins with.
        edge: saved for any span: its first positions once more.
        batched: saved for a position, not a span, where a batch of spans has a row for each, as
            long as the longest (tree/payload_map.py, `batches`); 0 elsewhere.
    """

    state: float
    state_grad: float
    initial: float = 0.0
    edge: float = 0.0
    batched: float = 0.0


@dataclass(frozen=True)
class Execution:
    """How a model is computed: by default in bf16, by transformer-engine's fused layers.

    Attributes:
        itemsize: bytes of a number.
        num_stages: pipeline size times virtual stages.
        tp, cp, sequence_parallel: the layout.
        fused_layers: transformer-engine's layers, else Megatron's local ones.
        fused_activation, fused_rope, fused_loss: whether these are one kernel each.
        recompute: "none", "full" or "selective".
        method, num_layers, modules: Megatron's options of recomputation.
        keeps_outputs: see `Footprint`.
    """

    itemsize: int = 2
    num_stages: int = 1
    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    fused_layers: bool = True
    fused_activation: bool = True
    fused_rope: bool = True
    fused_loss: bool = True
    recompute: str = "none"
    method: str = "uniform"
    num_layers: int = 1
    modules: tuple[str, ...] = ("core_attn",)
    keeps_outputs: bool = True

    @classmethod
    def of_config(cls, config: Any, recomputes: bool = True) -> Execution:
        """Of a TransformerConfig; `recomputes`: whether the model follows its
        `recompute_granularity` "full"."""
        recompute = config.recompute_granularity or "none"
        stages = config.virtual_pipeline_model_parallel_size or 1
        return cls(
            config.params_dtype.itemsize, stages * config.pipeline_model_parallel_size,
            config.tensor_model_parallel_size, config.context_parallel_size,
            bool(config.sequence_parallel), config.transformer_impl == "transformer_engine",
            bool(config.bias_activation_fusion), bool(config.apply_rope_fusion),
            bool(config.cross_entropy_loss_fusion),
            recompute if recomputes or recompute != "full" else "none",
            config.recompute_method or "", config.recompute_num_layers or 1,
            tuple(config.recompute_modules or ()), not config.deallocate_pipeline_outputs,
        )  # fmt: skip


@dataclass(frozen=True)
class Footprint:
    """Bytes a position on one rank.

    Attributes:
        inner: saved by one layer for the backward of an inner segment.
        wave: the same for a wave, whose K/V are not in the sidecar.
        unread: saved by the last layer for an inner segment without loss: only K and V are
            computed (megatron_prefix/layers/blocks/unread.py).
        again: recomputed by Megatron's own recomputation during backward.
        kv: K/V in the sidecar, one layer with attention.
        kv_grad: gK/gV in the sidecar, one layer with attention.
        attention: queries and attention's output, which the last layer saves of all positions as
            soon as one of them is read.
        norm: saved after the last layer, without a loss.
        head: saved after the last layer, with a loss: norm, logits, cross entropy.
        stage_input: received by a stage; a stage sends as much.
        temporary: peak transient bytes of one layer.
        seen: transient bytes a key of an ancestor in one layer's backward.
        head_temporary: peak transient bytes of the output layer.
        head_weight: gradient of the output layer's weight, transient; bytes in all, not a position.
        num_layers: layers of a model chunk.
        parts: context-parallel ranks, which share the positions.
        mixers: of every stage (plan/layer_mix.py).
        host_layers: see PrefixConfig.cache_host_layers.
        states: of recurrent layers, by their symbols.
        shares: into how many parts K/V and gK/gV of inner segments are cut; a rank has one.
        keeps_outputs: whether a stage's output stays until its backward.
    """

    inner: float
    wave: float
    unread: float
    attention: float
    again: float
    kv: float
    kv_grad: float
    norm: float
    head: float
    stage_input: float
    temporary: float
    seen: float
    head_temporary: float
    num_layers: int
    head_weight: float = 0.0
    parts: int = 1
    shares: int = 1
    keeps_outputs: bool = True
    host_layers: int = 0
    mixers: tuple[str, ...] = ()
    states: tuple[tuple[str, OfStates], ...] = ()

    @classmethod
    def of_config(
        cls,
        config: Any,
        vocab_size: int | None = None,
        gathers: bool = False,
        host_layers: int = 0,
        pattern: str | None = None,
        recomputes: bool = True,
        execution: Execution | None = None,
    ) -> Footprint:
        """Of a Megatron TransformerConfig or a ModelSpec.

        Args:
            config: the model's.
            vocab_size: of the whole output layer (default: the spec's).
            gathers: whether every context-parallel rank keeps K/V of all.
            host_layers: see PrefixConfig.cache_host_layers.
            pattern: see `LayerMix.of_config`.
            recomputes: see `Execution.of_config`.
            execution: how it is computed, which no spec says (default: as the config says).
        """
        form = execution or Execution.of_config(config, recomputes)
        heads, experts = config.num_attention_heads, config.num_moe_experts or 0
        if vocab_size is None:
            vocab_size = getattr(config, "vocab_size", None) or 0
        shape = _Dimensions(
            config.hidden_size, heads, config.num_query_groups or heads, config.kv_channels,
            config.ffn_hidden_size, vocab_size, config.gated_linear_unit,
            bool(config.qk_layernorm), experts, config.moe_ffn_hidden_size or 0,
            config.moe_router_topk if experts else 0,
        )  # fmt: skip
        mix = LayerMix.of_config(config, pattern)
        found = _count(shape, form, max(1, config.num_layers // form.num_stages), mix)
        return replace(
            found, host_layers=host_layers, mixers=mix.stages(form.num_stages),
            shares=1 if gathers else form.cp, keeps_outputs=form.keeps_outputs,
        )  # fmt: skip

    def kept(self, policy: str, inner: bool, read: float, first: bool, last: bool) -> float:
        """Bytes a position that stay on the device between a segment's forward and backward.

        Args:
            policy: of the segment.
            inner: whether it is an inner segment.
            read: share of its positions that carry loss.
            first, last: whether the stage is the first, the last.
        """
        received = 0.0 if first else self.stage_input
        if policy == "recompute":
            return received
        sent = self.stage_input if self.keeps_outputs and not last else 0.0
        if policy == "offload":  # what the output layer saves stays
            return received + (read * (self.head - self.norm) if last else sent)
        layer = self.inner if inner else self.wave
        if not last:
            return self.num_layers * layer + sent
        last_layer = self.last_layer(read) + layer - self.inner
        return (self.num_layers - 1) * layer + last_layer + self.after(read)

    def exchanged(self, backward: bool) -> float:
        """Transient, of one layer's own attention on context-parallel ranks: K/V of all of them,
        and those of the rank's runs (tree/cp_layout.py, `own_runs`), with their gradients."""
        if self.parts == 1:
            return 0.0
        runs = self.parts + 0.5
        sent = self.kv * runs + self.kv_grad * (self.parts + runs)
        return self.kv * (self.parts + runs) + (sent if backward else 0.0)

    def last_layer(self, read: float) -> float:
        """Saved by the last layer of the last stage: what follows attention, of what is read."""
        whole = self.unread + (self.attention if read else 0.0)
        return whole + read * max(0.0, self.inner - whole)

    def after(self, read: float) -> float:
        """Saved after the last layer, a position of the segment."""
        return self.norm + read * (self.head - self.norm)


@dataclass(frozen=True)
class _Dimensions:
    """The sizes of a model."""

    hidden: int
    heads: int
    groups: int
    channels: int
    ffn: int
    vocab: int
    gated: bool
    qk_norm: bool
    experts: int
    expert_ffn: int
    topk: int


def _count(shape: _Dimensions, form: Execution, num_layers: int, mix: LayerMix) -> Footprint:
    """Counts numbers a position and multiplies by their bytes; each context-parallel rank has as
    many of K/V."""
    size, tp, parts = form.itemsize, form.tp, form.cp
    hidden = shape.hidden / (tp if form.sequence_parallel else 1)
    wide = max(4, size)  # of what is computed in fp32 or wider
    queries = shape.heads * shape.channels / tp
    keys = max(1, shape.groups / tp) * shape.channels
    projected = queries + 2 * keys  # saved whole by norms of Q and K, and by checkpoints
    norm = 2 * hidden if form.fused_layers else 3 * hidden + 1
    mlp = _mlp(shape, form)
    ends = queries * size + shape.heads / tp * wide  # attention's output and log-sum-exp
    qk = (2 * queries + keys + projected) * size if shape.qk_norm else 0.0
    rope = 0 if form.fused_rope else 4 * shape.channels
    # transformer-engine's second norm is part of the MLP, which does not run.
    unread = ((norm if form.fused_layers else 2 * norm) + rope) * size + qk
    # A gate on the output: its sigmoid in fp32, and the product in front of the projection.
    gate = queries * (size + wide) if mix.output_gate else 0.0
    common = (2 * norm + mlp + queries + rope) * size + qk + ends + gate
    inner, wave, again = common, common + (1 if shape.qk_norm else 2) * keys * size, 0.0
    if form.recompute == "selective":
        extra = keys * size + (0 if shape.qk_norm else projected * size)
        inner, wave, again = _selected(shape, form, hidden, norm, mlp, common, extra)
        unread = min(inner, unread + extra)
    kinds = (_mixed(mix, form, one, (norm + mlp) * size, norm) for one in (inner, wave))
    (inner, _), (wave, largest) = kinds
    if form.recompute == "full":
        inner, wave, again = _checkpointed(form, hidden * size, inner, wave, largest, num_layers)
        unread = inner
    # Routers count all positions, and only a layer with attention and an MLP ends early.
    unread = inner if shape.topk or not mix.ends_with_attention else unread
    attention = max(0.0, min(queries * size + ends, inner - unread))
    found = Footprint(
        inner=inner, wave=wave, unread=unread, attention=attention, again=again,
        kv=2 * keys * size, kv_grad=2 * keys * wide, norm=0.0, head=0.0, stage_input=hidden * size,
        temporary=(mlp + 2 * hidden) * size, seen=2 * (queries + keys) * size, head_temporary=0.0,
        num_layers=num_layers, parts=parts, shares=parts,
    )  # fmt: skip
    states = tuple((symbol, _of_states(layer, form, parts)) for symbol, layer in mix.recurrent)
    return _with_output_layer(replace(found, states=states), shape, form, hidden)


def _mixed(
    mix: LayerMix, form: Execution, whole: float, mlp: float, norm: float
) -> tuple[float, float]:
    """Bytes a position that a layer saves: the mean of a model's layers, and the most.

    Args:
        mix: the layers.
        form: how they are computed.
        whole: of a layer with attention and an MLP, `mlp` included.
        mlp: of its MLP and the norm before it.
        norm: numbers that a norm saves.
    """
    size, fused, tp = form.itemsize, form.fused_layers, form.tp

    def recurrent(layer: Recurrent) -> float:
        return norm * size + layer.saved(size, fused) / tp

    attention = whole - mlp
    every = mix.attention * attention + mix.mlps * mlp + mix.recurrence(recurrent)
    mixers = [recurrent(layer) for _, layer in mix.recurrent]
    mixers += [attention] if mix.attention else []
    # A layer is a mixer with an MLP behind it, or in hybrid models one of both.
    most = max(mixers) + mlp if mix.mlps == mix.total else max([*mixers, mlp])
    return every / mix.total, most


def _of_states(layer: Recurrent, form: Execution, parts: int) -> OfStates:
    """Of one recurrent layer; context-parallel ranks have all positions of a part of the heads."""
    wide, ranks, before = max(4, form.itemsize), form.tp * parts, layer.conv_width - 1
    state, tail = layer.state * wide / ranks, sum(layer.convolved) * before / ranks
    found = OfStates(state + tail * form.itemsize, state + tail * wide)
    if form.recompute == "full":  # the rest is there while one layer's backward runs
        return found
    if isinstance(layer, GatedDelta):
        # The convolution of the parent's tail and a span's first positions (layers/gdn.py).
        return found._replace(initial=state, edge=2 * tail * form.itemsize)
    batched = layer.of_kernel(form.itemsize) / form.tp
    return found._replace(initial=state, edge=before * batched / parts, batched=batched)


def _with_output_layer(
    found: Footprint, shape: _Dimensions, form: Execution, hidden: float
) -> Footprint:
    """With what follows the last layer; `hidden` numbers a position on this rank."""
    size, wide, logits = form.itemsize, max(4, form.itemsize), shape.vocab / form.tp
    norm = (hidden if form.fused_layers else 2 * hidden + 1) * size
    return replace(
        found, norm=norm,
        head=norm + hidden * size + logits * (size if form.fused_loss else wide),
        head_temporary=0.0 if form.fused_loss else logits * (size + wide),
        head_weight=logits * shape.hidden * size,
    )  # fmt: skip


def _mlp(shape: _Dimensions, form: Execution) -> float:
    """Numbers a position that the MLP saves, without its norm."""
    ffn = shape.expert_ffn if shape.topk else shape.ffn
    inputs = 2 if shape.gated else 1
    kept = ffn * (inputs + 1 if form.fused_activation else inputs + (3 if shape.gated else 1))
    if not shape.topk:
        return kept / form.tp
    # Every expert gets a copy of the input and weighs its output; routers save scores.
    return shape.topk * (shape.hidden + kept + ffn) + 3 * shape.experts


def _checkpointed(
    form: Execution, given: float, inner: float, wave: float, largest: float, num_layers: int
) -> tuple[float, float, float]:
    """Full recomputation: only the input of one or a few layers is saved, and the rest is there
    while their backward runs, `largest` where it is the layer with most."""
    if form.method == "block":
        share = min(1.0, form.num_layers / num_layers)
        kept = share * given
        return kept + (1 - share) * inner, kept + (1 - share) * wave, largest - given
    kept = given / form.num_layers
    return kept, kept, min(largest * form.num_layers, wave * num_layers) - given


def _selected(
    shape: _Dimensions,
    form: Execution,
    hidden: float,
    norm: float,
    mlp: float,
    common: float,
    extra: float,
) -> tuple[float, float, float]:
    """Selective recomputation: attention's inputs are saved, in inner segments as in waves."""
    size, wide = form.itemsize, max(4, form.itemsize)
    inner, wave, again = common, common + extra, 0.0
    if "core_attn" in form.modules:
        lse = shape.heads / form.tp * wide
        inner = wave = common + extra - lse
        again = (shape.heads * shape.channels / form.tp) * size + lse
    if "mlp" in form.modules:
        saved = (mlp - hidden) * size
        inner, wave, again = inner - saved, wave - saved, max(again, saved)
    if "layernorm" in form.modules:
        inner, wave = inner - 2 * hidden * size, wave - 2 * hidden * size
        again += 2 * norm * size
    return inner, wave, again
