"""Models with ModelOpt's fake quantisation, as QAT trainers have them.

The real package, from the registry (tests/core/trainers/modelopt.txt). It gives quantisers to
transformer-engine's core attention only; `with_attention` makes it give them to the lab's.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron_prefix.features.qat.quantisers import QUANTISER
from megatron_prefix.lab.models import build
from megatron_prefix.lab.models.build import unwrap

LARGEST = 3.0
"""Of all inputs of a linear layer, so that few are clipped."""


def recipe(name: str) -> dict[str, Any]:
    """One of ModelOpt's configurations by name, to change."""
    import modelopt.torch.quantization as mtq

    return copy.deepcopy(getattr(mtq, name))


def quantise(model: Any, config: dict[str, Any]) -> None:
    """Puts quantisers into a language model; static scales of inputs are made up."""
    import modelopt.torch.quantization as mtq

    mtq.quantize(model, config, lambda _: None)
    for name, one in quantisers(model):
        static = one.is_enabled and not one._dynamic and not one.is_mx_format
        if static and "weight_quantizer" not in name:
            one.amax = torch.tensor(LARGEST)


def quantisers(model: Any) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if QUANTISER in {f"{base.__module__}.{base.__qualname__}" for base in type(module).__mro__}:
            yield name, module


@contextlib.contextmanager
def quantised(change: Callable[[Any], None]) -> Iterator[None]:
    """Models that the lab builds meanwhile are changed before they get their wrappers."""
    make = build.build_chunk

    def changed(*given: Any) -> Any:
        chunk = make(*given)
        change(unwrap(chunk))
        return chunk

    with mock.patch.object(build, "build_chunk", changed):
        yield


def with_attention() -> None:
    """ModelOpt gives quantisers to the lab's core attention from now on, in a class that goes by
    the name of its own for transformer-engine's."""
    from modelopt.torch.quantization.nn import QuantModule, QuantModuleRegistry, TensorQuantizer

    from megatron_prefix.lab.models.local import LocalAttention

    class _QuantTEDotProductAttention(QuantModule):
        def _setup(self) -> None:
            for one in "qkv":
                setattr(self, f"{one}_bmm_quantizer", TensorQuantizer())

        def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any) -> Any:
            pairs = zip("qkv", (query, key, value), strict=True)
            given = [getattr(self, f"{one}_bmm_quantizer")(tensor) for one, tensor in pairs]
            return super().forward(*given, *args, **kw)

    _QuantTEDotProductAttention.__module__ = "modelopt.torch.quantization.plugins.megatron"
    _QuantTEDotProductAttention.__qualname__ = "_QuantTEDotProductAttention"
    QuantModuleRegistry.register({LocalAttention: "LocalAttention"})(_QuantTEDotProductAttention)
