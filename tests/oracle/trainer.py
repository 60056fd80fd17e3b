"""A trainer: its forward step, its loss, what it keeps, and its calls of a schedule."""

import collections
import contextlib
import itertools
import pickle
import random
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from megatron_prefix.lab.models.build import unwrap
from tests.cases import FAMILIES
from tests.harness import queues
from tests.oracle import data
from tests.oracle import model as models
from tests.oracle.case import Case
from tests.oracle.data import get

NOISE = 1.0
"""What a forward step leaves for a loss is a factor from 1 to 1 + this."""
held: Any = None
"""The axis writes=module_global."""
SESSIONS = {
    # Twice: the first step of a kind is watched, with the stock schedule in auto and observe.
    "once": ("train",), "train": ("train", "train"), "evaluate": ("evaluate", "evaluate"),
    "evaluate_then_train": ("evaluate", "evaluate", "train", "train"),
    "train_thrice": ("train", "train", "train"),
    "scale_changed": ("train", "train", "scale", "train"),
    "inv_freq_changed": ("train", "train", "frequency", "train"),
    "train_eval_mixed": ("train", "eval_mode", "train", "eval_mode", "train"),
    "mode_in_step": ("train", "train"), "mode_around_call": ("train",),
    "uneven": ("evaluate", "uneven", "evaluate", "train", "train"),
    "evaluate_with_gradients": ("evaluate_grad", "train", "evaluate_grad", "train"),
    "train_long": ("train",) * 6, "evaluate_long": ("evaluate",) * 6,
}  # fmt: skip
SHORTER = ("n_minus_1", "shortened")
"""Heads that return one position less."""
LATE = 4
"""The step from which on the axis `late` counts: those before are as every other trainer's."""


class Boom(Exception):
    """What a forward step or a loss raises."""


@dataclass
class Call:
    """What one call of a schedule has left; tensors are copies."""

    kind: str
    returned: list[Any] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    auxiliary: dict[str, Tensor] = field(default_factory=dict)
    reads: list[int] = field(default_factory=list)
    losses: list[int] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    raised: BaseException | None = None
    report: Any = None
    shared: bool | None = None
    tokens: int = 1


class _Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), named: Any = None) -> Any:
        return func(*args, **(named or {}))


class _Shared:
    factor: Any = None


def _held() -> Any:
    return held


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # trainers draw from it
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


