"""Models as trainers have them: Megatron's GPTModel, and what is put around it."""

import collections
import contextlib
import functools
import random
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import gpt_model
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.trainers import kimi
from megatron_prefix.lab.models.build import build_model, unwrap
from megatron_prefix.lab.models.presets import resolve
from tests.cases import DRAWN, FAMILIES, LAYOUTS, RECOMPUTES
from tests.harness import lora, mtp_keyword, queues, sparse
from tests.harness.own_delta import FULL, LINEAR, own_layers
from tests.harness.quantised import RECIPES, by_recipe
from tests.harness.quantised import quantised as built_with
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
    dsa.DSAIndexerLossLoggingHelper.tracker.clear()
    languages = _languages(case, seed=case.seed + 1)
    reads: list[Tensor] = []
    models = [_model(case, language, reads) for language in languages]
    other = _languages(case, seed=case.seed + 2)[0] if case.calls.startswith("other") else None
    return Parts(models, languages, reads, other)


def routers(language: Any) -> list[Any]:
    """Those of its decoder that record or follow routes."""
    return [m for m in language.decoder.modules() if getattr(m, "router_replay", None) is not None]


def _model(case: Case, language: Any, reads: list[Tensor]) -> Any:
    """A language model with what the trainer has put around it."""
    action = RouterReplayAction.RECORD if case.model == "record" else None
    for router in routers(language):
        router.router_replay.set_router_replay_action(action or RouterReplayAction.REPLAY_FORWARD)
    hooked(case, language, reads)
    if case.sets not in ("nothing", "z_loss_coeff"):
        attention_of_last = language.decoder.layers[-1].self_attention
        attention_of_last.linear_proj = Slotted(attention_of_last.linear_proj)
    model = _wrapped(case, _headed(case, language))
    if case.ddp in ("wrapped", "overlapped", "overlapped without no_sync"):
        overlaps = case.ddp != "wrapped"
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=False, overlap_grad_reduce=overlaps,
            bucket_size=BUCKET if overlaps else None,
        )  # fmt: skip
        model = DistributedDataParallel(language.config, config, model)
        language.config.finalize_model_grads_func = finalize_model_grads
        if case.ddp == "overlapped":
            language.config.no_sync_func = model.no_sync
    model.train()
    return model


def _languages(case: Case, seed: int) -> list[Any]:
    """A language model for each chunk of this rank."""
    family = FAMILIES[case.model]
    overrides = {"variable_seq_lengths": True, **family.config}
    overrides |= RECOMPUTES.get(case.recompute, {})
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


def _adapted(**which: Any) -> Any:
    """Models that are built meanwhile are frozen, and have adapters."""
    return built_with(lambda model: lora.adapt(model, **which))


class Switched(lora.Adapted):
    """An adapter that can be off; the switch is the class's until it is used, as peft's is."""

    enabled = True

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        wrapped = super().forward if self.enabled else self.to_wrap
        return wrapped(x, *args, **kwargs)


@contextlib.contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    adapters = [one for one in model.modules() if isinstance(one, Switched)]
    for one in adapters:
        one.enabled = False
    yield
    for one in adapters:
        one.enabled = True


def _switched() -> Any:
    def adapt(model: Any) -> None:
        lora.adapt(model)
        for module in model.modules():
            if isinstance(module, lora.Adapted):
                module.__class__ = Switched

    return built_with(adapt)


def _trained(words: Sequence[str], are: bool) -> Any:
    """Of models that are built meanwhile parameters with one of these words in their names are
    trained alone, or all others are."""

    def freeze(model: Any) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(word in name for word in words) == are)

    return built_with(freeze)


@contextlib.contextmanager
def _streams() -> Iterator[None]:
    """Layers have several residual streams, as since Megatron-Core 0.20."""
    from megatron.core.transformer import hyper_connection, transformer_layer

    def streamed(config: Any, block: Any, **options: Any) -> Any:
        module = hyper_connection.HyperConnectionModule
        for layer in block.layer_specs:
            layer.module = transformer_layer.HyperConnectionTransformerLayer
            layer.submodules.self_attention_hyper_connection = module
            layer.submodules.mlp_hyper_connection = module
        return stock(config, block, **options)

    stock = gpt_model.GPTModel
    ranges = mock.patch.object(torch.cuda.nvtx, "range", contextlib.nullcontext)  # of a GPU alone
    with ranges, mock.patch.object(gpt_model, "GPTModel", streamed):
        yield


