"""What the verbs that run a model have in common: rollouts and model of one rank's job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_prefix.data.rollouts import Group, dense_vocabulary
from megatron_prefix.models import presets
from megatron_prefix.models.build import build_model, unwrap
from megatron_prefix.models.presets import ModelSpec
from megatron_prefix.models.weights import global_parameters
from megatron_prefix.runtime.layout import Layout


@dataclass(frozen=True)
class ModelOptions:
    """How a job's model is built.

    Attributes:
        model: preset or path of a Hugging Face config.json.
        dtype: "float64", "float32" or "bfloat16".
        device: "cpu" or "cuda".
        recompute: "none", "full" or "selective".
        layer_spec: "auto", "local" or "te".
        seed: of the weights.
        overrides: fields of ModelSpec to change.
    """

    model: str
    dtype: str = "float32"
    device: str = "cpu"
    recompute: str = "none"
    layer_spec: str = "auto"
    seed: int = 1234
    overrides: tuple[tuple[str, Any], ...] = ()

    def build(self, spec: ModelSpec, layout: Layout, dtype: str | None = None) -> list[Any]:
        """The rank's model chunks, wrapped in DDP."""
        device = "cuda" if self.device == "cuda" else "cpu"
        return build_model(
            spec, layout=layout, dtype=dtype or self.dtype, device=device,
            layer_spec=self.layer_spec, recompute=self.recompute, seed=self.seed,
        )  # fmt: skip

    def reference(
        self, spec: ModelSpec, layout: Layout, chunks: list[Any]
    ) -> Callable[[], list[Any]]:
        """Builds the model again in fp32, with the weights that `chunks` have now."""

        def make() -> list[Any]:
            # Megatron's own layers: their fp32 products are fp32 and not TF32.
            exact = replace(self, layer_spec="local").build(spec, layout, "float32")
            with torch.no_grad():
                for ours, theirs in zip(exact, chunks, strict=True):
                    values = dict(global_parameters(unwrap(theirs)))
                    for name, parameter in global_parameters(unwrap(ours)):
                        parameter.copy_(values[name])
            return exact

        return make


def fit_vocabulary(options: ModelOptions, groups: Sequence[Group]) -> tuple[ModelSpec, list[Group]]:
    """The model's shape, and the rollouts in its vocabulary.

    A preset without a vocabulary (the tiny ones) takes that of the rollouts, their token ids mapped
    one to one to 0..V-1, which keeps every shared prefix shared.
    """
    spec = presets.resolve(options.model, **dict(options.overrides))
    if spec.vocab_size is not None:
        return spec, list(groups)
    mapped, size, _ = dense_vocabulary(groups)
    return spec.with_vocab(size), mapped
