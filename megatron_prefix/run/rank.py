"""One rank in one call of the schedule: its model, its place in the job, and numbers of its model.

Whatever asks for numbers of the model (FLOPs, bytes, vocabulary, layers) asks here.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron_prefix.errors import Reason
from megatron_prefix.layers import precision, table
from megatron_prefix.layers.model import cost_of, footprint_of, leaves_positions
from megatron_prefix.megatron import features
from megatron_prefix.megatron.features import pattern_of, recomputes
from megatron_prefix.megatron.install import language_model
from megatron_prefix.megatron.scale_functions import own_scale_functions
from megatron_prefix.moe.options import counts_tokens, has_global_loss
from megatron_prefix.moe.versions import is_since
from megatron_prefix.parts import StepPart
from megatron_prefix.plan.footprint import Execution, Footprint


class ModelNumbers:
    """What a model and its options say, the same in every call until an option changes.

    Args:
        config: Megatron's configuration of the model.
        models: the language models of a rank.

    Attributes:
        other_steps: why forward steps get more than an iterator and a model; None if they do not.
        refused: what is refused of the options of its language models.
        sequence_ranks: tensor-parallel ranks that share the positions of a segment (sequence
            parallelism).
        alignment: segment boundaries are multiples of it: tp under sequence parallelism, times
            2*cp.
        whole: segments are padded to multiples of it (layers/precision.py).
        rows: what positions that a context-parallel rank reads of a segment are a multiple of.
        has_experts: whether layers of the model, on this rank or another, have experts.
        looks_ahead: whether a stage of the model has multi-token prediction.
        gathers_tokens: whether ranks that share experts need equally many tokens of one another.
        counts_tokens: whether routers count how many tokens each expert gets.
        has_global_loss: whether a microbatch's losses need all microbatches before it
            (global_aux_loss).
        vocab_size: the model's vocabulary, which every pipeline stage knows; 0 if it does not say.
        pattern: one letter per layer of the whole model, as hybrid models name them; "" for others.
        cost: FLOPs of the whole model; the same on every rank.
        joins: whether a span can run in the segment of its parent.
        footprints: those that were asked for; see `Rank.footprint`.
    """

    def __init__(self, config: Any, models: Sequence[Any]) -> None:
        self.other_steps: Reason | None = features.other_steps(config)
        # Around a language model others may have a configuration of their own.
        own = {id(model.config): model.config for model in models}
        self.refused = [one for each in own.values() for one in features.refusals(each)]
        tp, cp = config.tensor_model_parallel_size, config.context_parallel_size
        self.sequence_ranks = tp if config.sequence_parallel else 1
        self.alignment = self.sequence_ranks * (2 * cp if cp > 1 else 1)
        self.whole = precision.whole(config, self.sequence_ranks, cp)
        self.rows = precision.rows(config, self.sequence_ranks)
        self.has_experts = bool(config.num_moe_experts)
        self.looks_ahead = bool(getattr(config, "mtp_num_layers", None))
        self.gathers_tokens = config.moe_token_dispatcher_type == "allgather"
        self.counts_tokens = counts_tokens(config)
        self.has_global_loss = has_global_loss(config)
        self.vocab_size: int = getattr(models[0], "vocab_size", 0)
        self.pattern = pattern_of(models[0])
        told = table.told(config, models)
        self.cost = cost_of(told, self.vocab_size, self.pattern)
        self.joins = leaves_positions(told, self.pattern)
        self.footprints: dict[tuple[bool, int], Footprint] = {}


_known: WeakKeyDictionary[Any, tuple[Any, ModelNumbers]] = WeakKeyDictionary()
"""By a rank's first language model: the models and options that its numbers are of, and these;
nothing in them refers to the model."""


def _numbers(config: Any, models: Sequence[Any]) -> ModelNumbers:
    """The numbers of a model, made again where an option or a model is another one.

    An option whose value is an object, such as a recipe, is only asked whether it is set
    (refusals/table.py).
    """
    every = config, *(model.config for model in models)
    options = [
        {
            # A list may be written in place.
            name: (*value,) if isinstance(value, list) else value
            for name, value in vars(one).items()
            if isinstance(value, bool | int | float | str | list | tuple | torch.dtype | None)
        }
        for one in {id(each): each for each in every}.values()  # each once; usually there is one
    ]
    of = [*map(id, models)], options
    if models[0] not in _known or _known[models[0]][0] != of:
        _known[models[0]] = of, ModelNumbers(config, models)
    return _known[models[0]][1]


class Rank(ModelNumbers):
    """What a call of the schedule finds on one rank.

    Args:
        models: its model chunks, wrapped or not.
        groups: process groups, the trainer's; None: Megatron's own, which must be there.
        forward_only: whether the call has no backward.

    Attributes:
        models: the rank's model chunks as the trainer knows them, wrappers included.
        groups: process groups, Megatron's own where the trainer gave none.
        forward_only: as given.
        language_models: the language models inside the wrappers.
        config: Megatron's configuration of the model.
        ordered: whether losses of the call's microbatches need those of all before them.
        device: where the model is.
        stage: its place in the pipeline, from 0.
        num_stages: ranks of its pipeline.
        is_first: whether it holds the embedding: its model calls have the tokens.
        is_last: whether it holds the output layer: its model calls have the labels.
        overlaps: whether Megatron's DDP is to reduce gradients during backwards.
        gathers_late: whether forwards gather the weights that they are about to need
            (overlap_param_gather).
        reduces: whether the gradients of its models are summed over data-parallel ranks: Megatron's
            DDP does, or the trainer says so.
        scale_functions: of the trainer's own, by which losses are scaled.
        experts: ranks that share experts and so meet in every action; None if this one shares none.
        data_ranks: data- and context-parallel ranks (`dp_cp`); None if the trainer's groups lack
            them.
        siblings: data-parallel ranks with the same part of every sample, those that payloads may
            cross; None if the trainer's groups do not tell them.
        companions: process groups whose grid holds all ranks that take part in a step. Here and
            below groups of one rank are left out.
        same_schedule: groups that take the same schedule in every step.
        may_cross: whether data-parallel ranks decide together if payloads cross in this call.
        crosses: whether they do.
        why_alone: why they cannot.
        step_parts: what features add to the call.
        waiting: groups whose ranks wait for one another in the middle of a step.
        parts: ranks that share the work of every layer: tensor and context parallelism.
        layout: tells models, and layouts of one model, apart; the same on every rank.
    """

    may_cross = crosses = False
    why_alone = ""
    step_parts: Sequence[StepPart] = ()
    forward_only: bool
    overlaps: bool

    def __init__(
        self,
        models: Sequence[Any],
        groups: ProcessGroupCollection | None = None,
        *,
        forward_only: bool = False,
    ) -> None:
        self.models, self.forward_only = list(models), forward_only
        self.language_models = [language_model(model) for model in models]
        self.config = config = get_model_config(models[0])
        vars(self).update(vars(_numbers(config, self.language_models)))
        self.ordered = self.has_global_loss and not forward_only
        self.device = next(models[0].parameters()).device
        self.groups = groups = groups or default_groups()
        self.stage, self.num_stages = groups.pp.rank(), groups.pp.size()
        self.is_first, self.is_last = self.stage == 0, self.stage == self.num_stages - 1
        ddp = [getattr(model, "ddp_config", None) for model in models]
        self.overlaps = any(getattr(one, "overlap_grad_reduce", False) for one in ddp)
        self.gathers_late = any(getattr(one, "overlap_param_gather", False) for one in ddp)
        self.scale_functions = own_scale_functions(config)
        self.reduces = all(map(_reduces, models))
        # A trainer's own collection of groups need not have `ep` and `dp_cp`.
        experts = getattr(groups, "ep", None)
        experts = experts or parallel_state.get_expert_model_parallel_group(check_initialized=False)
        self.experts = experts if experts is not None and experts.size() > 1 else None
        self.data_ranks = getattr(groups, "dp_cp", None)
        alone = groups.cp.size() == 1
        self.siblings = self.data_ranks if alone else getattr(groups, "dp", None)
        self.companions = several(groups.tp, groups.pp, self.data_ranks or groups.cp)
        self.same_schedule = several(groups.tp, groups.cp, groups.pp, self.experts)
        data = several(groups.dp_cp) if self.has_global_loss else []
        self.waiting = self.same_schedule + data
        self.parts = groups.tp.size() * groups.cp.size()
        self.layout = self.cost, config.num_layers, self.num_stages, len(models), self.parts

    def cross(self) -> None:
        """Payloads cross data-parallel ranks in this call, so that these wait for one another."""
        self.crosses = True
        self.waiting = self.waiting + several(self.data_ranks)

    @property
    def agreeing(self) -> list[Any]:
        """Groups whose ranks end or fall back together.  Data-parallel ranks need not make equally
        many calls without gradients (evaluation, log-probs), so none waits for another there."""
        apart = self.forward_only and not self.may_cross
        return self.same_schedule if apart else self.companions

    @property
    def together(self) -> list[Any]:
        """Groups whose ranks all run segments in a step, or none does, and end it together."""
        apart = self.forward_only and not self.crosses  # see `agreeing`
        groups = list(self.same_schedule if apart else self.waiting)
        if self.overlaps and not self.forward_only:  # see Planning: they take one schedule
            groups += several(self.data_ranks or default_groups().dp_cp)
        return [*{id(group): group for group in groups}.values()]

    @property
    def runs_outside(self) -> bool:
        """Whether what is around a language model runs in forward steps before that is called."""
        return any(part.runs_outside for part in self.step_parts)

    @property
    def predicts_further(self) -> bool:
        """Whether multi-token prediction has anything to do in a call: Megatron computes its loss
        in evaluation, too, and does nothing with it."""
        return self.looks_ahead and (not self.forward_only or self.language_models[0].training)

    @property
    def scales_auxiliary_losses(self) -> bool:
        """Whether functions of the trainer's own scale losses of routers, or of multi-token
        prediction, in a call with gradients."""
        has_losses = self.has_experts or self.looks_ahead
        return bool(self.scale_functions) and has_losses and not self.forward_only

    @property
    def counts_without_backward(self) -> bool:
        """Whether routers count tokens in a call with forward_only, if gradients are enabled."""
        if not (self.forward_only and self.counts_tokens):
            return False
        bias = getattr(self.config, "moe_router_enable_expert_bias", False)
        return bool(bias) or self.language_models[0].training

    @property
    def execution(self) -> Execution:
        """How the model is computed on this rank."""
        form = Execution.of_config(self.config, recomputes(self.language_models[0]))
        stages = self.num_stages * len(self.models)  # a trainer's config may say another number
        return replace(form, num_stages=stages, holds_projection=is_since("0.18"))

    def footprint(self, gathers: bool, host_layers: int) -> Footprint:
        """Bytes per row of the model on this rank.

        Args:
            gathers: whether it keeps K/V of all context-parallel ranks.
            host_layers: see `PrefixConfig.cache_host_layers`.
        """
        key = gathers, host_layers
        if key not in self.footprints:
            self.footprints[key] = footprint_of(
                table.told(self.config, self.language_models), self.execution, self.vocab_size,
                self.pattern, *key,
            )  # fmt: skip
        return self.footprints[key]

    @property
    def static_bytes(self) -> float:
        """Bytes of the rank's weights and of their gradients."""
        weights = itertools.chain(*(model.parameters() for model in self.models))
        return float(sum(one.numel() * one.element_size() for one in weights)) + self.gradient_bytes

    @property
    def gradient_bytes(self) -> float:
        """Bytes of the gradients of the rank's weights."""
        total = 0
        for weight in itertools.chain(*(model.parameters() for model in self.models)):
            gradient = getattr(weight, "main_grad", None)
            gradient = weight if gradient is None and weight.requires_grad else gradient
            total += 0 if gradient is None else gradient.numel() * gradient.element_size()
        return float(total)

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


