"""What some steps need and most do not: one table of strings.  Pure.

A feature lives in a folder of its own and enters the core by one of three seams: a kind of layer
(layers/kind.py), a part of the step, or what is around a call (both in parts.py). It
imports the core, which imports none of it: this table says by name what to import, and when. Entry
points of packages would not do: the order decides, a test reads it, and ranks with different
packages would wait for one another.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from megatron_prefix.config import PrefixConfig
    from megatron_prefix.run.rank import Rank

_FOLDER = "megatron_prefix.features."


class Feature(NamedTuple):
    """A part of some steps.

    Attributes:
        name: for messages.
        path: "module:Class" of a `StepPart`.
        wanted: whether a call has it, by what the user set and what this rank is in it.
        needed: whether a step without it is wrong, and not just slower. One that is not is left out
            on all ranks where one of them cannot import it.
        takes: keywords of the language model that it answers for: calls with one of them have it.
        policies: of segments (plan/actions.py) that it answers for: a step with gradients whose
            plan has one of them has the part.
    """

    name: str
    path: str
    wanted: Callable[[PrefixConfig, Rank], bool]
    needed: bool = True
    takes: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()


class FeatureAround(NamedTuple):
    """What goes around the calls of some schedules.

    Attributes:
        name: for messages.
        path: "module:Class" of an `Around` (parts.py).
        wanted: whether a schedule has it, by what the user set, and whether the trainer's first
            steps are to be watched.
        needed: whether a call without it is not what the user wants, and is the stock schedule's.
    """

    name: str
    path: str
    wanted: Callable[[PrefixConfig, bool], bool]
    needed: bool = True


class FeatureKind(NamedTuple):
    """A kind of layer that few models have.

    Attributes:
        path: "module:Class" of a `Kind`.
        in_config: whether layers of a model with this config may be of it.
        in_layer: whether one of Megatron's layers may have a module of it.
        symbol: in the pattern of a hybrid model, where that alone tells of it.
    """

    path: str
    in_config: Callable[[Any], bool]
    in_layer: Callable[[Any], bool]
    symbol: str = ""


def _attention_of(layer: Any) -> Any:
    return getattr(layer, "self_attention", None)


def _has_mixer(layer: Any, name: str) -> bool:
    """Whether a layer's mixer is of a class with this name, or of one that derives from it."""
    mixer = getattr(layer, "mixer", None) or _attention_of(layer)
    return any(base.__name__ == name for base in type(mixer).__mro__)


def _has_window(layer: Any) -> bool:
    from megatron_prefix.layers.attention import window_of

    attention = _attention_of(layer)
    return hasattr(attention, "core_attention") and window_of(attention) is not None


def _variant(config: Any) -> str | None:
    variant: str | None = getattr(config, "experimental_attention_variant", None)
    return variant


def _has_own_indexer(config: Any) -> bool:
    return hasattr(config, "index_num_attention_heads")


def _is_own_sparse(layer: Any) -> bool:
    return _has_mixer(layer, "DSAMultiLatentAttention")


KINDS: tuple[FeatureKind, ...] = (
    FeatureKind(
        f"{_FOLDER}streams.kind:Streams",
        lambda config: (
            getattr(config, "enable_mhc_connections", False)  # of Megatron's main branch
            or getattr(config, "enable_hyper_connections", False)  # of its dev branch
        ),
        lambda _: False,
    ),
    FeatureKind(
        f"{_FOLDER}mtp.kind:NextToken",
        lambda config: bool(getattr(config, "mtp_num_layers", None)),
        lambda _: False,
    ),
    FeatureKind(
        f"{_FOLDER}own_gdn.kind:OwnGatedDeltaNet",
        lambda config: hasattr(config, "own_delta_layers"),
        lambda layer: hasattr(_attention_of(layer), "linear_attn"),
    ),
    FeatureKind(f"{_FOLDER}own_dsa.kind:OwnDSA", _has_own_indexer, _is_own_sparse),
    FeatureKind(f"{_FOLDER}own_dsa.kind:FollowingDSA", _has_own_indexer, _is_own_sparse),
    FeatureKind(
        f"{_FOLDER}dsa.kind:DSA",
        lambda config: _variant(config) == "dsa",
        lambda layer: hasattr(getattr(_attention_of(layer), "core_attention", None), "indexer"),
    ),
    FeatureKind(
        f"{_FOLDER}recurrent.mamba:Mamba2",
        lambda _: False,
        lambda layer: _has_mixer(layer, "MambaMixer"),
        symbol="M",
    ),
    FeatureKind(
        f"{_FOLDER}recurrent.gdn:GatedDeltaNet",
        lambda config: _variant(config) in ("gated_delta_net", "gdn"),
        lambda layer: _has_mixer(layer, "GatedDeltaNet"),
        symbol="G",
    ),
    *(
        FeatureKind(
            f"{_FOLDER}kda.kind:{name}",
            lambda config: hasattr(config, "kimi_kda_layers"),
            lambda layer: hasattr(_attention_of(layer), "is_kda"),
        )
        for name in ("KimiDelta", "KimiLatents")
    ),
    FeatureKind(
        f"{_FOLDER}mla.kind:MLA",
        lambda config: bool(getattr(config, "multi_latent_attention", False)),
        lambda layer: hasattr(_attention_of(layer), "linear_kv_up_proj"),
    ),
    FeatureKind(
        f"{_FOLDER}windows.kind:Window",
        lambda config: isinstance(getattr(config, "window_size", None), Sequence),
        _has_window,
    ),
    FeatureKind(
        f"{_FOLDER}experts.kind:Experts",
        lambda config: bool(getattr(config, "num_moe_experts", None)),
        lambda layer: hasattr(getattr(layer, "mlp", None), "router"),
        symbol="E",
    ),
)
"""Tried before the core's kinds, in this order."""


