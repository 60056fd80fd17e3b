"""A model by its config alone: which kinds its layers are, and what they compute.  Pure.

`config` is a Megatron TransformerConfig or anything with its fields: a ModelSpec of the lab, which
has `vocab_size` and `hybrid_override_pattern` besides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from megatron_prefix.layers import precision, table
from megatron_prefix.layers.kind import Kind, Slot
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.plan.layer_numbers import Payload, Sharding
from megatron_prefix.tree.payload_map import Form


def layers_of(config: Any, pattern: str | None = None) -> list[tuple[Kind, ...]]:
    """What fills the slots of every layer of a whole model.

    Args:
        pattern: a symbol a layer of a hybrid model, whose layers have one slot, unknown ones
            nothing, and behind a slash those of what is behind its decoder; "" for a GPTModel
            (default: the spec's).
    """
    of_decoder, _ = _patterns(config, pattern)
    if of_decoder:
        return _of_symbols(config, of_decoder)
    kinds = table.kinds_of(config)
    return [
        tuple(
            next(kind for kind in kinds if kind.slot is slot and kind.fills(config, layer))
            for slot in Slot
        )
        for layer in range(config.num_layers)
    ]


def _patterns(config: Any, pattern: str | None) -> tuple[str, str]:
    """Symbols of the decoder's layers, and of those behind it for every further label."""
    if pattern is None:
        names = "hybrid_override_pattern", "mtp_hybrid_override_pattern"
        pattern = "/".join(getattr(config, name, None) or "" for name in names)
    of_decoder, _, behind = pattern.partition("/")
    return of_decoder, behind.partition("/")[0]


def _of_symbols(config: Any, symbols: str) -> list[tuple[Kind, ...]]:
    kinds = table.kinds_of(config, symbols)
    return [_of_symbol(kinds, config, layer, symbol) for layer, symbol in enumerate(symbols)]


def _of_symbol(kinds: Iterable[Kind], config: Any, layer: int, symbol: str) -> tuple[Kind, ...]:
    kinds = [kind for kind in kinds if symbol == kind.symbol]
    if len(kinds) > 1:
        kinds = [kind for kind in kinds if kind.fills(config, layer)]
    return tuple(kinds[:1])


def behind_decoder(config: Any, pattern: str | None = None) -> list[tuple[Kind, ...]]:
    """What a model has behind its decoder, for every further label: the kinds of one more of its
    last layer, or of layers by their own symbols, and what is around them. Arguments as of
    `layers_of`."""
    around = table.behind(config)
    if around is None:
        return []
    _, symbols = _patterns(config, pattern)
    layers = _of_symbols(config, symbols) if symbols else layers_of(config, pattern)[-1:]
    return [(*chain(*layers), around)] * config.mtp_num_layers


def cost_of(config: Any, vocab_size: int | None = None, pattern: str | None = None) -> CostModel:
    """FLOPs of a model, in FP8 as many as 16 bit has in that time (layers/precision.py);
    `vocab_size` of the output layer (default: the spec's)."""
    layers = layers_of(config, pattern)
    parts = [kind.work(config) for layer in layers for kind in layer]
    behind = behind_decoder(config, pattern)
    parts += [kind.work(config) for layer in behind for kind in layer]
    # Of the labels further on as many count as of the next.
    outputs = (1 + len(behind)) * vocabulary(config, vocab_size)
    parts = [part.at(precision.rate(config)) for part in parts]
    return CostModel.of_layers(parts, config.hidden_size, outputs)


def payloads_of(
    config: Any, pattern: str | None, sharding: Sharding
) -> tuple[tuple[Payload, ...], ...]:
    """What a span leaves in every layer of a whole model, on one rank, and behind its decoder;
    arguments as of `layers_of`."""
    layers: list[Sequence[Kind]] = [*layers_of(config, pattern)]
    layers.append([*chain(*behind_decoder(config, pattern))])
    every = ([kind.payload(config, sharding) for kind in layer] for layer in layers)
    return tuple(tuple(payload for payload in layer if payload) for layer in every)


def sent_width(config: Any, layers: int) -> int:
    """Numbers of a position that a pipeline stage gives to the next one, behind so many layers."""
    states = max(kind.states_sent(config, layers) for kind in table.kinds_of(config))
    return states * int(config.hidden_size)


def dropped_bytes(config: Any, pattern: str | None, sharding: Sharding) -> float:
    """Bytes a position that policy "recompute_act" drops in all layers; arguments as of
    `layers_of`."""
    layers = layers_of(config, pattern)
    return sum(kind.dropped(config, sharding) for layer in layers for kind in layer)


def leaves_positions(config: Any, pattern: str | None) -> bool:
    """Whether all that layers leave for the children of a span is a row a position: then these can
    run in its segment. Arguments as of `layers_of`."""
    every = {kind for layer in layers_of(config, pattern) for kind in layer}
    are_rows = all(kind.form in (None, Form.POSITIONS) and not kind.has_window for kind in every)
    return table.behind(config) is None and are_rows


def vocabulary(config: Any, vocab_size: int | None) -> int:
    """Rows of the output layer; by default the spec's."""
    return getattr(config, "vocab_size", None) or 0 if vocab_size is None else vocab_size


def balancing(config: Any) -> set[str]:
    """Names of the losses that balance the experts; "none" keeps its coefficient, and has none."""
    if not getattr(config, "num_moe_experts", None):
        return set()
    kinds = getattr(config, "moe_router_load_balancing_type", "none")
    coefficients: Any = getattr(config, "moe_aux_loss_coeff", 0.0)
    if isinstance(kinds, str):
        kinds, coefficients = [kinds], [coefficients]
    pairs = zip(kinds, coefficients, strict=True)
    return {kind for kind, coeff in pairs if coeff > 0 and kind != "none"}


def has_global_loss(config: Any) -> bool:
    """Whether routers use global_aux_loss: counts of all data-parallel ranks, in order."""
    return "global_aux_loss" in balancing(config)


def counts_tokens(config: Any) -> bool:
    """Whether layers count positions without loss, and those that are padding (`Kind.counts`)."""
    return any(kind.counts(config) for kind in table.kinds_of(config))
