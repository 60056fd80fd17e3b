"""The footprint of a model: what its kinds of layers save for backward, a norm before each of them,
and the output layer.  Pure.

With transformer-engine's layers a norm saves its input and output, the gated activation its input,
every matrix product its input; Megatron's local, unfused layers save more. Storage saved by several
operators counts once. ("Reducing Activation Recomputation in Large Transformer Models", section
4.1, counts another layer likewise.)
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from megatron_prefix.lab.predict.execution import Execution
from megatron_prefix.lab.predict.footprint import Footprint
from megatron_prefix.lab.predict.kinds import LayerMemory, SavedPayload, memory_of
from megatron_prefix.layers.model import behind_decoder, layers_of, vocabulary
from megatron_prefix.tree.payload_map import Form


def footprint_of(
    config: Any,
    execution: Execution,
    vocab_size: int | None = None,
    pattern: str | None = None,
    gathers: bool = False,
) -> Footprint:
    """Bytes a position of a model on one rank; arguments as of `cost_of` and
    `of_layers`."""
    layers = layers_of(config, pattern)
    memory = {kind: memory_of(kind, config, execution) for layer in layers for kind in layer}
    further = behind_decoder(config, pattern)
    behind = [memory_of(kind, config, execution) for layer in further for kind in layer]
    return of_layers(
        [[memory[kind] for kind in layer] for layer in layers], config.hidden_size,
        vocabulary(config, vocab_size), execution, gathers, behind, len(further),
    )  # fmt: skip


def of_layers(
    layers: Sequence[Sequence[LayerMemory]],
    hidden_size: int,
    vocab_size: int,
    form: Execution,
    gathers: bool = False,
    behind: Sequence[LayerMemory] = (),
    num_further: int = 0,
) -> Footprint:
    """Of a model, by what its kinds of layers say.

    Args:
        layers: what fills the slots of each layer, of all stages.
        hidden_size: of a position between layers.
        vocab_size: of the whole output layer.
        form: how it is computed.
        gathers: whether every context-parallel rank keeps K/V of all.
        behind: what multi-token prediction is made of, whose losses each have as many rows of
            logits as the model's; () without.
        num_further: how many labels further on it predicts.
    """
    hidden = hidden_size / form.sequence_ranks
    payloads = _by_stage(layers, behind, form)
    rows = [payload for stage in payloads for payload in stage if payload.form == Form.POSITIONS]
    parts = [part for layer in (*layers, behind) for part in layer]
    keys = [_key_value_bytes(part) for part in parts]
    return Footprint(
        **_saved(layers, behind, num_further, form, hidden),
        **_behind_layers(form, hidden, hidden_size, vocab_size, 1 + num_further),
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
        state=hidden_size * form.itemsize,
        state_grad=hidden_size * max(4, form.itemsize),
        checkpointed=form.recompute == "full",
    )  # fmt: skip


def _key_value_bytes(part: LayerMemory) -> tuple[float, float]:
    """Bytes of K and V of a position, and of their gradients."""
    of = part.payload
    rows = (of.values, of.gradients) if of and of.form == Form.POSITIONS else (0.0, 0.0)
    return part.keys or rows[0], part.keys_grad or rows[1]


def _saved(
    layers: Sequence[Sequence[LayerMemory]],
    behind: Sequence[LayerMemory],
    num_further: int,
    form: Execution,
    hidden: float,
) -> dict[str, Any]:
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
        max((part.recomputed for part in layer), default=0.0) + repeated * len(layer)
        for layer in stack
    )
    unused, last = inner, layers[-1]
    if form.recompute == "full":
        num = max(1, len(layers) // form.num_stages)
        inner, wave, repeated = _checkpointed(
            form, hidden * form.itemsize, inner, wave, max(waves), num
        )
        unused = inner
        if behind and form.method != "block":  # of each layer behind the checkpoint's two inputs
            inputs = num_further * 2 * hidden * form.itemsize
            repeated = max(repeated, (behind_wave - inputs) / num_further)
            behind_inner = behind_wave = inputs
    elif _ends_early(layers, behind):
        # transformer-engine's second norm is part of the MLP, which does not run.
        norms = before(last[0]) if form.fused_layers else norm * len(last)
        unused = min(inners[-1], norms + sum(part.unused_output or 0.0 for part in last))
    attention = max(0.0, min(sum(part.read for part in last), inner - unused))
    return dict(
        inner=inner, wave=wave, unread=unused, attention=attention, again=repeated, act=act,
        behind_inner=behind_inner, behind_wave=behind_wave,
    )  # fmt: skip


def _ends_early(layers: Sequence[Sequence[LayerMemory]], behind: Sequence[LayerMemory]) -> bool:
    """Whether the end of the last layer runs on scored positions only."""
    last = layers[-1]
    return len(last) > 1 and not behind and all(part.unused_output is not None for part in last)


def _mean(layers: Sequence[Sequence[LayerMemory]], name: str) -> float:
    """Per layer, of the sums over its parts."""
    return sum(getattr(part, name) for layer in layers for part in layer) / len(layers)


def _in_front(part: LayerMemory, norm: float, output: float, *, recomputed: bool) -> float:
    """Bytes saved by the norm before a part; by itself it saves `norm`, including its output."""
    if recomputed:  # it saves its input only
        return norm - output
    return norm if part.norm_output is None else norm - output + part.norm_output


def _by_stage(
    layers: Sequence[Sequence[LayerMemory]], behind: Sequence[LayerMemory], form: Execution
) -> tuple[tuple[SavedPayload, ...], ...]:
    """Payloads of every stage; layers are spread evenly, `behind` is on the last."""
    ends = [len(layers) * stage // form.num_stages for stage in range(form.num_stages + 1)]
    stages = [[*layers[start:end]] for start, end in itertools.pairwise(ends)]
    stages[-1].append(behind)
    payloads = [[p.payload for layer in stage for p in layer if p.payload] for stage in stages]
    return tuple(map(tuple, payloads))


def _behind_layers(
    form: Execution, hidden: float, hidden_size: int, vocab_size: int, num_losses: int
) -> dict[str, Any]:
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
