"""Models as trainers have them: Megatron's GPTModel, and what is put around it."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import gpt_model
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor, nn
from torch.nn import functional

from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from tests.cases import DRAWN, FAMILIES, LAYOUTS, RECOMPUTES
from tests.harness import sparse
from tests.harness.own_delta import FULL, LINEAR, own_layers
from tests.oracle import attention
from tests.oracle.case import Case
from tests.oracle.data import VOCAB

BUCKET = 4000
"""Parameters of a bucket of overlapped reductions: a model has several."""


@dataclass
class Parts:
    """What the trainer has: the chunks that it gives to the schedule, and the language models
    inside."""

    models: list[Any]
    languages: list[Any]
    reads: list[Tensor]
    other: Any = None

    def parameters(self) -> Iterator[tuple[str, Any]]:
        """Names within the chunk, and within the rank if it has several."""
        for number, language in enumerate(self.languages):
            prefix = f"chunk {number}: " if number else ""
            for name, parameter in language.named_parameters():
                yield prefix + name, parameter


def build(case: Case) -> Parts:
    """The same weights every time for the same case."""
    RouterReplay.clear_global_router_replay_instances()
    moe_utils.get_moe_layer_wise_logging_tracker().clear()  # names stay in it from run to run
    MTPLossLoggingHelper.tracker.clear()
    languages = _languages(case, seed=case.seed + 1)
    reads: list[Tensor] = []
    models = [_model(case, language, reads) for language in languages]
    other = _languages(case, seed=case.seed + 2)[0] if case.calls.startswith("other") else None
    return Parts(models, languages, reads, other)


def _model(case: Case, language: Any, reads: list[Tensor]) -> Any:
    """A language model with what the trainer has put around it."""
    if case.model in ("record", "replay_forward"):
        action = getattr(RouterReplayAction, case.model.upper())
        RouterReplay.set_global_router_replay_action(action)
    hooked(case, language, reads)
    if case.sets not in ("nothing", "z_loss_coeff"):
        attention_of_last = language.decoder.layers[-1].self_attention
        attention_of_last.linear_proj = Slotted(attention_of_last.linear_proj)
    model = _wrapped(case, _headed(case, language))
    if case.ddp in ("wrapped", "overlapped"):
        overlaps = case.ddp == "overlapped"
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=False, overlap_grad_reduce=overlaps,
            bucket_size=BUCKET if overlaps else None,
        )  # fmt: skip
        model = DistributedDataParallel(language.config, config, model)
        language.config.finalize_model_grads_func = finalize_model_grads
        if overlaps:
            language.config.no_sync_func = model.no_sync
    model.train()
    return model


def _languages(case: Case, seed: int) -> list[Any]:
    """A language model for each chunk of this rank."""
    family = FAMILIES[case.model]
    overrides = {
        "variable_seq_lengths": True,
        **family.config,
        **RECOMPUTES.get(case.recompute, {}),
    }
    overrides["calculate_per_token_loss"] = case.returns == "per_token"
    if case.dropout != "none":
        overrides[f"{case.dropout}_dropout"] = 0.1
    layout = LAYOUTS[case.layout]
    spec = {"num_layers": 2, **family.spec}
    if "hybrid_override_pattern" not in spec:  # each stage has as many
        stages = layout.pp * layout.vpp
        spec["num_layers"] = -(-spec["num_layers"] // stages) * stages
    if case.model in DRAWN:
        spec = {"hidden_size": 32, **spec}
    recompute = case.recompute if case.recompute in ("full", "selective") else "none"
    chunks = build_model(
        resolve(family.preset, **spec).with_vocab(VOCAB), layout=layout, dtype=case.dtype,
        recompute=recompute, seed=seed, wrap_ddp=False, config_overrides=overrides,
    )  # fmt: skip
    for chunk in chunks:
        if not family.own_attention:
            attention.put_into(chunk, ignores_masks=case.mask == "pad_2d")
        if case.head == "value" and chunk.post_process:
            chunk.output_layer = ValueHead(chunk.config)
        if case.model not in DRAWN:
            _add_noise(chunk)
    return chunks


def _add_noise(model: Any) -> None:
    """Biases and sinks are zero otherwise."""
    draw = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
        parameter.data += 0.05 * noise.to(parameter.dtype)


@contextlib.contextmanager
def _positions(kind: str) -> Iterator[None]:
    """While models are built and run they have such positions, which the presets do not have."""
    make = gpt_model.GPTModel.__init__

    def init(self: Any, *args: Any, **named: Any) -> None:
        make(self, *args, **{**named, "position_embedding_type": kind})

    with mock.patch.object(gpt_model.GPTModel, "__init__", init):
        yield


def _own_delta(case: Case, net: str, types: Sequence[str] = (LINEAR, FULL)) -> Any:
    return own_layers(types, net, LAYOUTS[case.layout].sequence_parallel)


AROUND: dict[str, Callable[[Case], contextlib.AbstractContextManager[None]]] = {
    "": lambda case: contextlib.nullcontext(),
    "rotating": lambda case: sparse.rotating(),
    "learned_positions": lambda case: _positions("learned_absolute"),
    "no_positions": lambda case: _positions("none"),
    "own delta attribute": lambda case: _own_delta(case, "attribute"),
    "own delta global": lambda case: _own_delta(case, "global"),
    "own delta keywords": lambda case: _own_delta(case, "keywords"),
    "own delta on stages": lambda case: _own_delta(case, "global", (LINEAR, LINEAR, LINEAR, FULL)),
    "own delta alone": lambda case: _own_delta(case, "attribute", (LINEAR, LINEAR)),
}
"""See `Family.around`."""


class Slotted(nn.Module):
    """A linear layer with two adapters beside it, of which the forward step says which one is for
    its microbatch, and how much of it: by `set`."""

    def __init__(self, to_wrap: Any) -> None:
        super().__init__()
        self.to_wrap = to_wrap
        shape, draw = (2, *to_wrap.weight.shape), torch.Generator().manual_seed(11)
        weights = torch.randn(shape, generator=draw).to(to_wrap.weight.dtype) * 0.1
        self.adapters = nn.Parameter(weights)
        self.register_buffer("factor", torch.ones((), dtype=to_wrap.weight.dtype))
        self.slot, self.scale, self.doubled = 0, 1.0, False
        self.options, self.many, self.box = {"scale": 1.0}, [1.0], types.SimpleNamespace(scale=1.0)

    def set(self, kind: str, number: int) -> None:
        """What a forward step sets for microbatch `number`, by the value of the axis `sets`."""
        scale = 1 + number / 4
        if kind == "slot":
            self.slot = number % 2
        elif kind == "number":
            self.scale = scale
        elif kind == "flag":
            self.doubled = bool(number % 2)
        elif kind == "tensor":
            self.scale = torch.tensor(scale, dtype=self.adapters.dtype)
        elif kind == "buffer":
            self.factor.fill_(scale)
        elif kind == "dict":
            self.options["scale"] = scale
        elif kind == "list":
            self.many[0] = scale
        elif kind == "object":
            self.box.scale = scale
        else:
            raise ValueError(f"a forward step sets {kind}")

    def left(self) -> tuple[float, ...]:
        """What is set now."""
        more = self.options["scale"], self.many[0], self.box.scale
        return tuple(map(float, (self.slot, self.scale, self.doubled, self.factor, *more)))

    def forward(self, x: Tensor) -> Any:
        output, bias = self.to_wrap(x)
        gain = self.scale * self.factor * self.options["scale"] * self.many[0] * self.box.scale
        narrow = functional.linear(x, self.adapters[self.slot])
        return output + gain * (2 if self.doubled else 1) * narrow, bias


class ValueHead(nn.Linear):
    """A critic's output layer, as trainers put it there: every rank has it whole."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, 1, bias=False, dtype=config.params_dtype)
        draw = torch.Generator().manual_seed(config.hidden_size)
        self.weight.data.normal_(generator=draw)
        self.gathers = config.sequence_parallel
        if self.gathers:
            self.weight.sequence_parallel = True

    def forward(self, x: Tensor, weight: Any = None, runtime_gather_output: Any = None) -> Any:
        values = super().forward(x)
        if self.gathers:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


