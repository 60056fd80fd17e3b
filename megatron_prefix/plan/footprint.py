"""Bytes of device memory that a position of a segment takes on one rank.  Pure.

Adds up what kinds of layers save for backward (layers/), a norm before each of them, and the output
layer. With transformer-engine's layers a norm saves its input and output, the gated activation its
input, every matrix product its input; Megatron's local, unfused layers save more. Storage saved by
several operators counts once. ("Reducing Activation Recomputation in Large Transformer Models",
section 4.1, counts another layer likewise.)
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from megatron_prefix.plan.layer_numbers import LayerMemory, Payload
from megatron_prefix.tree.payload_map import Form

if TYPE_CHECKING:
    from megatron_prefix.plan.actions import Action, Plan


class Places(Protocol):
    """Memory of a part of the step that stays between steps, where layers of some segments write
    what they save. It is hashable; bytes are of one rank of a pipeline."""

    def saved(self, plan: Plan, footprint: Footprint, rank: int, action: Action) -> float:
        """Of what a segment's layers save, bytes that are there."""
        ...

    def held(self, plan: Plan, footprint: Footprint, rank: int) -> float:
        """Bytes of all of it."""
        ...


class Buffers(Protocol):
    """Memory of further messages of a model chunk, beyond those between stages, while its program
    runs."""

    @property
    def held(self) -> float:
        """Bytes."""
        ...

    def post(self, action: Action) -> None:
        """Allocates buffers of messages that start with an action."""
        ...

    def take(self, action: Action) -> None:
        """Frees buffers of messages that an action waits for."""
        ...


BuffersOf = Callable[["Plan", int, int, "Footprint", Callable[[int], Collection[int]]], Buffers]


@dataclass(frozen=True)
class Execution:
    """How a model is computed: by default in bf16, by transformer-engine's fused layers.

    Attributes:
        itemsize: bytes of a number.
        num_stages: pipeline size times virtual stages.
        tp, cp, sequence_parallel: the layout.
        fused_layers: transformer-engine's layers, else Megatron's local ones.
        fused_activation, fused_rope, fused_loss: whether these are one kernel each.
        fused_gradients: whether products add gradients of weights to the main gradients themselves.
        recompute: "none", "full" or "selective".
        method, num_layers, modules: Megatron's options of recomputation.
        keeps_outputs: see `Footprint`.
        holds_projection: whether a recurrent layer's convolution saves its input where the
            projection has left it, so that all of that stays (Megatron-Core since 0.18).
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
    fused_gradients: bool = True
    holds_projection: bool = False

    @property
    def sequence_ranks(self) -> int:
        """Tensor-parallel ranks that share the positions between layers' matrix products."""
        return self.tp if self.sequence_parallel else 1

    def selects(self, module: str) -> bool:
        """Whether Megatron's selective recomputation has a module."""
        return self.recompute == "selective" and module in self.modules

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
            bool(config.gradient_accumulation_fusion),
        )  # fmt: skip


