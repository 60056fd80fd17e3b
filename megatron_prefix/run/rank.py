"""One rank of the job: its place, its part of the model, and what the model says.

Whatever asks for numbers of the model (FLOPs, bytes, vocabulary, layers) asks here. Nothing in here
is set once it is made; what a call decides is in its `Request` (run/request.py).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron_prefix.errors import Reason
from megatron_prefix.layers import precision, table
from megatron_prefix.layers.model import (
    cost_of,
    counts_tokens,
    dropped_bytes,
    has_global_loss,
    leaves_positions,
    payloads_of,
)
from megatron_prefix.megatron import features
from megatron_prefix.megatron.features import pattern_of
from megatron_prefix.megatron.install import language_model
from megatron_prefix.megatron.scale_functions import own_scale_functions
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.plan.layer_numbers import Payload, Sharding


@dataclass(frozen=True, eq=False)
class Model:
    """What a model and its options say, the same in every call until an option changes.

    Attributes:
        sequence_ranks: tensor-parallel ranks that share the positions of a segment (sequence
            parallelism).
        alignment: segment boundaries are multiples of it: tp under sequence parallelism, times
            2*cp.
        whole: segments are padded to multiples of it (layers/precision.py).
        rows: what positions that a context-parallel rank reads of a segment are a multiple of.
        looks_ahead: how many further labels multi-token prediction predicts; 0 without it.
        gathers_tokens: whether ranks that share experts need equally many tokens of one another.
        has_global_loss: whether a microbatch's losses need all microbatches before it
            (global_aux_loss).
        cost: FLOPs of the whole model; the same on every rank.
        joins: whether a span can run in the segment of its parent.
        payloads: of every layer what a span leaves there, on a rank; the last ones of what is
            behind the decoder.
        dropped: bytes a position on a rank that policy "recompute_act" drops, of all stages.
    """

    other_steps: Reason | None
    refused: list[Reason]
    sequence_ranks: int
    alignment: int
    whole: int
    rows: int
    has_experts: bool
    looks_ahead: int
    gathers_tokens: bool
    counts_tokens: bool
    has_global_loss: bool
    vocab_size: int
    pattern: str
    cost: CostModel
    joins: bool
    payloads: tuple[tuple[Payload, ...], ...]
    dropped: float

    @classmethod
    def of(cls, config: Any, models: Sequence[Any]) -> Model:
        # Around a language model others may have a configuration of their own.
        configs = {id(model.config): model.config for model in models}.values()
        tp, cp = config.tensor_model_parallel_size, config.context_parallel_size
        sequence_ranks = tp if config.sequence_parallel else 1
        vocab_size, pattern = getattr(models[0], "vocab_size", 0), pattern_of(models[0])
        layers = table.with_module_fields(config, models)
        sharding = Sharding(tp, cp, config.params_dtype.itemsize)
        return cls(
            other_steps=features.other_steps(config),
            refused=[reason for own_config in configs for reason in features.refusals(own_config)],
            sequence_ranks=sequence_ranks, alignment=sequence_ranks * (2 * cp if cp > 1 else 1),
            whole=precision.segment_multiple(config, sequence_ranks, cp),
            rows=precision.row_multiple(config, sequence_ranks),
            has_experts=bool(config.num_moe_experts),
            looks_ahead=getattr(config, "mtp_num_layers", None) or 0,
            gathers_tokens=config.moe_token_dispatcher_type == "allgather",
            counts_tokens=counts_tokens(config), has_global_loss=has_global_loss(config),
            vocab_size=vocab_size, pattern=pattern,
            cost=cost_of(layers, vocab_size, pattern), joins=leaves_positions(layers, pattern),
            payloads=payloads_of(layers, pattern, sharding),
            dropped=dropped_bytes(layers, pattern, sharding),
        )  # fmt: skip


_COMPARED = bool, int, float, str, list, tuple, torch.dtype, type(None)
_models: WeakKeyDictionary[Any, tuple[Any, Model]] = WeakKeyDictionary()
"""By a rank's first language model: the chunks and options that were read, and what they say;
nothing in that refers to the model."""


def model_of(config: Any, models: Sequence[Any]) -> Model:
    """What a model says, read again where an option or a chunk is another one.

    An option whose value is an object, such as a recipe, is only asked whether it is set
    (refusals/table.py).
    """
    every = config, *(model.config for model in models)
    options = [
        {
            # A list may be written in place.
            name: (*value,) if isinstance(value, list) else value
            for name, value in vars(own).items()
            if isinstance(value, _COMPARED)
        }
        for own in {id(own): own for own in every}.values()  # each once; usually there is one
    ]
    key = [*map(id, models)], options
    if models[0] not in _models or _models[models[0]][0] != key:
        _models[models[0]] = key, Model.of(config, models)
    return _models[models[0]][1]


@dataclass(frozen=True, eq=False)
class Rank:
    """Where a call of the schedule runs: one rank's part of the model, and its place in the job.

    Attributes:
        overlaps: whether Megatron's DDP is to reduce gradients during backwards.
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
        waiting: groups whose ranks wait for one another in the middle of a step in which no payload
            crosses data-parallel ranks.
        layout: tells models, and layouts of one model, apart; the same on every rank.
    """

    models: list[Any]
    language_models: list[Any]
    groups: ProcessGroupCollection
    forward_only: bool
    config: Any
    model: Model
    ordered: bool
    device: torch.device
    stage: int
    num_stages: int
    is_first: bool
    is_last: bool
    overlaps: bool
    reduces: bool
    scale_functions: Sequence[Any]
    experts: Any
    data_ranks: Any
    siblings: Any
    companions: list[Any]
    same_schedule: list[Any]
    waiting: list[Any]
    layout: Hashable

    @classmethod
    def of(
        cls,
        models: Sequence[Any],
        groups: ProcessGroupCollection | None = None,
        *,
        forward_only: bool = False,
        sums_gradients: bool = False,
    ) -> Rank:
        """This rank."""
        groups, config = groups or default_groups(), get_model_config(models[0])
        language_models = [language_model(model) for model in models]
        model = model_of(config, language_models)
        stage, num_stages = groups.pp.rank(), groups.pp.size()
        ddp = [getattr(chunk, "ddp_config", None) for chunk in models]
        experts, data_ranks = _experts(groups), getattr(groups, "dp_cp", None)
        same_schedule = several(groups.tp, groups.cp, groups.pp, experts)
        return cls(
            models=list(models), language_models=language_models, groups=groups,
            forward_only=forward_only, config=config, model=model,
            ordered=model.has_global_loss and not forward_only,
            device=next(models[0].parameters()).device, stage=stage, num_stages=num_stages,
            is_first=not stage, is_last=stage == num_stages - 1,
            overlaps=any(getattr(options, "overlap_grad_reduce", False) for options in ddp),
            reduces=sums_gradients or all(map(_reduces, models)),
            scale_functions=own_scale_functions(config), experts=experts, data_ranks=data_ranks,
            siblings=data_ranks if groups.cp.size() == 1 else getattr(groups, "dp", None),
            companions=several(groups.tp, groups.pp, data_ranks or groups.cp),
            same_schedule=same_schedule,
            waiting=same_schedule + (several(groups.dp_cp) if model.has_global_loss else []),
            layout=(model.cost, config.num_layers, num_stages, len(models), layer_ranks(groups)),
        )  # fmt: skip

    def waits_for(self, *, crosses: bool) -> list[Any]:
        """Groups whose ranks wait for one another in the middle of a step."""
        return self.waiting + several(self.data_ranks) if crosses else self.waiting

    def together(self, *, crosses: bool) -> list[Any]:
        """Groups whose ranks all run segments in a step, or none does, and end it together."""
        is_local = self.forward_only and not crosses  # see `Request.agreeing`
        groups = list(self.same_schedule if is_local else self.waits_for(crosses=crosses))
        if self.overlaps and not self.forward_only:  # see Planning: they take one schedule
            groups += several(self.data_ranks or default_groups().dp_cp)
        return [*{id(group): group for group in groups}.values()]

    @property
    def predicts_further(self) -> bool:
        """Whether multi-token prediction has anything to do in a call: Megatron computes its loss
        in evaluation, too, and does nothing with it."""
        computed = not self.forward_only or self.language_models[0].training
        return bool(self.model.looks_ahead) and computed

    @property
    def scales_auxiliary_losses(self) -> bool:
        """Whether functions of the trainer's own scale losses of routers, or of multi-token
        prediction, in a call with gradients."""
        has_losses = self.model.has_experts or self.model.looks_ahead > 0
        return bool(self.scale_functions) and has_losses and not self.forward_only

    @property
    def counts_without_backward(self) -> bool:
        """Whether routers count tokens in a call with forward_only, if gradients are enabled."""
        if not (self.forward_only and self.model.counts_tokens):
            return False
        bias = getattr(self.config, "moe_router_enable_expert_bias", False)
        return bool(bias) or self.language_models[0].training

    @property
    def layers(self) -> int:
        """Of a model chunk."""
        return max(1, (len(self.model.payloads) - 1) // (self.num_stages * len(self.models)))

    @property
    def payloads(self) -> tuple[tuple[Payload, ...], ...]:
        """Of every stage, those of its layers; what is behind the decoder is on the last."""
        num, (*layers, behind) = self.num_stages * len(self.models), self.model.payloads
        ends = [len(layers) * stage // num for stage in range(num + 1)]
        stages = [layers[begin:end] for begin, end in itertools.pairwise(ends)]
        stages[-1].append(behind)
        return tuple(tuple(itertools.chain(*stage)) for stage in stages)

    @property
    def act(self) -> float:
        """Bytes a position of a stage that policy "recompute_act" drops."""
        return self.model.dropped / (self.num_stages * len(self.models))

    @property
    def static_bytes(self) -> float:
        weights = itertools.chain(*(model.parameters() for model in self.models))
        of_weights = sum(weight.numel() * weight.element_size() for weight in weights)
        return float(of_weights) + self.gradient_bytes

    @property
    def gradient_bytes(self) -> float:
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


def _experts(groups: Any) -> Any:
    """Of a trainer's own collection of groups, which need not have `ep`."""
    experts = getattr(groups, "ep", None)
    experts = experts or parallel_state.get_expert_model_parallel_group(check_initialized=False)
    return experts if experts is not None and experts.size() > 1 else None


def layer_ranks(groups: Any) -> int:
    """Ranks that share the work of every layer: tensor and context parallelism."""
    num: int = groups.tp.size() * groups.cp.size()
    return num


def _reduces(model: Any) -> bool:
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


def gathered(local: torch.Tensor, group: Any) -> torch.Tensor:
    """[ranks * n, ...] of every rank's [n, ...]; all ranks of the group call this."""
    rows = local.contiguous()
    views = rows.new_empty((group.size() * len(rows), *rows.shape[1:]))
    dist.all_gather_into_tensor(views, rows, group)
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
