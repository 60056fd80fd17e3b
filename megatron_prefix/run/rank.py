"""One rank in one call of the schedule: its model, its place in the job, and numbers of its model.

Whatever asks for numbers of the model (FLOPs, bytes, vocabulary, layers) asks here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron_prefix.layers.model import cost_of, footprint_of
from megatron_prefix.megatron.decoder import pattern_of, recomputes
from megatron_prefix.megatron.install import language_model
from megatron_prefix.moe.versions import has_global_loss
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.plan.footprint import Execution, Footprint


@dataclass(frozen=True, eq=False)
class Rank:
    """What a call of the schedule finds on one rank; made by `of`.

    Attributes:
        models: the rank's model chunks as the trainer knows them, wrappers included.
        groups: process groups, Megatron's own where the trainer gave none.
        language_models: the language models inside the wrappers.
        config: Megatron's configuration of the model.
        device: where the model is.
    """

    models: list[Any]
    groups: ProcessGroupCollection
    language_models: list[Any]
    config: Any
    device: torch.device

    @classmethod
    def of(cls, models: Sequence[Any], groups: ProcessGroupCollection | None = None) -> Rank:
        """The rank that holds these model chunks.

        Args:
            models: wrapped or not.
            groups: the trainer's; None: Megatron's own, which must be there.
        """
        inner, config = [language_model(model) for model in models], get_model_config(models[0])
        device = next(models[0].parameters()).device
        return cls(list(models), groups or default_groups(), inner, config, device)

    # Its place in the job ------------------------------------------------------------------------

    @functools.cached_property
    def stage(self) -> int:
        """Its place in the pipeline, from 0."""
        return self.groups.pp.rank()

    @functools.cached_property
    def num_stages(self) -> int:
        """Ranks of its pipeline."""
        return self.groups.pp.size()

    @property
    def is_first(self) -> bool:
        """Whether it holds the embedding: its model calls have the tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it holds the output layer: its model calls have the labels."""
        return self.stage == self.num_stages - 1

    @property
    def sequence_ranks(self) -> int:
        """Tensor-parallel ranks that share the positions of a segment (sequence parallelism)."""
        return self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1

    @property
    def alignment(self) -> int:
        """Segment boundaries are multiples of it: tp under sequence parallelism, times 2*cp."""
        cp = self.config.context_parallel_size
        return self.sequence_ranks * (2 * cp if cp > 1 else 1)

    # Process groups ------------------------------------------------------------------------------

    @functools.cached_property
    def experts(self) -> Any:
        """Ranks that share experts and so meet in every action; None: nobody but this one.

        A trainer's own collection of groups need not have them.
        """
        group = getattr(self.groups, "ep", None)
        group = group or parallel_state.get_expert_model_parallel_group(check_initialized=False)
        return group if group is not None and group.size() > 1 else None

    @property
    def given_data_ranks(self) -> Any:
        """Data- and context-parallel ranks (`dp_cp`); None where the trainer's groups lack them."""
        return getattr(self.groups, "dp_cp", None)

    @property
    def data_ranks(self) -> Any:
        """The same, Megatron's own where the trainer's groups lack them."""
        return self.given_data_ranks or default_groups().dp_cp

    @functools.cached_property
    def companions(self) -> list[Any]:
        """Process groups whose grid holds all ranks that take part in a step; none of one rank."""
        data = self.given_data_ranks or self.groups.cp
        return [group for group in (self.groups.tp, self.groups.pp, data) if group.size() > 1]

    @functools.cached_property
    def same_schedule(self) -> list[Any]:
        """Groups of several ranks that take the same schedule in every step."""
        groups = [self.groups.tp, self.groups.cp, self.groups.pp]
        experts = [] if self.experts is None else [self.experts]
        return [group for group in groups if group.size() > 1] + experts

    @functools.cached_property
    def waiting(self) -> list[Any]:
        """Groups of several ranks that wait for one another in the middle of a step."""
        data = self.groups.dp_cp if self.has_global_loss else None
        return self.same_schedule + ([data] if data is not None and data.size() > 1 else [])

    # Numbers of its model ------------------------------------------------------------------------

    @property
    def has_experts(self) -> bool:
        """Whether layers of the model, on this rank or another, have experts."""
        return bool(self.config.num_moe_experts)

    @functools.cached_property
    def has_global_loss(self) -> bool:
        """Whether a microbatch's losses need all microbatches before it (global_aux_loss)."""
        return self.has_experts and has_global_loss(self.config)

    @functools.cached_property
    def overlaps(self) -> bool:
        """Whether Megatron's DDP is to reduce gradients during backwards."""
        return any(map(overlaps, self.models))

    @functools.cached_property
    def vocab_size(self) -> int:
        """The model's vocabulary, which every pipeline stage knows; 0 where it does not say."""
        return getattr(self.language_models[0], "vocab_size", 0)

    @functools.cached_property
    def pattern(self) -> str:
        """One letter a layer of the whole model, as hybrid models name them; "" for others."""
        return pattern_of(self.language_models[0])

    @functools.cached_property
    def cost(self) -> CostModel:
        """FLOPs of the whole model; the same on every rank."""
        return cost_of(self.config, self.vocab_size, self.pattern)

    @functools.cached_property
    def parts(self) -> int:
        """Ranks that share the work of every layer: tensor and context parallelism."""
        return self.groups.tp.size() * self.groups.cp.size()

    def footprint(self, gathers: bool, host_layers: int) -> Footprint:
        """Bytes per row of the model on this rank.

        Args:
            gathers: whether it keeps K/V of all context-parallel ranks.
            host_layers: see `PrefixConfig.cache_host_layers`.
        """
        form = Execution.of_config(self.config, recomputes(self.language_models[0]))
        return footprint_of(self.config, form, self.vocab_size, self.pattern, gathers, host_layers)

    @functools.cached_property
    def frozen_share(self) -> float:
        """Share of the rank's weights of matrix products that are not trained, 0 to 1."""
        weights = [
            weight
            for model in self.models
            for name, weight in model.named_parameters()
            if weight.dim() > 1 and "embedding" not in name
        ]
        total = sum(weight.numel() for weight in weights)
        frozen = sum(weight.numel() for weight in weights if not weight.requires_grad)
        return frozen / total if total else 0.0


def default_groups() -> ProcessGroupCollection:
    """The process groups that Megatron's schedules take when they are given none."""
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.ep = parallel_state.get_expert_model_parallel_group(check_initialized=False)
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(
        with_context_parallel=True, partial_data_parallel=False
    )
    groups.tp_dp_cp = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return groups


def overlaps(model: Any) -> bool:
    """Whether Megatron's DDP is to reduce a model chunk's gradients during backwards."""
    return bool(getattr(getattr(model, "ddp_config", None), "overlap_grad_reduce", False))