# What the model returns ---------------------------------------------------------------------------


@dataclass
class Output:
    """An output of a class of the trainer's own."""

    log_probs: Tensor
    entropy: Tensor


def log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def entropy(logits: Tensor) -> Tensor:
    logs = logits.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1)


def by_place(output: Tensor) -> Tensor:
    """Depends on where in its row a position is, as what derives positions itself does."""
    scale = 1 + 0.05 * torch.arange(output.shape[1], dtype=output.dtype)
    return output * scale.view(1, -1, *[1] * (output.dim() - 2))


def _headed(case: Case, language: Any) -> Any:
    """The language model with a `forward` of its own, which calls GPTModel's through super()."""
    # long: a class that knows the case
    derived = case.wrapper in ("super_derived", "instance_forward")
    plain = case.head in ("none", "value") and case.context == "none"
    if case.wrapper == "instance_forward":
        stock = language.forward

        def forward(self: Any, *args: Any, **named: Any) -> Any:
            output = stock(*args, **named)
            return by_place(output) if self.post_process else output

        language.forward = types.MethodType(forward, language)
        return language
    if plain and not case.wrapper.startswith("super"):
        return language

    class Headed(GPTModel):
        """A subclass as trainers have them."""

        def forward(
            self,
            input_ids: Any,
            position_ids: Any = None,
            attention_mask: Any = None,
            *more: Any,
            output_processor_context: Any = None,
            **named: Any,
        ) -> Any:
            labels = named.get("labels")
            if case.head not in ("none", "value"):
                named["labels"] = None
            output = super().forward(input_ids, position_ids, attention_mask, *more, **named)
            if not self.post_process:
                return output
            if derived:
                output = by_place(output)
            if output_processor_context is not None:
                output = output * 0.5
                _fill(output_processor_context)
            return _head(case.head, output, input_ids, labels)

    language.__class__ = Headed
    return language


