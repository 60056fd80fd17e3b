"""What stands around layers of multi-token prediction: methods of Megatron's, by release, or of a
trainer's in their place.  Pure.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

from megatron_prefix.errors import Reason
from megatron_prefix.features.mtp.patches import KEYWORD, further_tokens, is_verls
from megatron_prefix.features.mtp.tables import Division
from megatron_prefix.layers.kind import owner
from megatron_prefix.refusals.table import OTHER_AHEAD, OWN_POSTPROCESS

_MODEL = "megatron.core.models.gpt.gpt_model.GPTModel"
_BLOCK = "megatron.core.transformer.multi_token_prediction.MultiTokenPredictionBlock"
_LAYER = "megatron.core.transformer.multi_token_prediction.MultiTokenPredictionLayer"


class Substitute:
    """What takes the place of a method in segments.

    Attributes:
        stock: the method.
        block: what has put it there.
    """

    stock: Any
    block: Any


def division(model: Any) -> Division:
    """How this release of Megatron, or what a trainer has put in its place, divides the loss of a
    microbatch."""
    from megatron_prefix.layers.releases import is_since

    per_token = bool(model.config.calculate_per_token_loss)
    if has_keyword(model):
        return Division(per_token, clamps=False, clamps_mean=False)
    clamps = _process() is not None or is_verls(in_place(model, "_postprocess"))
    return Division(per_token, clamps, clamps_mean=is_since("0.18"))


def loss_scale() -> float:
    """By which Megatron multiplies the loss of a rank, as it has been set and rounded; the host
    waits for the device."""
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    return float(MTPLossAutoScaler.main_loss_backward_scale)


class WithoutLabels(Enum):
    """What Megatron does where calls have no labels."""

    FAILS = "before 0.17"
    NO_LOSS = "before 0.19: the layer runs, and has no loss of its own"
    MAKES_THEM = "of the tokens"


def without_labels(model: Any = None, calls: Sequence[Any] = ()) -> WithoutLabels:
    """What this release of Megatron does, or what a trainer has put in its place in a model.

    Args:
        calls: of the model.
    """
    process = _process()
    if model is not None and has_keyword(model):
        return WithoutLabels.MAKES_THEM if are_run(model, calls) else WithoutLabels.NO_LOSS
    if model is not None and is_verls(in_place(model, "_postprocess")):
        return WithoutLabels.NO_LOSS
    if process is None:
        return WithoutLabels.FAILS
    makes = "input_ids" in inspect.signature(process).parameters
    return WithoutLabels.MAKES_THEM if makes else WithoutLabels.NO_LOSS


def are_run(model: Any, calls: Sequence[Any]) -> bool:
    """Whether calls of a model run its layers: with slime's and miles' keyword, if that is
    given."""
    return not has_keyword(model) or any(further_tokens(call) is not None for call in calls)


def has_keyword(model: Any) -> bool:
    """Whether a model has slime's and miles' keyword."""
    method = in_place(model, "_postprocess")
    return method is not None and KEYWORD in inspect.signature(method).parameters


def detaches_head(model: Any) -> bool:
    """Whether no gradient of further labels goes into the output layer."""
    if has_keyword(model) or getattr(model.config, "mtp_detach_heads", False):  # since 0.19
        return True
    return _process() is None and is_verls(in_place(model, "_postprocess"))


def refusals(model: Any) -> Iterator[Reason]:
    """What is refused of a model chunk that has the layer; in every step, since trainers replace
    these methods for the time of a pass."""
    block = getattr(model, "mtp", None)
    if model.config.mtp_num_layers and model.post_process != (block is not None):
        yield OTHER_AHEAD.given("another stage than the last, or by none")
    if block is None:
        return
    if hasattr(model, "_postprocess") and not _follows_rule(model):
        yield OWN_POSTPROCESS.given(type(model).__name__)
    if not _is(block, "forward", _BLOCK):
        yield OTHER_AHEAD.given(type(block).__name__)
    num = model.config.mtp_num_layers
    if num and len(block.layers) != (1 if repeats(block) else num):
        yield OTHER_AHEAD.given("more or fewer layers than mtp_num_layers says")
    for layer in block.layers:
        if not (_is(layer, "forward", _LAYER) and _is(layer, "_get_embeddings", _LAYER)):
            yield OTHER_AHEAD.given(type(layer).__name__)
        if getattr(layer, "mhc_enabled", False):  # Megatron's dev branch
            yield OTHER_AHEAD.given("a layer with several residual streams")


def _follows_rule(model: Any) -> bool:
    """Whether a `_postprocess` does what segments do."""
    if not _is(model, "_postprocess", _MODEL) or not has_keyword(model):
        return _is(model, "_postprocess", _MODEL)
    from megatron_prefix.features.mtp.keyword_probe import follows_rule

    return follows_rule(in_place(model, "_postprocess").__func__)


def repeats(block: Any) -> bool:
    """Whether one layer runs for every further label (since 0.17)."""
    return bool(getattr(block, "mtp_use_repeated_layer", False))


def _is(module: Any, method: str, name: str) -> bool:
    """Whether a method is that of a class, what takes its place in segments, or verl's; nobody's
    that was put into the class: mcore_bridge's runs one layer several times."""
    if substitute_of(module, method) is not None:
        return True
    return is_verls(vars(module).get(method)) or owner(module, method, patches=()) == name


def substitute_of(module: Any, method: str) -> Substitute | None:
    """What is in the place of a method in segments, if anything is."""
    substitute = getattr(vars(module).get(method), "__self__", None)
    return substitute if isinstance(substitute, Substitute) else None


def in_place(module: Any, method: str) -> Any:
    """What Megatron calls outside of segments; None: a module has no such method."""
    substitute = substitute_of(module, method)
    return getattr(module, method, None) if substitute is None else substitute.stock


def _process() -> Any:
    """Megatron's function that makes the loss of the layer's output; None before 0.17."""
    from megatron.core.transformer import multi_token_prediction

    return getattr(multi_token_prediction, "process_mtp_loss", None)