def replays_routes(config: Any) -> bool:
    """Whether routers have Megatron's RouterReplay, or verl's older one."""
    names = ("moe_enable_routing_replay", "enable_routing_replay")
    return any(bool(getattr(config, name, False)) for name in names)


def may_replay(config: Any) -> bool:
    """Whether routers of a model may record routes or follow them, also by slime's or miles'
    queues; the same on all ranks."""
    if os.environ.get("ENABLE_ROUTING_REPLAY") == "1" or replays_routes(config):
        return True
    miles = getattr(sys.modules.get("miles.utils.replay_base"), "all_replay_managers", ())
    return any(manager.enabled for manager in miles)


def replays_choices(config: Any) -> bool:
    """Whether indexers of a trainer's own sparse attention may replay, by miles' queues; the same
    on all ranks."""
    replay = sys.modules.get("miles.utils.replay_base")
    manager = getattr(replay, "indexer_replay_manager", None)
    return _has_own_indexer(config) and bool(getattr(manager, "enabled", False))


def has_indexer_loss(config: Any) -> bool:
    """Whether the indexers of Megatron's sparse attention have a loss (features/dsa/loss.py)."""
    return _variant(config) == "dsa" and bool(getattr(config, "dsa_indexer_loss_coeff", None))


def _is_routed(_: PrefixConfig, rank: Rank) -> bool:
    if not rank.model.has_experts or may_replay(rank.config):
        return rank.model.has_experts
    routers = load(f"{_FOLDER}experts.routers:routers")
    every = [router for model in rank.language_models for router in routers(model).values()]
    names = ("routing_replay", "router_replay")
    return any(getattr(router, name, None) is not None for router in every for name in names)


def _may_have_images(_: PrefixConfig, rank: Rank) -> bool:
    return any(map(is_of_images, rank.models, rank.language_models))


def is_of_images(model: Any, inner: Any) -> bool:
    """Nothing is around most models but Megatron's wrappers: those have no images."""
    from megatron_prefix.megatron.families import calls_parent, has_mrope

    if has_mrope(inner):
        return True
    outer = model
    while outer is not inner and type(outer).__module__.startswith("megatron.core."):
        children = [*outer.children()]
        if len(children) != 1:
            break
        outer = children[0]
    if outer is inner and calls_parent(inner) is None:
        return False
    has_images: bool = load(f"{_FOLDER}vision.models:has_images")(model, inner)
    return has_images


def _may_have_quantisers(*_: Any) -> bool:
    """Nobody can have made one before that is imported."""
    return "modelopt.torch.quantization.nn.modules.tensor_quantizer" in sys.modules


def _uses_host(config: PrefixConfig, _: Rank) -> bool:
    """Memory "auto" keeps a given budget so, a plan file names policies."""
    chooses = config.memory == "auto" and config.memory_budget is not None
    is_planned = config.plan_file is not None
    return config.memory == "offload" or config.cache_host_layers > 0 or chooses or is_planned


def _has_further_layer(_: PrefixConfig, rank: Rank) -> bool:
    return bool(rank.model.looks_ahead) or any(
        hasattr(model, "mtp") for model in rank.language_models
    )


def _may_cross(config: PrefixConfig, rank: Rank) -> bool:
    """Where a trainer's groups do not say which ranks are data-parallel, that has to be said."""
    is_alone = rank.siblings is not None and rank.siblings.size() == 1
    return config.across != "off" and config.mode in ("auto", "on") and not is_alone


def _by_plan(*_: Any) -> bool:
    """Not wanted before a plan asks for it; see `policies`."""
    return False


def may_have_graphs(config: PrefixConfig, rank: Rank) -> bool:
    """Where they are left to measurements, on a GPU."""
    if isinstance(config.graph_tokens, str):
        return rank.device.type == "cuda"
    return config.graph_tokens > 0