@contextlib.contextmanager
def _marked() -> Iterator[None]:
    """MLA's projections down are marked as transformer-engine's: cut, which they are not."""
    make = Linear.__init__

    def marked(self: Any, *args: Any, **named: Any) -> None:
        make(self, *args, **named)
        vars(self.weight).update(tensor_model_parallel=True, partition_dim=0, partition_stride=1)

    with mock.patch.object(Linear, "__init__", marked):
        yield


def _own_delta(case: Case, net: str, types: Sequence[str] = (LINEAR, FULL)) -> Any:
    return own_layers(types, net, LAYOUTS[case.layout].sequence_parallel)


@contextlib.contextmanager
def _own_delta_further(case: Case) -> Iterator[None]:
    with mtp_keyword.keyword(), _own_delta(case, "attribute"):
        yield


AROUND: dict[str, Callable[[Case], contextlib.AbstractContextManager[None]]] = {
    "": lambda case: contextlib.nullcontext(), "rotating": lambda case: sparse.rotating(),
    "learned_positions": lambda case: _positions("learned_absolute"),
    "no_positions": lambda case: _positions("none"), "marked projections": lambda case: _marked(),
    "streams": lambda case: _streams(), "kimi": lambda case: kimi.own_layers(),
    "kimi alone": lambda case: kimi.own_layers(kda=range(1, 9)),
    "adapted": lambda case: _adapted(), "switched": lambda case: _switched(),
    "adapted fc2": lambda case: _adapted(targets=("linear_fc2",)),
    "adapted last": lambda case: _adapted(layers=(1,)),
    "adapted first": lambda case: _adapted(layers=(0,)),
    **{f"quantised: {name}": lambda case, name=name: by_recipe(name) for name in RECIPES},
    "queues of slime": lambda case: queues.queued("slime"),
    "queues of miles": lambda case: queues.queued("miles"),
    "mtp keyword": lambda case: mtp_keyword.keyword(),
    "mtp keyword unused": lambda case: mtp_keyword.keyword(),
    "own sparse": lambda case: sparse.own_sparse(),
    "own sparse sharing": lambda case: sparse.own_sparse(every=2, first=1),
    "own delta attribute": lambda case: _own_delta(case, "attribute"),
    "own delta global": lambda case: _own_delta(case, "global"),
    "own delta keywords": lambda case: _own_delta(case, "keywords"),
    "own delta on stages": lambda case: _own_delta(
        case, "attribute", (LINEAR, LINEAR, LINEAR, FULL)
    ),
    "own delta mtp": lambda case: _own_delta_further(case),
    "own delta alone": lambda case: _own_delta(case, "attribute", (LINEAR, LINEAR)),
    "all but linear_kv_up_proj embedding": lambda case: _trained(
        ("linear_kv_up_proj", "embedding"), are=False
    ),
    "all but router norm": lambda case: _trained(("router", "norm"), are=False),
    "only linear_fc2": lambda case: _trained(("linear_fc2",), are=True),
    "only A_log": lambda case: _trained(("A_log",), are=True),
}  # fmt: skip
"""See `Family.around`."""
WITH_KEYWORD = {"mtp keyword", "own delta mtp"}
"""Those whose calls with gradients have slime's and miles' keyword."""


class Pair(NamedTuple):
    name: str
    factor: float


class Slots:
    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0