def _fill(context: Any) -> None:
    """What a model leaves in the object that the trainer gave to it."""
    if isinstance(context, dict):
        context["scale"] = 2.0
    elif isinstance(context, list):
        context.append(2.0)
    else:
        context.scale = 2.0


def _head(kind: str, logits: Tensor, tokens: Tensor, labels: Tensor | None) -> Any:
    if kind in ("none", "value"):
        return logits
    if kind == "n_minus_1":
        return log_probs(logits[:, :-1], tokens[:, 1:])
    assert labels is not None
    logs = log_probs(logits, labels)
    if kind == "dict":
        return {"log_probs": logs, "entropy": entropy(logits)}
    if kind == "tuple":
        return logs, entropy(logits)
    if kind == "dataclass":
        return Output(logs, entropy(logits))
    return -logs.mean() if kind == "scalar" else logs


# What is around it --------------------------------------------------------------------------------


class Owner(nn.Module):
    """A vision-language model's class around the language model, as trainers register it.

    It has the language model as an attribute, its config, and where messages go in.
    """

    derived = False

    def __init__(self, language: Any) -> None:
        super().__init__()
        self.language_model = language
        self.config, self.model_type = language.config, language.model_type
        self.pre_process, self.post_process = language.pre_process, language.post_process
        self.share_embeddings_and_output_weights = language.share_embeddings_and_output_weights

    def set_input_tensor(self, tensor: Any) -> None:
        self.language_model.set_input_tensor(tensor)

    def shared_embedding_or_output_weight(self) -> Any:
        return self.language_model.shared_embedding_or_output_weight()

    def forward(self, *args: Any, **named: Any) -> Any:
        output = self.language_model(*args, **named)
        return by_place(output) if self.derived and isinstance(output, Tensor) else output


