"""Rollouts and model of a job, for the verbs that run a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_prefix.lab.data.rollouts import Group, dense_vocabulary
from megatron_prefix.lab.models import presets
from megatron_prefix.lab.models.build import build_model, unwrap
from megatron_prefix.lab.models.presets import ModelSpec
from megatron_prefix.lab.models.weights import global_parameters
from megatron_prefix.lab.platforms.exact import by_definition
from megatron_prefix.lab.runtime.groups import (
    MESSAGE_TIMEOUT_MINUTES,
    World,
    initialize,
    shutdown,
)
from megatron_prefix.lab.runtime.layout import Layout


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
        message_timeout_minutes: see `runtime.initialize`.
        overlap_grad_reduce: reduce gradients during backwards.
        load_hf: folder of a Hugging Face checkpoint; None for random weights.
        sdpa: attention by torch's `scaled_dot_product_attention`; see `build_model`.
    """

    model: str
    dtype: str = "float32"
    device: str = "cpu"
    recompute: str = "none"
    layer_spec: str = "auto"
    seed: int = 1234
    overrides: tuple[tuple[str, Any], ...] = ()
    message_timeout_minutes: float = MESSAGE_TIMEOUT_MINUTES
    overlap_grad_reduce: bool = False
    load_hf: str | None = None
    sdpa: bool = False

    def spec(self) -> ModelSpec:
        """The model's shape.

        Raises:
            UserError: no such model, or overrides that contradict.
        """
        return presets.resolve(self.model, **dict(self.overrides))

    @contextmanager
    def joined(self, layout: Layout) -> Iterator[World]:
        """Around a rank's part of a job: joins it (see `runtime.initialize`), and leaves it."""
        try:
            yield initialize(layout, self.device, self.seed, self.message_timeout_minutes)
        except BaseException:
            shutdown(failed=True)
            raise
        shutdown()

    def build(self, spec: ModelSpec, layout: Layout, dtype: str | None = None) -> list[Any]:
        """The rank's model chunks, wrapped in DDP."""
        device = "cuda" if self.device == "cuda" else "cpu"
        return build_model(
            spec, layout=layout, dtype=dtype or self.dtype, device=device,
            layer_spec=self.layer_spec, recompute=self.recompute, seed=self.seed,
            overlap_grad_reduce=self.overlap_grad_reduce, load_hf=self.load_hf, sdpa=self.sdpa,
        )  # fmt: skip

    def reference(
        self, spec: ModelSpec, layout: Layout, chunks: list[Any]
    ) -> Callable[[], list[Any]]:
        """Builds the model again in fp32, with the weights that `chunks` have now."""

        def make() -> list[Any]:
            # Megatron's own layers: their fp32 products are fp32 and not TF32.
            local = replace(self, layer_spec="local", load_hf=None)
            exact = local.build(replace(spec, fp8=None), layout, "float32")
            for chunk in exact:
                by_definition(chunk)
            with torch.no_grad():
                for ours, theirs in zip(exact, chunks, strict=True):
                    values = dict(global_parameters(unwrap(theirs)))
                    for name, parameter in global_parameters(unwrap(ours)):
                        parameter.copy_(values[name])
            return exact

        return make


def fit_vocabulary(options: ModelOptions, groups: Sequence[Group]) -> tuple[ModelSpec, list[Group]]:
    """The model's shape, and the rollouts in its vocabulary.

    A preset without a vocabulary (the tiny ones) takes that of the rollouts: their token ids are
    mapped to 0..V-1, so shared prefixes stay shared.
    """
    spec = options.spec()
    if spec.vocab_size is not None:
        return spec, list(groups)
    mapped, size, _ = dense_vocabulary(groups)
    return spec.with_vocab(size), mapped
