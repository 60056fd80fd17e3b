"""Forward steps as trainers write them: how they call the model, and in which layout.

The losses look at what the trainer's own batch says and weigh positions by microbatch, so that
answers in a wrong place, order or layout give other losses and gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch import Tensor

from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.tree import cp_layout
from tests.harness import steps

VOCAB = 64


@dataclass(frozen=True)
class Form:
    """How a trainer calls the model.

    Attributes:
        packed: samples lie one behind the other (THD), else one row each, padded at the end.
        pad: lengths of packed samples are padded to a multiple of it.
        logits: the call has no labels; the loss divides the logits in place.
        mask: the call has the loss mask; without it every position counts as trained.
        where: "everywhere", or "ends": tokens on the first stage only, labels and mask on the last.
        sizes: samples of every microbatch.
    """

    packed: bool = True
    pad: int = 1
    logits: bool = False
    mask: bool = True
    where: str = "everywhere"
    sizes: tuple[int, ...] = (3, 1, 2, 2)


ROWS = Form(packed=False)


def samples(seed: int, num: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens and trained flags of rollouts of three groups with turns, in a random order."""
    draw = np.random.default_rng(seed)
    prompts = [draw.integers(0, VOCAB, n) for n in (17, 9, 12)]
    turn = draw.integers(0, VOCAB, 6)
    found = []
    for number in range(num):
        prompt = prompts[number % 3]
        middle = turn if number % 2 else turn[:0]
        answer = draw.integers(0, VOCAB, int(draw.integers(2, 9)))
        tokens = np.concatenate([prompt, middle, answer])
        trained = np.arange(len(tokens)) >= len(prompt) + 2 * (number % 4 == 3)
        found.append((tokens, trained))
    order = draw.permutation(num)
    return [found[i] for i in order]