PARTS: tuple[Feature, ...] = (
    # First: parts below it add to what it makes when an attempt begins.
    Feature("experts", f"{_FOLDER}experts.part:Routers", lambda _, rank: rank.model.has_experts),
    Feature("prompts across data-parallel ranks", f"{_FOLDER}across.part:Crossing", _may_cross),
    Feature(
        "multi-token prediction",
        f"{_FOLDER}mtp.part:MultiToken",
        _has_further_layer,
        takes=("mtp_kwargs",),
    ),
    Feature("the replay of routes", f"{_FOLDER}replay.part:RoutedStep", _is_routed),
    Feature(
        "the overlap of reductions with backwards",
        f"{_FOLDER}overlap.part:Overlap",
        lambda _, rank: rank.overlaps and not rank.forward_only,
    ),
    Feature(
        "the use of CUDA graphs",
        f"{_FOLDER}graphs.part:Graphs",
        lambda config, rank: may_have_graphs(config, rank) and not rank.forward_only,
        needed=False,
    ),
    Feature(
        "packs of Kimi Delta Attention",
        f"{_FOLDER}kda.part:KimiPacks",
        lambda _, rank: hasattr(rank.config, "kimi_kda_layers"),
    ),
    Feature(
        "the loss of sparse attention's indexer",
        f"{_FOLDER}dsa.loss:IndexerLoss",
        lambda _, rank: has_indexer_loss(rank.config) and not rank.forward_only,
    ),
    Feature(
        "the replay of an indexer's choices",
        f"{_FOLDER}own_dsa.replay:IndexerReplay",
        lambda _, rank: replays_choices(rank.config),
    ),
    Feature("quantisers", f"{_FOLDER}qat.quantisers:Quantisers", _may_have_quantisers),
    Feature(
        "context parallelism",
        f"{_FOLDER}context_parallel.part:ContextParallel",
        lambda _, rank: rank.groups.cp.size() > 1,
    ),
    Feature("host memory", f"{_FOLDER}host.part:HostMemory", _uses_host, policies=("offload",)),
    Feature(
        "images",
        f"{_FOLDER}vision.part:Images",
        _may_have_images,
        takes=("decoder_input", "visual_pos_masks", "deepstack_visual_embeds"),
    ),
    Feature(
        "memory policy recompute_act",
        f"{_FOLDER}recompute_act.part:RecomputeAct",
        _by_plan,
        policies=("recompute_act",),
    ),
)
"""In the order in which each step asks them."""
TAKEN = tuple(name for feature in PARTS for name in feature.takes)
"""Keywords of language models that features answer for."""

COST_FILE = f"{_FOLDER}measure.cost_file:read_costs"
"""Reads the file that `PrefixConfig.cost_file` names."""
PLAN_FILE = f"{_FOLDER}plan_files.plan_file:PlanFile"
"""The plan that `PrefixConfig.plan_file` names, which a planner takes instead of making one."""
CHUNK_LENGTHS = f"{_FOLDER}chunk_lengths.chooser:ChunkChooser"
"""What chooses lengths of chunks for a planner, if `PrefixConfig.chunk_tokens` is "auto"."""
DEALING = f"{_FOLDER}dealing.hooks:deal_after_import"
"""For no step: what importing `megatron_prefix.auto.whole_groups` calls."""


def _may_measure(config: PrefixConfig, _: bool) -> bool:
    """Seconds in mode "auto", bytes on a GPU; a file has both."""
    from megatron_prefix.device.memory import may_count

    is_asked = config.mode == "auto" or config.cost_file is not None
    return config.mode != "off" and (is_asked or may_count())


AROUND: tuple[FeatureAround, ...] = (
    FeatureAround(
        "the comparison of both schedules",
        f"{_FOLDER}verify.around:Verify",
        lambda config, _: config.verify > 0 and config.mode in ("auto", "on"),
    ),
    FeatureAround("measuring", f"{_FOLDER}measure.around:Measure", _may_measure, needed=False),
    FeatureAround(
        "the watch over first steps",
        f"{_FOLDER}watch.around:Watch",
        lambda config, looks_first: looks_first and config.mode != "off",
    ),
    FeatureAround(
        "the watchdog",
        f"{_FOLDER}watchdog.around:WatchedCalls",
        lambda config, _: config.watchdog_minutes > 0 and config.mode != "off",
        needed=False,
    ),
    FeatureAround(
        "totals of the run",
        f"{_FOLDER}totals.around:Totals",
        lambda config, looks_first: looks_first and config.mode in ("auto", "on"),
        needed=False,
    ),
)
"""From the innermost on."""


def load(path: str) -> Any:
    """What a path of this table names; its module is imported now if it has not been.

    Args:
        path: "module:name".

    Raises:
        ImportError: the module, or what it needs, cannot be imported.
    """
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
