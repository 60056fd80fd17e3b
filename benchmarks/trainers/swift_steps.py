"""ms-swift's own trainers of preferences, rewards and distillation: updates, packed.

"dpo", "kto", "rm", "gkd" or "sft" in a layout's name says which trainer. "full": a reference model
of its own, else the model itself with adapters off; "kl": KTO with its second pair of samples.

Of ms-swift run the trainers' files: forward steps, losses and what these call. Their `__init__`,
which builds models and data sets, is left out; batches are what its collator makes.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn import functional

from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import build_model, unwrap
from megatron_prefix.lab.models.presets import resolve
from tests.core.trainers import worker
from tests.core.trainers.both import Both, Step, changed, config_of
from tests.core.trainers.cpu_training import run_on_cpu
from tests.core.trainers.verl_steps import PROMPT, VOCAB, rows
from tests.harness import lora

FOLDER, PACKAGE = "swift/megatron/trainers", "swift.megatron.trainers"
UNUSED = ("swift", "mcore_bridge", "modelscope", "trl", "accelerate")
FILES = {"dpo": "dpo_trainer", "kto": "kto_trainer", "rm": "reward_trainer", "gkd": "gkd_trainer",
         "sft": "trainer"}  # fmt: skip
CLASSES = {"dpo": "DPO", "kto": "KTO", "rm": "Reward", "gkd": "GKD", "sft": ""}
IGNORED = -100


class Base:
    """What its trainers take from their base class in a step, as written there (base.py)."""

    def __init__(self, args: Any, *_: Any) -> None:
        self.args, self._step, self.steps_per_generation = args, 1, 1

    def get_batch(self, iterator: Any, *_: Any) -> dict[str, Any]:
        return self._prepare_batch(next(iterator), *_)

    def _prepare_batch(self, data: dict[str, Any], *_: Any) -> dict[str, Any]:
        return dict(data)

    def _all_reduce_metric(
        self, metric: dict[str, Tensor], reduction: Any = dist.ReduceOp.SUM, group: Any = None
    ) -> dict[str, Tensor]:
        found = torch.stack(list(metric.values())).detach()
        dist.all_reduce(found, reduction, group=group or mpu.get_data_parallel_group())
        return dict(zip(metric, found, strict=True))

    def _flush_log_completions(self) -> None:
        """Writes tables of completions."""

    def get_last_tokens(self, output: Tensor, packing: Any, *_: Any) -> Tensor:
        last = packing.cu_seqlens_q[: len(packing.seq_lens)] + packing.seq_lens - 1
        return output[0, last]


class Losses:
    """What trl's trainers of preferences compute: DPO's sigmoid loss, and KTO's."""

    def dpo_loss(self, *logps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        chosen, rejected, reference_chosen, reference_rejected = logps
        rewards = (
            self.beta * (chosen - reference_chosen),
            self.beta
            * (  # type: ignore[attr-defined]
                rejected - reference_rejected
            ),
        )
        return -functional.logsigmoid(rewards[0] - rewards[1]), *(r.detach() for r in rewards)

    def kto_loss(self, *logps: Any) -> tuple[Tensor, ...]:
        chosen, rejected, kl, reference_chosen, reference_rejected, reference_kl = logps
        mean = chosen.new_zeros(1)
        if self.calculate_KL:  # type: ignore[attr-defined]
            mean = (kl - reference_kl).mean().detach().clamp(min=0)[None]
        good, bad = chosen - reference_chosen, rejected - reference_rejected
        beta = self.beta  # type: ignore[attr-defined]
        losses = [1 - (beta * (good - mean)).sigmoid(), 1 - (beta * (mean - bad)).sigmoid()]
        return torch.cat(losses), beta * good.detach(), beta * bad.detach(), mean


class Adapter(lora.Adapted):
    """An adapter with the switch of peft's layers."""

    disable_adapters = False

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        if not self.disable_adapters:
            return super().forward(x, *args, **kwargs)
        output, bias = self.to_wrap(x, *args, **kwargs)
        return output, bias


class Peft:
    """The model as peft shows it."""

    def __init__(self, model: Any) -> None:
        self._adapters = [one for one in model.modules() if isinstance(one, Adapter)]

    @contextlib.contextmanager
    def disable_adapter(self) -> Iterator[None]:
        for one in self._adapters:
            one.disable_adapters = True
        yield
        for one in self._adapters:
            one.disable_adapters = False


def load(name: str) -> Any:
    """A trainer's class, of its file alone: its packages import what these CPUs lack."""
    given = {
        "swift.rlhf_trainers": {"DPOTrainer": Losses}, "trl": {"KTOTrainer": Losses},
        f"{PACKAGE}.base": {"BaseMegatronTrainer": Base},
    }  # fmt: skip
    for module, names in given.items():
        made = sys.modules[module] = ModuleType(module)
        vars(made).update(names, __path__=[], __getattr__=lambda _: object)
    loss = _file("swift.rlhf_trainers.gkd_loss", "swift/rlhf_trainers/gkd_loss.py")
    for one in ("utils", "vocab_parallel_utils", "gkd_utils", "rlhf_mixin"):
        _file(f"{PACKAGE}.{one}", f"{FOLDER}/{one}.py")
    module = _file(f"{PACKAGE}.{FILES[name]}", f"{FOLDER}/{FILES[name]}.py")
    return getattr(module, f"Megatron{CLASSES[name]}Trainer"), loss


def _file(module: str, place: str) -> Any:
    path = next(found for one in sys.path if (found := Path(one, place)).exists())
    spec = importlib.util.spec_from_file_location(module, path)
    assert spec is not None and spec.loader is not None
    made = sys.modules[module] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def packs(name: str) -> list[dict[str, Any]]:
    """What its collator makes of pairs of one prompt: all chosen ones, then all rejected ones."""
    ids, mask = rows()
    alike = sorted(range(len(ids)), key=lambda row: ids[row, :PROMPT].tolist())
    found = []
    for start in range(0, len(ids), 4):
        members = [alike[start + place] for place in (0, 2, 1, 3)]
        found.append(_pack([(ids[row], mask[row]) for row in members], name))
    return found


def _pack(samples: list[tuple[Tensor, Tensor]], name: str) -> dict[str, Any]:
    tokens, labels, places, lengths = [], [], [], []
    for ids, held in samples:
        prompt, whole = int(held[:PROMPT].sum()), ids[held.bool()]
        own = whole.clone()
        own[:prompt] = IGNORED
        if "sft" in name:  # several turns: not all of an answer is the model's
            own[prompt + 1 :: 3] = IGNORED
        tokens.append(whole)
        labels.append(own if name == "rm" else torch.cat([own[1:], own.new_tensor([IGNORED])]))
        places.append(torch.arange(len(whole)))
        lengths.append(len(whole))
    ends = functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
    packing = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )  # fmt: skip
    packing.seq_lens = torch.tensor(lengths)
    return {
        "input_ids": torch.cat(tokens)[None], "labels": torch.cat(labels)[None],
        "position_ids": torch.cat(places)[None], "attention_mask": None,
        "packed_seq_params": packing,
    }  # fmt: skip


