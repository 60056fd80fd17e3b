"""Models with ModelOpt's fake quantisation, as QAT trainers have them.

The real package, from the registry (tests/core/trainers/modelopt.txt). It gives quantisers to
transformer-engine's core attention only; `with_attention` makes it give them to the lab's.
"""

import contextlib
import copy
from collections import Counter
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
INT8_WEIGHTS = {"num_bits": 8, "axis": 0}
INT4_BLOCKS = {"num_bits": 4, "block_sizes": {-1: 32, "type": "static"}}
TOKENS = {"num_bits": (4, 3), "axis": None, "type": "dynamic", "block_sizes": {-1: None}}
TENSOR = {"num_bits": 8, "axis": None, "type": "dynamic"}
KEYS = {"num_bits": (4, 3), "axis": None}
QKV = [{"quantizer_name": "*_bmm_quantizer", "cfg": KEYS}]
RECIPES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "weights": ("INT8_WEIGHT_ONLY_CFG", []),
    "blocks of weights": ("INT4_BLOCKWISE_WEIGHT_ONLY_CFG", []),
    "by token": ("FP8_PER_CHANNEL_PER_TOKEN_CFG", []),
    "queries, keys and values": ("FP8_DEFAULT_CFG", QKV),
    "a scale of a whole tensor": (
        "INT8_DEFAULT_CFG", [{"quantizer_name": "*input_quantizer", "cfg": TENSOR}],
    ),
    "mixed": ("FP8_DEFAULT_CFG", [
        {"quantizer_name": "*linear_qkv.weight_quantizer", "cfg": INT8_WEIGHTS},
        {"quantizer_name": "*linear_qkv.input_quantizer", "cfg": TOKENS},
        {"quantizer_name": "*linear_fc2.weight_quantizer", "cfg": INT4_BLOCKS}, *QKV,
    ]),
}  # fmt: skip
"""Configurations of ModelOpt's, and quantisers that are set otherwise."""


def recipe(name: str) -> dict[str, Any]:
    """One of ModelOpt's configurations by name, to change."""
    import modelopt.torch.quantization as mtq

    return copy.deepcopy(getattr(mtq, name))


def by_recipe(name: str) -> contextlib.AbstractContextManager[None]:
    """Models that are built meanwhile are quantised by one of `RECIPES`, every kind of quantiser
    of it in every layer."""
    base, more = RECIPES[name]

    def change(model: Any) -> None:
        config = recipe(base)
        config["quant_cfg"] += more
        quantise(model, config)
        names = [name for name, one in quantisers(model) if one.is_enabled]
        on = Counter(name.rpartition(".")[2] for name in names)
        linear = ["weight_quantizer", "input_quantizer"][: 1 if "WEIGHT_ONLY" in base else 2]
        keys = [f"{one}_bmm_quantizer" for one in "qkv"] if QKV[0] in more else []
        assert on.keys() == {*linear, *keys}
        layers = len(model.decoder.layers)
        assert all(on[kind] >= layers * (1 if kind in keys else 4) for kind in on)

    return quantised(change)


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