class Trainer:
    """Microbatches of one rank and the forward step over them.

    Args:
        form: how the model is called.
        seed: of the samples.
        layout: of the job.
        device: where the batches are.
    """

    def __init__(self, form: Form, seed: int, layout: Any, device: str = "cpu") -> None:
        self.form, self.layout, self.device = form, layout, device
        self.num = len(form.sizes)
        multiple = form.pad * (2 * layout.cp if layout.cp > 1 else 1)
        if layout.sequence_parallel:
            multiple *= layout.tp
        some = iter(self.samples(seed, sum(form.sizes)))
        self.batches = [
            self.batch_of([next(some) for _ in range(size)], number, multiple)
            for number, size in enumerate(form.sizes)
        ]
        self.order: list[int] = []
        self.reads = 0
        self.ended: list[int] = []

    def samples(self, seed: int, num: int) -> list[Any]:
        """Tokens and trained flags of rollouts; see `samples`."""
        return samples(seed, num)

    def batch_of(self, members: Sequence[Any], number: int, multiple: int) -> dict[str, Any]:
        form, longest = self.form, max(len(tokens) for tokens, *_ in members)
        columns: dict[str, list[np.ndarray]] = {"tokens": [], "labels": [], "loss_mask": []}
        lengths, true = [], []
        for tokens, trained, *_ in members:
            length = len(tokens) - 1 if form.packed else longest - 1
            length = -(-length // multiple) * multiple
            pad = length - (len(tokens) - 1)
            columns["tokens"].append(np.pad(tokens[:-1], (0, pad)))
            columns["labels"].append(np.pad(tokens[1:], (0, pad)))
            columns["loss_mask"].append(np.pad(trained[1:], (0, pad)).astype(np.float64))
            lengths.append(length)
            true.append(len(tokens) - 1)
        batch: dict[str, Any] = {"number": number, "lengths": lengths, "true": true}
        for name, rows in columns.items():
            mine = self.cut(rows)
            whole = np.concatenate(mine)[None] if form.packed else np.stack(mine)
            batch[name] = torch.from_numpy(whole).to(self.device)
        draw = torch.Generator().manual_seed(number)
        weight = torch.randn(batch["tokens"].shape, generator=draw, dtype=torch.float64)
        batch["weight"] = weight.to(self.device)
        return batch

    def cut(self, rows: list[np.ndarray]) -> list[np.ndarray]:
        """This context-parallel rank's parts of samples."""
        rank, size = parallel_state.get_context_parallel_rank(), self.layout.cp
        return [row[cp_layout.rank_positions(len(row), rank, size)] for row in rows]

    def iterator(self) -> Any:
        """What is passed as `data_iterator` for one model chunk."""
        return self._counted()

    def _counted(self) -> Iterator[dict[str, Any]]:
        for batch in self.batches:
            self.reads += 1
            yield batch

    def step(self, iterator: Any, model: Any) -> Any:
        batch = next(iterator)
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        everywhere = self.form.where == "everywhere"
        given = dict.fromkeys(("input_ids", "position_ids", "attention_mask"))
        if everywhere or first:
            given["input_ids"] = batch["tokens"]
        if (everywhere or last) and not self.form.logits:
            given["labels"] = batch["labels"]
        if (everywhere or last) and self.form.mask:
            given["loss_mask"] = batch["loss_mask"]
        if self.form.packed:
            given["packed_seq_params"] = self._packing(batch)
        given |= self.arguments(batch, given)
        try:
            output = model(**given)
            return output, self.loss_of(batch)
        finally:
            self.ended.append(batch["number"])

    def arguments(self, batch: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """What else the model is called with."""
        return {}

    def _packing(self, batch: dict[str, Any]) -> PackedSeqParams:
        padded, true = (
            torch.tensor(np.cumsum([0, *batch[name]]), dtype=torch.int32, device=self.device)
            for name in ("lengths", "true")
        )
        return PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=true, cu_seqlens_kv=true, cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded, max_seqlen_q=max(batch["lengths"]),
            max_seqlen_kv=max(batch["lengths"]),
        )  # fmt: skip

    def loss_of(self, batch: dict[str, Any]) -> Callable[[Any], Any]:
        def loss_func(output: Any) -> Any:
            self.order.append(batch["number"])
            nll = output
            if self.form.logits:
                output.div_(0.7)  # as trainers apply a temperature
                nll = nll_of(output, batch["labels"])
            mask = batch["loss_mask"].to(nll.dtype)
            loss = (nll * mask * batch["weight"].to(nll.dtype)).sum()
            count = mask.sum().to(torch.int32)
            log = {"number": batch["number"], "nll": (nll * mask).detach().double().clone()}
            return loss, count, log

        return loss_func


def nll_of(logits: Tensor, labels: Tensor) -> Tensor:
    """What labels cost, [samples, positions], from this rank's part of the vocabulary."""
    whole = logits
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        whole = gather_from_tensor_model_parallel_region(logits)
    return -whole.log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def run_step(schedule, trainer, chunks, *, forward_only=False):
    """A step, as the trainer's training loop makes it."""
    iterators = [trainer.iterator() for _ in chunks]
    return steps.run(
        schedule, trainer.step, chunks, [], num_microbatches=trainer.num, forward_only=forward_only,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
    )  # fmt: skip


def assert_shared(ours: Any, expected: Any, schedule: Any, trainer: Trainer, **sums: Any) -> Any:
    """Losses of every position and gradients are those expected, and a tenth ran once: the tree."""
    assert schedule.report is not None and schedule.report.decision.share
    forest = schedule.report.forest
    assert forest.executed_tokens < 0.9 * forest.raw_tokens
    tokens = sum(batch["tokens"].numel() for batch in trainer.batches)
    num = tokens * parallel_state.get_context_parallel_world_size()
    for mine, theirs in zip(ours.logs, expected.logs, strict=True):
        assert_close(mine["nll"], theirs["nll"], num)
    steps.assert_gradients(ours.gradients, expected.gradients, num, **{"sums": (0, 0), **sums})
    return forest