class Slotted(nn.Module):
    """A linear layer with two adapters beside it, of which the forward step says which one is for
    its microbatch, and how much of it: in one of many places (SETS)."""

    factor_of_class = 1.0

    def __init__(self, to_wrap: Any) -> None:
        super().__init__()
        self.to_wrap = to_wrap
        shape, draw = (2, *to_wrap.weight.shape), torch.Generator().manual_seed(11)
        dtype = to_wrap.weight.dtype
        weights = torch.randn(shape, generator=draw).to(dtype) * 0.1
        self.adapters = nn.Parameter(weights)
        self.register_buffer("factor", torch.ones((), dtype=dtype))
        self.slot, self.scale, self.doubled = 0, 1.0, False
        self.options, self.many, self.box = {"scale": 1.0}, [1.0], types.SimpleNamespace(scale=1.0)
        self.queue, self.pair, self.slots = collections.deque([1.0]), Pair("first", 1.0), Slots()
        self.nested: dict[str, Any] = {"a": [{"b": types.SimpleNamespace(factor=1.0)}]}
        self.partial = functools.partial(torch.mul, torch.ones((), dtype=dtype))
        self.array, self.chosen = np.ones(2), {0}
        self.bank = torch.linspace(1, 2, 9, dtype=dtype)
        self.view, self.tensor = self.bank[0], torch.ones((), dtype=dtype)
        SETTINGS["factor"] = Slotted.factor_of_class = 1.0

    def gain(self) -> Any:
        gain = self.scale * self.factor * self.options["scale"] * self.many[0] * self.box.scale
        gain = gain * self.queue[0] * self.pair.factor * self.nested["a"][0]["b"].factor
        gain = gain * self.slots.factor * float(self.array[1]) * (1 + min(self.chosen) / 4)
        gain = gain * self.factor_of_class * SETTINGS["factor"] * (2 if self.doubled else 1)
        return self.partial(self.tensor) * self.view * gain

    def left(self) -> tuple[float, ...]:
        return float(self.slot), float(self.gain())

    def forward(self, x: Tensor) -> Any:
        output, bias = self.to_wrap(x)
        narrow = functional.linear(x, self.adapters[self.slot])
        return output + self.gain() * narrow, bias


SETTINGS = {"factor": 1.0}
"""Of the module; `Slotted` reads it."""


def _set_hook(model: Any, slotted: Slotted, number: int) -> None:
    """One of the microbatch's own instead of the last one's."""
    layer = unwrap(model).decoder.layers[1]
    for handle in [*layer._forward_hooks]:
        del layer._forward_hooks[handle]
    layer.register_forward_hook(lambda _, args, output: (output[0] * (1 + number), *output[1:]))


def _set_once(model: Any, slotted: Slotted, number: int) -> None:
    """The same for every microbatch, in values of its own."""
    slotted.scale, slotted.many = 1.25, [0.5 + 0.5]
    slotted.pair, slotted.view = Pair("first", 0.5 + 0.75), slotted.bank[2]
    slotted.nested = {"a": [{"b": types.SimpleNamespace(factor=0.25 + 1)}]}
    slotted.partial = functools.partial(torch.mul, slotted.bank[4])
    unwrap(model).config.calls = {"at most": 2**20 + 2}


def _norm(model: Any) -> Any:
    return unwrap(model).decoder.final_layernorm.weight


