"""Rollouts and model of a job, for the verbs that run a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.lab.data.rollouts import Group, Rollout, dense_vocabulary
from megatron_prefix.lab.models import presets
from megatron_prefix.lab.models.build import build_model, unwrap
from megatron_prefix.lab.models.presets import ModelSpec
from megatron_prefix.lab.models.weights import global_parameters
from megatron_prefix.lab.plans.placement import place
from megatron_prefix.lab.platforms.exact import by_definition
from megatron_prefix.lab.runtime.groups import (
    MESSAGE_TIMEOUT_MINUTES,
    World,
    initialize,
    shutdown,
)
from megatron_prefix.lab.runtime.layout import Layout
from megatron_prefix.layers.model import cost_of


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
        finally:
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
            exact = local.build(spec, layout, "float32")
            for chunk in exact:
                by_definition(chunk)
            with torch.no_grad():
                for ours, theirs in zip(exact, chunks, strict=True):
                    values = dict(global_parameters(unwrap(theirs)))
                    for name, parameter in global_parameters(unwrap(ours)):
                        parameter.copy_(values[name])
            return exact

        return make


def place_groups(
    groups: Sequence[Group],
    spec: ModelSpec,
    layout: Layout,
    config: PrefixConfig,
    *,
    stock: bool,
) -> list[tuple[Group, ...]]:
    """The groups of every data-parallel rank; every rank gets the same answer.

    A rank without rollouts gets one position without loss: Megatron's schedules need a microbatch,
    and the other ranks wait for this one when gradients are reduced.

    Args:
        groups: of one optimizer update.
        spec: the model's shape.
        layout: of the job.
        config: of the prefix schedule.
        stock: whether Megatron's own schedule runs these rollouts, too.

    Raises:
        UserError: the rollouts cannot be placed as the layout needs: equally many on every rank
            (if ranks share experts and Megatron's own schedule may run, or for global_aux_loss),
            or multiples of the pipeline's size (for Megatron's interleaved schedule).
    """
    options = config.tree_options(layout.alignment)
    interleaved = stock and layout.vpp > 1
    method = "auto" if config.mode in ("auto", "on") else "tokens"
    side_by_side = layout.ep > 1 and (stock or config.mode != "on")
    counted_together = (
        spec.moe_router_load_balancing_type == "global_aux_loss" and spec.moe_aux_loss_coeff > 0
    )
    if layout.dp > 1 and (interleaved or side_by_side or counted_together):
        method = "equal"
    placed = place(groups, layout.dp, cost_of(spec), options, method)
    first = groups[0].rollouts[0]
    idle = Rollout("idle", "0", first.tokens[:2], prompt_len=1, loss=(), reward=0.0)
    num = sum(len(group.rollouts) for group in placed.ranks[0])
    if interleaved and num % layout.pp:
        raise UserError(
            f"--vpp {layout.vpp}: Megatron's interleaved schedule needs the rollouts of a rank in"
            f" multiples of --pp {layout.pp}, and there are {num}; take other groups, or use"
            " --vpp 1"
        )
    return [rank or (Group("idle", (idle,)),) for rank in placed.ranks]


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