class Trainer:
    """The trainer of a case.

    Args:
        case: what it is like.
        parts: its model.
        updates: gradients by which weights are updated after each call; its own behind them.
    """

    def __init__(self, case: Case, parts: models.Parts, updates: Sequence[Any] = ()) -> None:
        self.case, self.parts, self._updates = case, parts, [*updates]
        self.kept = {"list": [], "dict": {}, "counter": 0, "routes": [], "scaled": []}
        self.sums = torch.zeros(4, dtype=torch.float64)
        self.carried: Any = 1.0
        self.ema = 1.0
        self.box, self.many, self.objects = {"factor": None}, [None], [types.SimpleNamespace()]
        self.static = torch.zeros((), dtype=torch.float64)
        self.queue: collections.deque[Any] = collections.deque()
        self.losses: list[int] = []
        self.found: list[dict[str, Any]] = []
        self.part = 0
        if case.scale != "none":
            self.scale = torch.tensor(3.0) if case.scale == "tensor" else 3.0
            listed = case.scale == "by_list_item"
            function = models.scale_of_list_item if listed else lambda loss: self._scaled(loss)
            for language in parts.languages:
                models.set_scales(language.config, function)

    # Calls ---------------------------------------------------------------------------------------

    def session(self, schedule: Callable[[], Any]) -> Iterator[Call]:
        """Every call of a schedule; the last one is that which raised, if any did."""
        for kind in SESSIONS[self.case.session]:
            if kind == "scale":
                for language in self.parts.languages:
                    for layer in language.decoder.layers:
                        if hasattr(layer.self_attention, "core_attention"):
                            layer.self_attention.core_attention.softmax_scale *= 0.3
                continue
            if kind == "frequency":
                for rotary in self._modules():
                    for name in ("inv_freq", "inv_freq_extra", "inv_freq_inter"):
                        if isinstance(found := getattr(rotary, name, None), Tensor):
                            setattr(rotary, name, found * 0.3)
                            type(rotary).forward.cache_clear()  # type: ignore[attr-defined]
                continue
            if kind == "uneven" and not parallel_state.get_data_parallel_rank():
                continue
            call = self.call(schedule(), kind)
            yield call
            if call.raised is not None:
                return
            self._update(call)

    def call(self, schedule: Any, kind: str) -> Call:
        rank = parallel_state.get_data_parallel_rank()
        cp_rank = parallel_state.get_context_parallel_rank()
        cp = parallel_state.get_context_parallel_world_size()
        self.found = data.batches(self.case, self.part * data.RANKS + rank, cp_rank, cp)
        self.part += 1
        self.losses, training = [], kind == "train"
        call = Call(kind, tokens=sum(batch["tokens"].numel() for batch in self.found) * cp)
        models = self.parts.models
        self._zero()
        for model in models:
            model.train(kind != "eval_mode")
        self._fill_queues()
        queues.set_stage("replay_backward")
        reads: list[list[int]] = [[] for _ in models]
        iterators = [data.iterator(self.case, self.found, one) for one in reads]
        longest = max(batch["tokens"].shape[1] for batch in self.found)
        try:
            with torch.set_grad_enabled(training or kind == "evaluate_grad"):
                call.returned = schedule(
                    forward_step_func=self.forward_step(),
                    data_iterator=iterators if len(models) > 1 else iterators[0],
                    model=models if len(models) > 1 else models[0],
                    num_microbatches=len(self.found),
                    seq_length=longest,
                    micro_batch_size=self.found[0]["tokens"].shape[0],
                    forward_only=not training,
                )
        except Exception as raised:  # noqa: BLE001  # whatever it is, it is compared
            call.raised = raised
        call.reads = [number for one in reads for number in one]
        call.report = getattr(schedule, "report", None)
        call.shared = None if call.report is None else bool(call.report.decision.share)
        if call.raised is None:
            self._look(call, training)
        for model in models:
            model.train()
        return call

    def _zero(self) -> None:
        for model in self.parts.models:
            if hasattr(model, "zero_grad_buffer"):
                model.zero_grad_buffer()
            model.zero_grad(set_to_none=True)
        moe_utils.clear_aux_losses_tracker()
        for values in _further_logs().values():
            values.zero_()

    def _look(self, call: Call, training: bool) -> None:
        if training:
            call.gradients = {
                name: _gradient(parameter) for name, parameter in self.parts.parameters()
            }
        experts = moe_utils.get_moe_layer_wise_logging_tracker().items()
        logs = {name: logged["values"] for name, logged in experts} | _further_logs()
        for name, values in logs.items():
            call.auxiliary[name] = values.detach().clone()
            # Which rank counts a token is ours to choose; together they count what stock's do.
            dist.all_reduce(call.auxiliary[name], group=_counting(self.case))
        call.losses = list(self.losses)
        call.kept = copied({
            **self.kept, "sums": self.sums, "carried": self.carried, "ema": self.ema,
            "reads left": len(self.parts.reads), "queue": len(self.queue),
            "queues": [
                getattr(router.routing_replay, name) for name in self._indices()
                for each in self.parts.languages for router in queues.routers(each)
            ],
        })  # fmt: skip
        modules = [pair for model in self.parts.models for pair in model.named_modules()]
        buffers = [pair for model in self.parts.languages for pair in model.named_buffers()]
        call.state = {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": pickle.dumps(np.random.get_state()),
            "training": [name for name, module in modules if not module.training],
            "buffers": [(name, buffer.clone()) for name, buffer in buffers],
            "grad_enabled": torch.is_grad_enabled(),
            "set": [m.left() for m in self._modules() if isinstance(m, models.Slotted)],
        }

    def _indices(self) -> tuple[str, ...]:
        """Places in queues that a step moves."""
        both = "forward_index", "backward_index"
        return both if self.case.recompute == "full" else both[:1]

    def _fill_queues(self) -> None:
        """Routes of all calls of a step, for routers that take them from queues."""
        times = 2 if self.case.calls.startswith("reference") else 1
        for router in (one for each in self.parts.languages for one in queues.routers(each)):
            rows = [routed_rows(batch["routes"], router) for batch in self.found]
            vars(router.routing_replay).update(vars(queues.Entries()))
            router.routing_replay.top_indices_list += [one for one in rows for _ in range(times)]

    def _modules(self) -> Iterator[Any]:
        return itertools.chain(*(language.modules() for language in self.parts.languages))

    def _update(self, call: Call) -> None:
        """Gradient descent, so that a step shows in the next one; clipped as trainers clip, because
        not every loss is bounded: large weights would amplify rounding beyond any limit."""
        gradients = self._updates.pop(0) if self._updates else call.gradients
        with torch.no_grad():
            for name, parameter in self.parts.parameters():
                if name in gradients:
                    gradient = gradients[name].to(parameter.dtype)
                    parameter -= 0.01 * gradient / gradient.norm().clamp(min=1)

    # The forward step ----------------------------------------------------------------------------

    def forward_step(self) -> Callable[[Any, Any], Any]:
        """A `forward_step_func`: a method, or a function with a variable around it."""
        if self.case.writes != "closure":
            return self.step
        value: Any = None

        def step(iterator: Any, model: Any) -> Any:
            def put(new: Any) -> Callable[[], Any]:
                nonlocal value
                value = new
                return lambda: value

            return self.step(iterator, model, put)

        return step

    def step(self, iterator: Any, model: Any, put: Any = None) -> Any:
        """One microbatch; `put` leaves a factor in a closure and returns how to read it."""
        global held
        case = self.case
        item = self._next(iterator)
        number, last = int(get(item, "number")), len(self.found) - 1
        if case.raises == "before_call" and number == last:
            raise Boom
        factor = torch.tensor(1 + number / len(self.found) * NOISE, dtype=torch.float64)
        factor = factor * self._drawn("step") * self.carried
        if case.exchange == "in_step":
            factor = self._exchanged(factor)
        read_back = put(factor) if put else self._write(factor)
        if case.writes == "module_global":
            held, read_back = factor, _held
        if case.session == "mode_in_step":
            model.eval() if number else model.train()
        midway = self._is_late("sets midway") and number > 0
        if not case.late.startswith("sets") or self._is_late("sets") or midway:
            models.set_microbatch(model, case, number)
        self._set_scale("by_microbatch", number)
        queues.set_stage("replay_forward")
        before = self._reference(item, model, "before")
        if case.session == "mode_around_call":
            model.eval()
        off = case.calls == "adapters_off"
        with models.adapters_off(model) if off else contextlib.nullcontext():
            output, more = self._called(item, model, number)
        before = self._reference(item, model, "after") if before is None else before
        queues.set_stage("replay_backward")
        self._set_scale("after", number)
        if case.session == "mode_around_call":
            model.train()
        if case.raises == "after_call" and number == last:
            raise Boom
        if case.model == "record":
            recorded = [x.clone() for x in RouterReplay.get_recorded_data()]
            self.kept["routes"].append((number, recorded))
        return output, self._loss(item, model, before, read_back, more)

    def _next(self, iterator: Any) -> Any:
        """What the iterator has; where only the first tensor-parallel rank has one, it tells."""
        if self.case.batch == "get_next":
            return iterator.get_next()
        if self.case.batch == "of tp rank 0":
            number = torch.tensor(0 if iterator is None else next(iterator)["number"])
            source = parallel_state.get_tensor_model_parallel_src_rank()
            dist.broadcast(number, source, parallel_state.get_tensor_model_parallel_group())
            return self.found[int(number)]
        item = next(iterator)
        return self.found[item] if self.case.batch == "index" else item

    def _set_scale(self, when: str, number: int) -> None:
        """What losses of this microbatch are scaled by, where a trainer sets it now."""
        if self.case.scale == when:
            self.scale = 1 + number / 2
        elif self.case.scale == "tensor" and when == "by_microbatch":
            self.scale.fill_(1 + number / 2)

    def _scaled(self, loss: Tensor) -> Tensor:
        """A `grad_scale_func`; calls are noted where these are what counts."""
        if self.case.scale in ("after", "in_loss", "calls"):
            self.kept["scaled"].append(self.scale)
        if self.case.scale == "calls":
            return loss * (0.5 + len(self.kept["scaled"]) % 5)
        return loss * self.scale

    def _called(self, item: Any, model: Any, number: int) -> tuple[Any, dict[str, Any]]:
        """What the model returned, and what else the loss needs."""
        case, more = self.case, {}
        if case.calls == "not_at_all" and number == 1:
            parameter = next(iter(self.parts.languages[0].parameters()))
            shape = get(item, "tokens").shape
            return parameter.sum() * 0 + torch.ones(shape, dtype=parameter.dtype), more
        if case.model.startswith("replay"):
            language = unwrap(model)
            for router in models.routers(getattr(language, "language_model", language)):
                rows = routed_rows(get(item, "routes"), router)
                router.router_replay.set_target_indices(rows)
        context = self._context()
        output = self._around(model, item, context)
        if context is not None:
            more["scale"] = (
                context.get("scale", 100.0) if isinstance(context, dict)
                else context[0] if isinstance(context, list) and context
                else getattr(context, "scale", 100.0)
            )  # fmt: skip
        if case.in_place == "on every stage":
            output /= 2.0
        if case.calls == "twice" or self._is_late("second_call"):
            more["other"] = self._model_call(model, item, None, tokens="other")
        return output, more

    def _context(self) -> Any:
        kinds: dict[str, Any] = {"empty_dict": {}, "empty_list": []}
        if self.case.context == "object":
            return types.SimpleNamespace()
        return kinds.get(self.case.context)

    def _around(self, model: Any, item: Any, context: Any) -> Any:
        around = self.case.around

        def call(*unused: Any) -> Any:
            return self._model_call(model, item, context)

        if around in ("reentrant", "checkpoint"):
            leaf = torch.zeros((), requires_grad=True)
            if not torch.is_grad_enabled():
                return call()
            return checkpoint(call, leaf, use_reentrant=around == "reentrant")
        hooks = torch.autograd.graph.saved_tensors_hooks
        managers: dict[str, Callable[[], Any]] = {
            "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
            "autocast_off": lambda: torch.autocast("cpu", enabled=False),
            "saved_hooks": lambda: hooks(lambda x: x.clone(), lambda x: x),
            "function_mode": _Mode,
            "grad_switch": lambda: torch.set_grad_enabled(torch.is_grad_enabled()),
        }
        with managers.get(around, contextlib.nullcontext)():
            return call()

    def _model_call(self, model: Any, item: Any, context: Any, tokens: str = "tokens") -> Any:
        case = self.case
        inside = unwrap(model)
        first, last = inside.pre_process, inside.post_process
        given = get(item, tokens)
        if case.arguments == "of another layout" and not first:  # as SkyRL's later stages
            given = given.new_zeros(3, 5)
        head = [
            given if first or case.seed % 2 or "mtp" in case.model else None,
            get(item, "position_ids") if case.positions == "given" else None,
            get(item, "attention_mask"),
        ]
        named: dict[str, Any] = {}
        if case.labels == "given" and last:
            named["labels"] = get(item, "labels")
        knows = case.loss_mask != "tails of rank 0" or not dist.get_rank()
        if case.loss_mask != "absent" and last and knows:
            named["loss_mask"] = get(item, "loss_mask")
        if case.packed:
            named["packed_seq_params"] = _packing(item, case)
        if case.mask == "padding_mask":
            named["padding_mask"] = get(item, "padding_mask")
        if context is not None:
            named["output_processor_context"] = context
        if FAMILIES[case.model].around in models.WITH_KEYWORD and torch.is_grad_enabled():
            named["mtp_kwargs"] = {"mtp_labels": given}
        if case.arguments == "positional" and "labels" in named:
            return model(*head, None, named.pop("labels"), **named)
        if case.arguments != "keyword":
            return model(*head, **named)
        names = ("input_ids", "position_ids", "attention_mask")
        return model(**dict(zip(names, head, strict=True)), **named)

    def _reference(self, item: Any, model: Any, when: str) -> Tensor | None:
        """Outputs without gradients, of the model itself or of another one."""
        case = self.case
        if case.calls not in (f"reference_{when}", f"other_{when}"):
            return None
        asked, context = model, self._context()
        if case.calls.startswith("other"):
            asked, context = self.parts.other, None
        elif case.model == "switched" and when == "before":
            asked = unwrap(model)  # as ms-swift does, without its wrappers
        with torch.no_grad(), models.adapters_off(model):
            output = self._model_call(asked, item, context)
        return self._values(output, item).detach().clone()

    def _write(self, factor: Tensor) -> Callable[[], Any]:
        """Leaves a factor where the loss reads it; returns how."""
        # long: a table of places
        global held
        where = self.case.writes
        if where == "self_attribute":
            self.factor = factor
            return lambda: self.factor
        if where == "dict_item":
            self.box["factor"] = factor
            return lambda: self.box["factor"]
        if where == "list_item":
            self.many[0] = factor
            return lambda: self.many[0]
        if where == "object_in_list":
            self.objects[0].factor = factor
            return lambda: self.objects[0].factor
        if where == "tensor":
            self.static.copy_(factor)
            return lambda: self.static.clone()
        if where == "class_attribute":
            _Shared.factor = factor
            return lambda: _Shared.factor
        if where == "model_attribute":
            language = self.parts.languages[0]
            language.trainers_factor = factor
            return lambda: language.trainers_factor
        if where == "global_in_helper":
            held = factor
            return _held
        if where == "deque":
            self.queue.append(factor)
            return self.queue.popleft
        return lambda: factor

    def _drawn(self, where: str) -> Tensor:
        """A random factor, if this trainer draws one here."""
        draws = self.case.draws
        one = torch.ones((), dtype=torch.float64)
        if draws in (where, "both"):
            return one + torch.rand((), dtype=torch.float64)
        of, _, both = draws.partition(" ")
        if of == "python" and (both or where == "loss"):
            return one + random.random()
        if of == "numpy" and (both or where == "loss"):
            return one + np.random.random()
        return one

    def _is_late(self, what: str) -> bool:
        """Whether this trainer does something that it has not done in its first steps."""
        return self.case.late == what and self.part >= LATE

    def _exchanged(self, value: Tensor) -> Tensor:
        value = value.detach().clone()
        dist.all_reduce(value, group=parallel_state.get_data_parallel_group())
        return value

    # The loss ------------------------------------------------------------------------------------

    def _loss(self, item, model, before, read_back, more):
        def loss_func(output: Any, non_loss_data: bool = False) -> Any:
            number = int(get(item, "number"))
            self.losses.append(number)
            self._set_scale("in_loss", number)
            if self.case.raises == "in_loss" and number == len(self.found) - 1:
                raise Boom
            reference = self._reference(item, model, "in_loss") if before is None else before
            factor = read_back() * self._drawn("loss")
            values, loss = self._scored(output, item, factor, reference, more)
            count = self._mask(item).sum().to(torch.int32)
            log = {"number": number, "loss": loss.detach().clone(), "values": values}
            self._leave(number, log["loss"])
            if self.case.returns == "two":
                return loss, log
            return loss, count, log

        return loss_func

    def _scored(self, output, item, factor, reference, more):
        case, mask = self.case, self._mask(item)
        if case.head == "scalar":
            loss = output * factor.to(output.dtype)
            return output.detach().double().clone(), loss * more.get("scale", 1.0)
        values = self._values(output, item)
        seen = (values * mask if case.reads == "masked" else values * get(item, "real")).detach()
        if case.reads == "all" or self._is_late("outside_mask"):
            mask = get(item, "real").to(mask.dtype)
        weight = self._cut(get(item, "weight")) * factor * more.get("scale", 1.0)
        terms = values * mask * weight.to(values.dtype)
        if reference is not None:
            terms = terms * (1 + (values.detach() - reference).tanh())
        if "other" in more:
            terms = terms - 0.5 * (self._values(more["other"], item) * mask * weight).tanh()
        if case.loss in ("per_sample", "sequence", "preference"):
            loss = self._by_sample(terms, mask, item)
        elif case.loss == "last":
            loss = self._by_sample(terms * get(item, "last"), get(item, "last"), item)
        elif case.loss == "token_mean" and case.returns == "two":
            loss = terms.sum() / mask.sum().clamp(min=1)
        else:
            loss = terms.sum()
        if self.parts.reads:
            loss = loss + 1e-2 * sum(self.parts.reads)
            self.parts.reads.clear()
        if case.exchange == "in_loss":
            loss = loss * self._exchanged(loss.double()).tanh().to(loss.dtype)
        return seen.double().clone(), loss

    def _by_sample(self, terms: Tensor, mask: Tensor, item: Any) -> Tensor:
        sample = self._cut(get(item, "sample"))
        if not self.case.packed:
            sample = torch.arange(len(terms))[:, None].expand_as(terms)
        number = int(sample.max()) + 1
        sums = terms.new_zeros(number).index_add(0, sample.flatten(), terms.flatten())
        counts = mask.new_zeros(number).index_add(0, sample.flatten(), mask.flatten())
        if self.case.loss in ("preference", "last"):  # each sample against the next one
            return -functional.logsigmoid(sums - sums.roll(1)).sum()
        means = sums / counts.clamp(min=1)
        return (means.tanh() if self.case.loss == "sequence" else means).sum()

    def _values(self, output: Any, item: Any) -> Tensor:
        """One number a position, [rows, positions], from whatever the model returns."""
        case = self.case
        if case.head == "scalar":
            return output
        if case.head == "dict":
            return -output["log_probs"] + 0.1 * output["entropy"]
        if case.head == "tuple":
            return -output[0] + 0.1 * output[1]
        if isinstance(output, models.Output):
            return -output.log_probs + 0.1 * output.entropy
        if case.head in ("n_minus_1", "log_probs"):
            return -output
        if case.labels == "given" or output.dim() == 2:
            return output
        if case.head == "value":
            return output[..., 0] * 0.7 if case.in_place == "no" else output.div_(0.7)[..., 0]
        if case.in_place == "div":
            output.div_(0.7)
        elif case.in_place == "masked_fill":
            output.masked_fill_(output > 3, 3.0)
        whole = output
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            whole = gather_from_tensor_model_parallel_region(output)
        if case.loss == "distil":
            return _divergence(whole, get(item, "weight"))
        nll = -models.log_probs(whole, get(item, "labels"))
        return nll - 0.1 * models.entropy(whole) if case.loss == "entropy" else nll

    def _cut(self, values: Tensor) -> Tensor:
        return values[:, :-1] if self.case.head in SHORTER else values

    def _mask(self, item: Any) -> Tensor:
        mask = get(item, "loss_mask")
        if self.case.head in SHORTER:
            mask = (mask * get(item, "inner"))[:, :-1]
        return mask.to(getattr(torch, self.case.dtype))

    def _leave(self, number: int, loss: Tensor) -> None:
        """What a loss keeps for the trainer, or for the next forward step."""
        leaves = self.case.leaves
        if leaves == "list":
            self.kept["list"].append((number, loss.double().clone()))
        elif leaves == "dict":
            self.kept["dict"][number] = loss.double().clone()
        elif leaves == "counter":
            self.kept["counter"] += 1
        elif leaves == "tensor":
            self.sums[number % 4] += loss.double()
        elif leaves == "next_step":
            self.carried = 1 + float(loss.double().tanh()) / 4
        elif leaves == "ema":
            self.ema = 0.9 * self.ema + 0.1 * float(loss.double())