@dataclass(frozen=True)
class Footprint:
    """Bytes a position on one rank.

    Attributes:
        inner: saved by one layer for the backward of an inner segment, on average.
        wave: the same for a wave, whose payload is not in the sidecar.
        unread: saved by the last layer for an inner segment without loss.
        again: recomputed by Megatron's own recomputation during backward.
        act: of `inner` and of `wave`, what "recompute_act" drops.
        kv: payload of a position in the sidecar, one layer that leaves some.
        kv_grad: its gradient there.
        keys, keys_grad: K and V of a position as one layer's attention sees them, and their sums.
        tail: transient bytes a row of ancestors' last positions in one layer.
        attention: besides `unread`, saved by the last layer of all positions as soon as one of them
            is read.
        norm: saved after the last layer, without a loss.
        head: saved after the last layer, with a loss: norm, logits, cross entropy.
        stage_input: received by a stage; a stage sends as much.
        temporary: peak transient bytes of one layer.
        seen: transient bytes a key of an ancestor in one layer's backward.
        head_temporary: peak transient bytes of the output layer.
        head_weight: gradient of the output layer's weight, where it is transient; bytes in all, not
            a position.
        num_layers: layers of a model chunk.
        parts: context-parallel ranks, which share the positions.
        payloads: of every stage, those of its layers that leave one.
        behind_inner, behind_wave: saved by multi-token prediction, behind the last layer, for the
            backward of an inner segment and of a wave.
        host_layers: see PrefixConfig.cache_host_layers.
        state, state_grad: a final hidden state that crosses data-parallel ranks, and its gradient.
        shares: into how many parts K/V and gK/gV of inner segments are cut; a rank has one.
        keeps_outputs: whether a stage's output stays until its backward.
        places: where layers save what stays between steps; None: nothing does.
        buffers: makes those of a plan, a rank, its model chunk and a footprint, with what says
            which segments a segment reads; None: there are no further messages.
        ends_early: whether the last layer of the last stage runs on what is read only.
        checkpointed: whether Megatron recomputes every layer.
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
    act: float = 0.0
    keys: float = 0.0
    keys_grad: float = 0.0
    tail: float = 0.0
    head_weight: float = 0.0
    parts: int = 1
    shares: int = 1
    keeps_outputs: bool = True
    host_layers: int = 0
    payloads: tuple[tuple[Payload, ...], ...] = ()
    behind_inner: float = 0.0
    behind_wave: float = 0.0
    state: float = 0.0
    state_grad: float = 0.0
    places: Places | None = None
    buffers: BuffersOf | None = None
    ends_early: bool = True
    checkpointed: bool = False

    @classmethod
    def of_layers(
        cls,
        layers: Sequence[Sequence[LayerMemory]],
        hidden_size: int,
        vocab_size: int,
        form: Execution,
        gathers: bool = False,
        behind: Sequence[LayerMemory] = (),
    ) -> Footprint:
        """Of a model, by what its kinds of layers say.

        Args:
            layers: what fills the slots of each layer, of all stages.
            hidden_size: of a position between layers.
            vocab_size: of the whole output layer.
            form: how it is computed.
            gathers: whether every context-parallel rank keeps K/V of all.
            behind: what multi-token prediction is made of, whose loss has as many rows of logits as
                the model's; () without.
        """
        hidden = hidden_size / form.sequence_ranks
        payloads = _by_stage(layers, behind, form)
        rows = [
            payload for stage in payloads for payload in stage if payload.form == Form.POSITIONS
        ]
        parts = [part for layer in (*layers, behind) for part in layer]
        keys = [_key_value_bytes(part) for part in parts]
        return cls(
            **_saved(layers, behind, form, hidden),
            **_behind_layers(form, hidden, hidden_size, vocab_size, 2 if behind else 1),
            kv=max((row.values for row in rows), default=0.0),
            kv_grad=max((row.gradients for row in rows), default=0.0),
            keys=max((values for values, _ in keys), default=0.0),
            keys_grad=max((gradients for _, gradients in keys), default=0.0),
            stage_input=hidden * form.itemsize,
            temporary=max((part.temporary for part in parts), default=0.0),
            seen=max((part.seen for part in parts), default=0.0),
            tail=max((part.tail for part in parts), default=0.0),
            num_layers=max(1, len(layers) // form.num_stages), parts=form.cp,
            shares=1 if gathers else form.cp, keeps_outputs=form.keeps_outputs,
            ends_early=_ends_early(layers, behind), payloads=payloads,
            host_layers=0, places=None, buffers=None,
            state=hidden_size * form.itemsize,
            state_grad=hidden_size * max(4, form.itemsize),
            checkpointed=form.recompute == "full",
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
        output = self.stage_input if self.keeps_outputs and not last else 0.0
        if policy == "offload":  # what the output layer saves stays
            return received + (read * (self.head - self.norm) if last else output)
        act = self.act if policy == "recompute_act" else 0.0
        layer = (self.inner if inner else self.wave) - act
        if not last:
            return self.num_layers * layer + output
        # Of the last layer the MLP runs on what is read only, so no more is dropped there.
        last_layer = self.last_layer(read) - read * act + (layer + act - self.inner)
        last_layer += self.behind_inner if inner else self.behind_wave
        return (self.num_layers - 1) * layer + last_layer + self.after(read)

    def computed(self, policy: str, inner: bool) -> float:
        """Transient bytes a position of a layer's forward, beyond those that it saves; at least the
        last product and the residual."""
        layer = self.inner if inner else self.wave
        saved = layer - (self.act if policy == "recompute_act" else 0.0)
        return max(self.temporary - saved, 2 * self.stage_input)

    def exchanged(self, backward: bool) -> float:
        """Transient bytes of one layer's own attention with context parallelism: K/V of all ranks
        and of this rank's runs (tree/cp_layout.py, `own_runs`), with their gradients."""
        if self.parts == 1:
            return 0.0
        runs = self.parts + 0.5
        reduced = self.keys * runs + self.keys_grad * (self.parts + runs)
        return self.keys * (self.parts + runs) + (reduced if backward else 0.0)

    def last_layer(self, read: float) -> float:
        """Saved by the last layer of the last stage, where all after attention runs on scored
        positions only."""
        unscored = self.unread + (self.attention if read else 0.0)
        return unscored + read * max(0.0, self.inner - unscored)

    def after(self, read: float) -> float:
        """Saved after the last layer, a position of the segment."""
        return self.norm + read * (self.head - self.norm)

    def released(self, read: float) -> float:
        """The part of `after` that is freed before a layer's backward; with multi-token prediction
        the final norm is not."""
        return self.after(read) - (self.norm if self.behind_wave else 0.0)


def _key_value_bytes(part: LayerMemory) -> tuple[float, float]:
    """Bytes of K and V of a position, and of their gradients."""
    of = part.payload
    rows = (of.values, of.gradients) if of and of.form == Form.POSITIONS else (0.0, 0.0)
    return part.keys or rows[0], part.keys_grad or rows[1]


