"""Steps through a pipeline of CPU ranks, by Megatron's schedule and by ours, case by case.

A job runs all cases of one layout, since starting ranks takes longer than most of them.  Rollouts
are those of the catalogue (schedules/), so its plans can be run too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_prefix.config import PrefixConfig
from megatron_prefix.features.verify.judge import longest_sums
from megatron_prefix.lab.data.pairs import pairs_of_groups
from megatron_prefix.lab.data.rollouts import Group, dense_vocabulary
from megatron_prefix.lab.models.build import build_model, unwrap
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.numerics.compare import Conditions, Trace, compare
from megatron_prefix.lab.plans import catalogue
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import align
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness import cases as cases_of_a_job
from tests.harness import steps
from tests.harness.data import REPOSITORY
from tests.harness.steps import Contract, Microbatch

FOLDER = REPOSITORY / "schedules"
SHAPES = {shape.name: shape for shape in catalogue.read_catalogue(FOLDER)[0]}


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        shape: of the catalogue, whose lengths the prefix schedule takes.
        model: preset.
        recompute: Megatron's activation recomputation.
        overrides: fields of the model's TransformerConfig.
        prefix: fields of PrefixConfig.
        contract: a loss of this form; None: GRPO, by `megatron_prefix.lab.verify.align`.
        planned: run the catalogue's plan file.
    """

    shape: str
    model: str = "tiny-llama"
    recompute: str = "none"
    overrides: dict[str, Any] = field(default_factory=dict)
    prefix: dict[str, Any] = field(default_factory=dict)
    contract: Contract | None = None
    planned: bool = False

    def config(self, layout: Layout) -> PrefixConfig:
        """The prefix schedule's."""
        shape = SHAPES[self.shape]
        options = shape.options
        path = FOLDER / catalogue.file_name(shape, layout.pp, layout.vpp)
        return PrefixConfig(
            **{
                "chunk_tokens": options.chunk_tokens,
                "segment_tokens": options.segment_tokens,
                "min_gain": options.min_gain,
                "kernel": "math",
                "plan_file": str(path) if self.planned else None,
                **self.prefix,
            }
        )


def rollouts_of(shape: str) -> tuple[list[Group], int]:
    """The shape's rollouts in a dense vocabulary, and its size; two of its groups are several."""
    several = shape == "several-groups"
    groups, size, _ = dense_vocabulary(SHAPES[shape].groups[: 2 if several else None])
    return groups, size


def run_cases(layout: Layout, cases: dict[str, Case]) -> dict[str, str]:
    """A rank's part of a job; see `cases.run_cases`."""
    return cases_of_a_job.run_cases(layout, cases, _run)


def _run(case: Case, layout: Layout) -> str:
    groups, vocab = rollouts_of(case.shape)
    if case.contract is None:
        chunks = shared_chunks(case, layout, vocab)
        verdict = align.over_ranks(
            align.align(chunks, groups, case.config(layout), multiple=layout.alignment)
        )
        shared = verdict.executed_tokens < verdict.raw_tokens
        return "; ".join(verdict.failures) if shared else "nothing was shared"
    chunks, items = build_chunks(case, layout, vocab), microbatches(groups)
    for chunk in chunks:
        case.contract.configure(chunk)
    expected = run_step(get_forward_backward_func(), case.contract, chunks, items)
    found = run_step(PrefixSchedule(case.config(layout)), case.contract, chunks, items)
    return difference(expected, found, chunks, sum(item["tokens"].numel() for item in items))


SHARED: dict[str, list[Any]] = {}
"""Of a rank's process."""


def shared_chunks(case: Case, layout: Layout, vocab: int) -> list[Any]:
    """Cases that differ in the prefix schedule alone have one model, and one stock step of it."""
    kind = repr((case.shape, case.model, case.recompute, case.overrides))
    if kind not in SHARED:
        SHARED[kind] = build_chunks(case, layout, vocab)
    return SHARED[kind]


def build_chunks(case: Case, layout: Layout, vocab: int) -> list[Any]:
    """This rank's model chunks with one layer each, in fp64."""
    spec = resolve(case.model, num_layers=layout.pp * layout.vpp).with_vocab(vocab)
    return build_model(
        spec, layout=layout, dtype="float64", recompute=case.recompute,
        config_overrides=case.overrides,
    )  # fmt: skip


def microbatches(groups: Sequence[Group]) -> list[Microbatch]:
    """One microbatch a rollout."""
    rollouts, numbers = pairs_of_groups(groups)
    return [
        steps.microbatch([pairs], number, uid, vocab=1 << 30)
        for uid, (pairs, number) in enumerate(zip(rollouts, numbers, strict=True))
    ]


@dataclass
class Result:
    """What a rank has after a step: the schedule's logs and the gradients."""

    logs: list[Any]
    gradients: dict[str, torch.Tensor]


def run_step(
    schedule: Callable[..., list[Any]],
    contract: Contract,
    chunks: list[Any],
    items: Sequence[Microbatch],
    iterators: Callable[[], Any] | None = None,
    **options: Any,
) -> Result:
    """Forward and backward; `iterators` makes what is passed as `data_iterator`."""
    for chunk in chunks:
        steps.zero_gradients(chunk)

    def everywhere() -> Any:
        return [iter(items) for _ in chunks] if len(chunks) > 1 else iter(items)

    logs = schedule(
        forward_step_func=contract.step,
        data_iterator=(iterators or everywhere)(),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(items),
        seq_length=max(item["tokens"].shape[1] for item in items),
        micro_batch_size=1,
        **{"forward_only": False, **options},
    )
    named = {
        f"chunk {number}: {name}": gradient
        for number, chunk in enumerate(chunks)
        for name, gradient in steps.gradients(chunk).items()
    }
    return Result(logs, named)


def difference(expected: Result, found: Result, chunks: list[Any], tokens: int) -> str:
    """Where two results differ by more than the numerics policy; "" for nowhere."""
    uids = [log["uid"] for log in found.logs]
    if [log["uid"] for log in expected.logs] != uids:
        return f"logs of {uids}"
    traces = [
        Trace(torch.tensor([log["loss"].double() for log in result.logs]), result.gradients)
        for result in (expected, found)
    ]
    width, depth = longest_sums(unwrap(chunks[0]).config)
    conditions = Conditions(torch.float64, tokens, width, depth)
    return "; ".join(compare(*traces, conditions).failures)


def needed_only(items: Sequence[Microbatch], chunks: list[Any]) -> Any:
    """`data_iterator` of a trainer that reads data on the first and the last stage alone."""
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    if len(chunks) == 1:
        return iter(items) if first or last else None
    return [
        iter(items) if (first and number == 0) or (last and number == len(chunks) - 1) else None
        for number in range(len(chunks))
    ]
