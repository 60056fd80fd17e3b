"""Quantisers that ModelOpt puts into Megatron's layers for quantisation-aware training.

A linear layer then multiplies a fake-quantised weight by fake-quantised inputs. What becomes of a
weight depends on no token. What becomes of an input depends on its own token alone if the scale is
static (calibrated before), or is of that token, or of a block of its features; a scale that is
computed of the whole tensor depends on all tokens that are computed together. In front of core
attention queries, keys and values may have quantisers, too ("KV cache"); segments run those.

Read from nvidia-modelopt 0.47 (`forward` and `_fake_quantize` of its TensorQuantizer): a quantiser
is told by its class and its own attributes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_prefix.device.modules import modules_of
from megatron_prefix.errors import CANNOT_RUN, Reason
from megatron_prefix.layers.attention import QUANTISERS
from megatron_prefix.parts import StepPart
from megatron_prefix.refusals.table import (
    QUANTISER_CALIBRATES,
    QUANTISER_DYNAMIC,
    QUANTISER_MLA,
    QUANTISER_OTHER,
)

QUANTISER = "modelopt.torch.quantization.nn.modules.tensor_quantizer.TensorQuantizer"
_OF_WEIGHTS = "weight_quantizer"
_EXPONENTS = (8, 0)
"""Scales that are powers of two: those of MX formats, which have no second scale of a tensor."""


class Quantisers(StepPart):
    """Looks at the quantisers of every step."""

    def check_model(self, chunk: int) -> None:
        """See StepPart; in every step: quantisers are calibrated, and turned off, between steps."""
        for reason in refusals(self.rank.language_models[chunk]):
            raise reason.error(CANNOT_RUN)


def refusals(model: Any) -> Iterator[Reason]:
    """What is refused of a language model's quantisers, in every step: they are calibrated, and
    turned on and off, between steps."""
    kinds = {kind for kind in {type(one) for one in modules_of(model)} if _is_quantiser(kind)}
    latent = getattr(model.config, "multi_latent_attention", False)
    for name, module in model.named_modules() if kinds else ():
        if type(module) not in kinds or module._disabled:
            continue
        parts = name.split(".")
        in_attention = not {*QUANTISERS}.isdisjoint(parts)
        if module._if_calib and not module._dynamic:
            yield QUANTISER_CALIBRATES.given(name)
        elif not module._if_quant or any(_OF_WEIGHTS in part for part in parts):
            continue
        elif in_attention and latent:
            yield QUANTISER_MLA.given(name)
        elif (what := _unknown(module)) is not None:
            yield QUANTISER_OTHER.given(name, what)
        elif not (_has_static_scale(module) or _is_by_token(module, parts, in_attention)):
            yield QUANTISER_DYNAMIC.given(name)


def _is_quantiser(kind: type) -> bool:
    return QUANTISER in {f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__}


def _unknown(module: Any) -> str | None:
    """What a quantiser of inputs has that is not known here; None: nothing."""
    if not module._fake_quant:
        return "real quantisation"
    if getattr(module, "backend", None) is not None:
        return f"backend {module.backend}"
    if getattr(module, "_bias", None):
        return "an offset"
    blocks = module._block_sizes or {}
    sizes = {axis: size for axis, size in blocks.items() if isinstance(axis, int)}
    if {*sizes} - {-1}:
        return "blocks of several positions"
    if any(sizes.values()) and blocks.get("type") != "dynamic":
        return "blocks with static scales, for inputs of one shape"  # it says so itself
    return None


def _has_static_scale(module: Any) -> bool:
    """Whether a scale, of a tensor or of each feature, was set before: dynamic blocks, too, have
    a second one of the tensor."""
    if getattr(module, "_use_constant_amax", False):
        return True
    largest = getattr(module, "_amax", None)
    return largest is not None and largest.numel() in (1, *largest.shape[-1:])


def _is_by_token(module: Any, parts: list[str], in_attention: bool) -> bool:
    """Whether scales are computed of each token's own features, or of blocks of them."""
    if getattr(module, "_amax", None) is not None:  # for each position: of another call
        return False
    blocks, axis = module._block_sizes or {}, module._axis
    if blocks.get("type") == "dynamic" and blocks.get("scale_bits") == _EXPONENTS:
        return True
    # Queries come with a batch, or without in packs, and an axis is counted once for all calls.
    if in_attention or blocks.get("type") == "dynamic":
        return False
    axes = (axis,) if isinstance(axis, int) else axis
    # Inputs are [positions, batch, features], of experts [tokens, features].
    of_token = (0,) if "experts" in parts else (0, 1)
    return blocks.get(-1, 0) is None or axes == of_token