def adapted(model: Any) -> None:
    lora.adapt(model)
    for module in model.modules():
        if isinstance(module, lora.Adapted):
            module.__class__ = Adapter
    _with_its_own(model)


def scored(model: Any) -> None:
    """mcore_bridge's head for rewards: a linear layer that every rank has whole."""

    class Head(torch.nn.Linear):
        def forward(self, x: Tensor, *_: Any, **__: Any) -> Any:
            return super().forward(x), None

    if model.post_process:
        model.output_layer = Head(model.config.hidden_size, 1, bias=False)
        stock = model._postprocess
        model._postprocess = lambda **given: stock(**given | {"labels": None})
    _with_its_own(model)


def _with_its_own(model: Any) -> None:
    """What mcore_bridge's GPTModel has for its trainers."""
    model.get_input_tensor = lambda: model.decoder.input_tensor


class Wrapped:
    """A chunk in two wrappers, as in 16 bit."""

    def __init__(self, chunk: Any) -> None:
        self._chunk, self.module = chunk, SimpleNamespace(module=unwrap(chunk))

    def __call__(self, **data: Any) -> Any:
        return self._chunk(**data)


def trainer_of(kind: str, name: str, chunk: Any, reference: Any) -> Any:
    """One of its trainers around a model, without its `__init__`."""
    made, losses = load(kind)
    args = SimpleNamespace(
        padding_free=True, context_parallel_size=1, sequence_parallel=False, rpo_alpha=None,
        center_rewards_coefficient=0.01, task_type="causal_lm", enable_dft_loss=False,
        enable_channel_loss=False, tuner_type="full" if reference else "lora",
        mcore_ref_adapter=None, ref_adapters=None, calculate_KL="kl" in name,
    )  # fmt: skip
    trainer = object.__new__(made)
    Base.__init__(trainer, args)
    trainer.unwrapped_models, trainer.peft_models = [unwrap(chunk)], [Peft(chunk)]
    trainer.ref_models = [reference]
    trainer.beta, trainer.temperature, trainer.sft_alpha = 0.5, 1.0, 0.1
    own = SimpleNamespace(beta=0.1, calculate_KL=args.calculate_KL)
    own.dpo_loss, own.kto_loss = (
        function.__get__(own) for function in (Losses.dpo_loss, Losses.kto_loss)
    )
    trainer.dummy_dpo_trainer = trainer.dummy_kto_trainer = own
    if kind == "gkd":
        trainer.teacher, trainer.use_teacher_api = losses.TeacherOutput, False
    return trainer