def _reduces(model: Any) -> bool:
    """Whether a wrapper of a model chunk sums its gradients over data-parallel ranks."""
    while model is not None and not hasattr(model, "finish_grad_sync"):
        model = getattr(model, "module", None)
    return model is not None


def several(*groups: Any) -> list[Any]:
    """Process groups of several ranks."""
    return [group for group in groups if group is not None and group.size() > 1]


def meeting(groups: Any, *, forward_only: bool) -> list[Any]:
    """Groups whose ranks make a call together, of a rank whose `Rank` may not be had: as `agreeing`
    where no payload crosses data-parallel ranks."""
    groups = groups or default_groups()
    experts = getattr(groups, "ep", None) if forward_only else None
    data = None if forward_only else getattr(groups, "dp_cp", None)
    return several(groups.tp, groups.pp, data or groups.cp, experts)


def gathered(mine: torch.Tensor, group: Any) -> torch.Tensor:
    """[ranks * n, ...] of every rank's [n, ...]; all ranks of the group call this."""
    sent = mine.contiguous()
    views = sent.new_empty((group.size() * len(sent), *sent.shape[1:]))
    dist.all_gather_into_tensor(views, sent, group)
    return views


def default_groups() -> ProcessGroupCollection:
    """The process groups that Megatron's schedules take when they are given none."""
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.ep = parallel_state.get_expert_model_parallel_group(check_initialized=False)
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp = parallel_state.get_data_parallel_group(partial_data_parallel=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(
        with_context_parallel=True, partial_data_parallel=False
    )
    groups.tp_dp_cp = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return groups