class Exposing(Owner):
    """It has `decoder` as a property (Megatron-Bridge's Qwen models)."""

    @property
    def decoder(self) -> Any:
        return self.language_model.decoder


class ExposingMore(Exposing):
    """And the embedding, but not the rotary one."""

    @property
    def embedding(self) -> Any:
        return self.language_model.embedding

    @property
    def output_layer(self) -> Any:
        return self.language_model.output_layer


class Renamed(Owner):
    """Deeper inside, and under another name."""

    def __init__(self, language: Any) -> None:
        super().__init__(language)
        del self.language_model
        self.inner = nn.ModuleDict({"text": language})

    def set_input_tensor(self, tensor: Any) -> None:
        self.inner["text"].set_input_tensor(tensor)

    def shared_embedding_or_output_weight(self) -> Any:
        return self.inner["text"].shared_embedding_or_output_weight()

    def forward(self, *args: Any, **named: Any) -> Any:
        return self.inner["text"](*args, **named)


_OWNERS = {
    "owns": Owner,
    "owns_derived": type("OwnerDerived", (Owner,), {"derived": True}),
    "decoder_property": Exposing,
    "decoder_derived": type("ExposingDerived", (Exposing,), {"derived": True}),
    "embedding_property": ExposingMore,
    "no_decoder": Renamed,
}


def _wrapped(case: Case, model: Any) -> Any:
    return _OWNERS[case.wrapper](model) if case.wrapper in _OWNERS else model


# What forward steps set for their microbatch -----------------------------------------------------

_SCALE = [1.0]
"""Of the microbatch whose forward step ran last; no loss reads it, but Megatron does."""


def scale_of_list_item(loss: Tensor) -> Tensor:
    """For the axis `scale`."""
    return loss * _SCALE[0]


def set_scales(config: Any, function: Any) -> None:
    """Gives Megatron the functions by which it scales losses; two are of later releases."""
    for name in ("grad_scale_func", "moe_grad_scale_func", "mtp_grad_scale_func"):
        if hasattr(config, name):
            setattr(config, name, function)


def set_microbatch(model: Any, case: Case, number: int) -> None:
    """Sets what a case sets for microbatch `number`, before its model call."""
    if case.scale == "by_list_item":
        _SCALE[0] = 1 + number / 2
    if case.sets == "nothing":
        return
    for module in model.modules():
        if isinstance(module, Slotted):
            module.set(case.sets, number)
        elif case.sets == "z_loss_coeff" and isinstance(module, GPTModel):
            module.config.moe_z_loss_coeff = 0.01 * (1 + number)


# Hooks --------------------------------------------------------------------------------------------


class _Regulariser(torch.autograd.Function):
    """Adds the gradient of half a squared activation, as auxiliary losses are added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + 1e-3 * ctx.saved_tensors[0]


def _noise(hidden: Tensor) -> Tensor:
    return 0.2 * torch.rand_like(hidden)


def hooked(case: Case, language: Any, reads: list[Tensor]) -> None:
    """Hooks that a trainer sets on its model."""
    layer = language.decoder.layers[0]
    if case.hook == "doubled":  # a row's
        language.register_forward_hook(lambda m, a, out: out * 2.0)
    elif case.hook == "clip":
        for parameter in language.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    elif case.hook == "regulariser":
        layer.register_forward_hook(lambda m, a, out: (_Regulariser.apply(out[0]), *out[1:]))
    elif case.hook == "activation_read":
        layer.register_forward_hook(lambda m, a, out: reads.append(out[0].pow(2).mean()))
    elif case.hook == "noise":
        layer.register_forward_hook(lambda m, a, out: (out[0] + _noise(out[0]), *out[1:]))
    elif case.hook == "functional_dropout":
        layer.register_forward_hook(
            lambda m, a, out: (functional.dropout(out[0], 0.2, m.training), *out[1:])
        )
    elif case.hook == "output_scale":  # per position: allowed
        layer.register_forward_hook(lambda m, a, out: (out[0] * 1.01, *out[1:]))