SETS: dict[str, tuple[Callable[[Any, Any, int], Any], str]] = {
    "slot": (lambda m, s, n: setattr(s, "slot", n % 2), ".slot"),
    "number": (lambda m, s, n: setattr(s, "scale", 1 + n / 4), ".scale"),
    "flag": (lambda m, s, n: setattr(s, "doubled", bool(n % 2)), ".doubled"),
    "tensor": (
        lambda m, s, n: setattr(s, "scale", torch.tensor(1 + n / 4, dtype=s.factor.dtype)),
        ".scale",
    ),
    "buffer": (lambda m, s, n: s.factor.fill_(1 + n / 4), ".factor"),
    "dict": (lambda m, s, n: s.options.update(scale=1 + n / 4), ".options['scale']"),
    "list": (lambda m, s, n: s.many.__setitem__(0, 1 + n / 4), ".many"),
    "object": (lambda m, s, n: setattr(s.box, "scale", 1 + n / 4), ".box.scale"),
    # Of rows alone.
    "tensor in place": (lambda m, s, n: s.tensor.fill_(1 + n), ".tensor"),
    "view": (lambda m, s, n: setattr(s, "view", s.bank[n]), ".view"),
    "buffer replaced": (
        lambda m, s, n: setattr(s, "factor", torch.full_like(s.factor, 1 + n)), ".factor",
    ),
    "deque": (lambda m, s, n: s.queue.__setitem__(0, 1.0 + n), ".queue"),
    "set": (lambda m, s, n: (s.chosen.clear(), s.chosen.add(n)), ".chosen"),
    "tuple": (lambda m, s, n: setattr(s, "pair", Pair("x", 1.0 + n)), ".pair"),
    "slots": (lambda m, s, n: setattr(s.slots, "factor", 1.0 + n), ".slots.factor"),
    "nested": (
        lambda m, s, n: setattr(s.nested["a"][0]["b"], "factor", 1.0 + n),
        ".nested['a'][0]['b'].factor",
    ),
    "partial": (
        lambda m, s, n: setattr(
            s, "partial", functools.partial(torch.mul, torch.full_like(s.factor, 1 + n))
        ),
        ".partial",
    ),
    "array": (lambda m, s, n: s.array.fill(1.0 + n), ".array"),
    "class": (
        lambda m, s, n: setattr(Slotted, "factor_of_class", 1.0 + n), "Slotted.factor_of_class",
    ),
    "global": (lambda m, s, n: SETTINGS.update(factor=1.0 + n), "SETTINGS['factor']"),
    "hook": (_set_hook, "layers.1._forward_hooks"),
    "wrapper": (lambda m, s, n: setattr(m, "factor", 1.0 + n), "DistributedDataParallel.factor"),
    "parameter": (
        lambda m, s, n: _norm(m).detach().fill_(1.0 + n), "final_layernorm.weight",
    ),
    "once": (_set_once, ""),
    # Seen while the first step is watched only.
    "buffer's data": (lambda m, s, n: s.factor.data.fill_(1.0 + n), ".factor"),
    "weight's data": (lambda m, s, n: _norm(m).data.fill_(1.0 + n), "final_layernorm.weight"),
}  # fmt: skip
"""What sets something for microbatch n, of a model with a `Slotted` s; and the name of the place in
a reason, if it is one."""


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
    if case.head == "shortened" and language.post_process:
        stock = language.forward
        language.forward = lambda *args, **named: stock(*args, **named)[:, :-1]
    if case.head == "shortened" or (plain and not case.wrapper.startswith("super")):
        return language

    class Headed(GPTModel):
        """A subclass as trainers have them."""

        def forward(
            self, input_ids, position_ids=None, attention_mask=None, *more,
            output_processor_context=None, **named,
        ):  # fmt: skip
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
    return loss * _SCALE[0]


def set_scales(config: Any, function: Any) -> None:
    """Gives Megatron the functions by which it scales losses; two are of later releases, and are
    given none."""
    config.grad_scale_func = function
    for name in ("moe_grad_scale_func", "mtp_grad_scale_func"):
        if hasattr(config, name):
            setattr(config, name, lambda: function(torch.ones(1)))


def set_microbatch(model: Any, case: Case, number: int) -> None:
    """Sets what a case sets for microbatch `number`, before its model call."""
    if case.scale == "by_list_item":
        _SCALE[0] = 1 + number / 2
    if case.sets == "nothing":
        return
    for module in model.modules():
        if isinstance(module, Slotted):
            SETS[case.sets][0](model, module, number)
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


def _forked(hidden: Tensor) -> Tensor:
    with get_cuda_rng_tracker().fork():
        return functional.dropout(hidden, 0.0)


def _of_tracker(_: Any) -> float:
    with get_cuda_rng_tracker().fork():
        return float(torch.rand(()))


def _of_module(module: Any) -> float:
    return float(torch.rand((), generator=module.noise))


DRAWING: dict[str, Callable[[Any], float]] = {
    "draws of the tracker": _of_tracker,
    "draws of Python": lambda module: random.random(),
    "draws of NumPy": lambda module: float(np.random.rand()),  # as trainers do
    "draws of a module": _of_module,
}
"""Hooks of rows alone."""


def hooked(case: Case, language: Any, reads: list[Tensor]) -> None:
    if not language.decoder.layers:
        return
    layer = language.decoder.layers[0]
    layer.noise = torch.Generator().manual_seed(3) if case.hook == "draws of a module" else None
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
    elif case.hook in DRAWING:
        layer.register_forward_hook(
            lambda m, a, out: (out[0] * (1 + DRAWING[case.hook](m)), *out[1:])
        )
    elif case.hook == "noise of attention":
        core = layer.self_attention.core_attention
        core.register_forward_hook(lambda m, a, out: out + _noise(out))
    elif case.hook == "forks for nothing":  # as around Megatron's dropout of 0
        layer.register_forward_hook(lambda m, a, out: (_forked(out[0]), *out[1:]))
    elif case.hook == "output_scale":  # per position: allowed
        layer.register_forward_hook(lambda m, a, out: (out[0] * 1.01, *out[1:]))