def routed_rows(routes: Tensor, router: Any) -> Tensor:
    """Of a microbatch's routes those that a router sees: this rank's part, positions first."""
    rows = routes[:, :, router.layer_number - 1].transpose(0, 1).flatten(0, 1)
    group = router.tp_group
    return rows.chunk(group.size())[group.rank()] if router.config.sequence_parallel else rows


def _divergence(logits: Tensor, weight: Tensor) -> Tensor:
    """Of a teacher's distribution over the whole vocabulary from the model's, a position."""
    numbers = torch.arange(logits.shape[-1], dtype=logits.dtype)
    teacher = (weight[..., None].to(logits.dtype) * numbers).sin().log_softmax(-1)
    return (teacher.exp() * (teacher - logits.log_softmax(-1))).sum(-1)


def _counting(case: Case) -> Any:
    """Ranks among which tokens of this one's microbatches may be counted."""
    if case.tree in ("on_all_ranks", "dealt"):
        return parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_tensor_and_context_parallel_group()


def _further_logs() -> dict[str, Tensor]:
    """What Megatron logs of further labels: losses, and since 0.19 how many guesses are right."""
    of_indexers = dsa.DSAIndexerLossLoggingHelper.tracker
    tracker = MTPLossLoggingHelper.tracker.items()
    logs = {f"mtp {name}": values for name, values in tracker if name.endswith("values")}
    return logs | {f"dsa {name}": x for name, x in of_indexers.items() if name == "values"}


def _gradient(parameter: Any) -> Tensor:
    found = parameter.main_grad if hasattr(parameter, "main_grad") else parameter.grad
    return torch.zeros_like(parameter) if found is None else found.detach().clone()


def _packing(item: Any, case: Case) -> PackedSeqParams:
    true, padded = get(item, "ends"), get(item, "ends_padded")
    if case.form in ("thd", "thd_parts"):
        padded = None
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=true, cu_seqlens_kv=true, cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded, max_seqlen_q=get(item, "longest"),
        max_seqlen_kv=get(item, "longest"),
    )  # fmt: skip


def copied(value: Any) -> Any:
    """Lists, dicts and tensors, all the way down."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copied(one) for one in value)
    return value