def batches(kind: str, trainer: Any, layout: Any) -> list[dict[str, Any]]:
    """What the trainer's `get_batch` gives."""
    found = []
    for number, pack in enumerate(packs(kind)):
        batch: Any = pack
        if kind == "kto":
            batch = {f"completion_{key}": value for key, value in pack.items()}
            other = packs(kind)[number - 1]  # prompts with answers to others
            batch |= {f"KL_completion_{key}": value for key, value in other.items()}
            batch["label"] = [True, True, False, False]
        elif kind == "gkd":
            draw = torch.Generator().manual_seed(number)
            shape = *pack["labels"].shape, VOCAB
            whole = torch.randn(shape, generator=draw).chunk(layout.tp, -1)
            mine = whole[dist.get_rank() % layout.tp].contiguous()
            pack["teacher_output"] = trainer.teacher(full_logits=mine, labels=pack["labels"])
        found.append(batch)
    return found


def steps(name: str) -> list[Step]:
    """Two updates, on one rank."""
    kind = next(one for one in FILES if one in name.split("-"))
    layout = worker.layout_of(name)
    runtime.initialize(layout)
    spec = resolve("tiny-qwen3", num_layers=2, tie_embeddings=False).with_vocab(VOCAB)
    change = {"rm": scored}.get(kind, _with_its_own if "full" in name else adapted)
    options: dict[str, Any] = {"config_overrides": {"variable_seq_lengths": True}}
    with changed(change):
        (chunk,) = build_model(spec, layout=layout, **options)
    reference = None
    if "full" in name:
        with changed(_with_its_own):
            (reference,) = build_model(spec, layout=layout, wrap_ddp=False, seed=5, **options)
    trainer, both = trainer_of(kind, name, chunk, reference), Both(config_of(name))
    given, wrapped = batches(kind, trainer, layout), Wrapped(chunk)
    for _ in range(2):
        chunk.zero_grad_buffer()
        both()(
            forward_step_func=lambda iterator, _: trainer.forward_step(iterator, wrapped),
            data_iterator=map(dict, given), model=chunk,
            num_microbatches=len(given), seq_length=64, micro_batch_size=1, forward_only=False,
        )  # fmt: skip
    return both.steps


if __name__ == "__main__":
    run_on_cpu()
    worker.StandIns(*UNUSED)
    worker.main(["swift"], steps)