def _saved(
    layers: Sequence[Sequence[LayerMemory]],
    behind: Sequence[LayerMemory],
    form: Execution,
    hidden: float,
) -> dict[str, float]:
    """Saved by layers with a norm before every part, of `hidden` numbers a position."""
    norm = (2 * hidden if form.fused_layers else 3 * hidden + 1) * form.itemsize
    recomputed, output = form.selects("layernorm"), hidden * form.itemsize
    before = functools.partial(_in_front, norm=norm, output=output, recomputed=recomputed)
    repeated = norm * recomputed
    stack = [*layers, behind]
    act = _mean(layers, "act") * (form.recompute != "full")
    *inners, behind_inner = [sum(before(part) + part.inner for part in layer) for layer in stack]
    *waves, behind_wave = [sum(before(part) + part.wave for part in layer) for layer in stack]
    inner, wave = sum(inners) / len(layers), sum(waves) / len(layers)
    repeated = max(
        max((part.again for part in layer), default=0.0) + repeated * len(layer) for layer in stack
    )
    unused, last = inner, layers[-1]
    if form.recompute == "full":
        num = max(1, len(layers) // form.num_stages)
        inner, wave, repeated = _checkpointed(
            form, hidden * form.itemsize, inner, wave, max(waves), num
        )
        unused = inner
        if behind and form.method != "block":  # of the layer behind the checkpoint's two inputs
            inputs = 2 * hidden * form.itemsize
            repeated = max(repeated, behind_wave - inputs)
            behind_inner = behind_wave = inputs
    elif _ends_early(layers, behind):
        # transformer-engine's second norm is part of the MLP, which does not run.
        norms = before(last[0]) if form.fused_layers else norm * len(last)
        unused = min(inners[-1], norms + sum(part.unread or 0.0 for part in last))
    attention = max(0.0, min(sum(part.read for part in last), inner - unused))
    return dict(
        inner=inner, wave=wave, unread=unused, attention=attention, again=repeated, act=act,
        behind_inner=behind_inner, behind_wave=behind_wave,
    )  # fmt: skip


def _ends_early(layers: Sequence[Sequence[LayerMemory]], behind: Sequence[LayerMemory]) -> bool:
    """Whether the end of the last layer runs on scored positions only."""
    last = layers[-1]
    return len(last) > 1 and not behind and all(part.unread is not None for part in last)


def _mean(layers: Sequence[Sequence[LayerMemory]], name: str) -> float:
    """Per layer, of the sums over its parts."""
    return sum(getattr(part, name) for layer in layers for part in layer) / len(layers)


def _in_front(part: LayerMemory, norm: float, output: float, *, recomputed: bool) -> float:
    """Bytes saved by the norm before a part; by itself it saves `norm`, including its output."""
    if recomputed:  # it saves its input only
        return norm - output
    return norm if part.given is None else norm - output + part.given


def _by_stage(
    layers: Sequence[Sequence[LayerMemory]], behind: Sequence[LayerMemory], form: Execution
) -> tuple[tuple[Payload, ...], ...]:
    """Payloads of every stage; layers are spread evenly, `behind` is on the last."""
    ends = [len(layers) * stage // form.num_stages for stage in range(form.num_stages + 1)]
    stages = [[*layers[start:end]] for start, end in itertools.pairwise(ends)]
    stages[-1].append(behind)
    payloads = [[p.payload for layer in stage for p in layer if p.payload] for stage in stages]
    return tuple(map(tuple, payloads))


def spread_evenly(num_layers: int, num_host: int) -> list[int]:
    """Numbers of the layers on the host, evenly spread and including the last."""
    share = min(num_host, num_layers)
    return [
        layer
        for layer in range(num_layers)
        if (layer + 1) * share // num_layers > layer * share // num_layers
    ]


def _behind_layers(
    form: Execution, hidden: float, hidden_size: int, vocab_size: int, num_losses: int
) -> dict[str, float]:
    """Saved after the last layer, with `num_losses` rows of logits a scored position; `hidden`
    numbers a position on this rank."""
    size, wide, logits = form.itemsize, max(4, form.itemsize), vocab_size / form.tp
    norm = (hidden if form.fused_layers else 2 * hidden + 1) * size
    return dict(
        norm=norm,
        head=norm + num_losses * (hidden * size + logits * (size if form.fused_loss else wide)),
        head_temporary=0.0 if form.fused_loss else logits * (size + wide),
        head_weight=0.0 if form.fused_gradients else logits * hidden_size * size,
    )


def _checkpointed(
    form: Execution, input_bytes: float, inner: float, wave: float, largest: float, num_layers: int
) -> tuple[float, float, float]:
    """(inner, wave, recomputed) bytes with full recomputation: the input of one or a few layers is
    saved, the rest exists while their backward runs; `largest` is of the layer with most."""
    if form.method == "block":
        share = min(1.0, form.num_layers / num_layers)
        saved = share * input_bytes
        return saved + (1 - share) * inner, saved + (1 - share) * wave, largest - input_bytes
    saved = input_bytes / form.num_layers
    return saved, saved, min(largest * form.num_layers, wave * num_layers) - input_bytes
