"""Stock schedule against prefix schedule: same weights, same microbatches, one optimizer step each.

What is compared is what training sees: every microbatch's loss, the log-prob of every trained
token, every parameter's gradient and every parameter after the step.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_prefix.config import PrefixConfig
from megatron_prefix.features.across.exchanges import Crossed
from megatron_prefix.features.overlap.reductions import overlaps
from megatron_prefix.lab.data.rollouts import Group
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.models.config import alignment
from megatron_prefix.lab.models.local import LocalAttention
from megatron_prefix.lab.models.optimizer import build_optimizer
from megatron_prefix.lab.models.presets import ModelSpec
from megatron_prefix.lab.models.weights import global_parameters
from megatron_prefix.lab.numerics import DRAWS, compare
from megatron_prefix.lab.numerics.compare import Trace, Verdict
from megatron_prefix.lab.numerics.pooled import Errors
from megatron_prefix.lab.plans.dealing import deal
from megatron_prefix.lab.rl import batches, loss, packing, passes, snapshot
from megatron_prefix.lab.rl.baseline import Baseline, packs_of
from megatron_prefix.lab.runtime.layout import Layout
from megatron_prefix.lab.verify.observed import take_auxiliary
from megatron_prefix.layers import precision
from megatron_prefix.megatron.install import install
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.schedule import PrefixSchedule

LR = 1e-3
ADAM_EPS = 1e-8
STOCK = "stock schedule"
"""The usual baseline."""
GATHERED = "stock schedule, its local attention over gathered keys"
"""The baseline where Megatron's local attention refuses context parallelism."""
ROLLOUT = Baseline("rollout")

Microbatch = dict[str, Any]
Drawn = tuple[list[Microbatch], Trace, Trace]
"""Microbatches of a draw, and what the stock and the prefix schedule make of them."""
Schedule = Callable[..., list[Any]]
SAYS = Callbacks(loss.trained, passes_together=True)
"""What is known of the microbatches and the passes of an alignment."""


@dataclass(frozen=True)
class Alignment(Verdict):
    """The verdict; the keys of `align --json`.

    Attributes:
        raw_tokens: positions of all rollouts.
        executed_tokens: positions that the prefix schedule computed.
        received_tokens: positions whose payloads came from other data-parallel ranks.
        received_bytes: of these and of the gradients that came back, on one rank of each
            data-parallel one.
        baseline: "packed" or "rollout": the microbatches of both schedules.
        pack_tokens: most positions of a packed microbatch; 0 if each is one rollout.
        microbatches: their number.
        compared_with: what the prefix schedule was compared with, in words.
    """

    raw_tokens: int = 0
    executed_tokens: int = 0
    received_tokens: int = 0
    received_bytes: int = 0
    baseline: str = ROLLOUT.name
    pack_tokens: int = 0
    microbatches: int = 0
    compared_with: str = STOCK


def turned_on(config: PrefixConfig, **fields: Any) -> PrefixConfig:
    """A configuration in mode "on", where nothing is measured, with other fields changed."""
    graphs = 0 if isinstance(config.graph_tokens, str) else config.graph_tokens
    return replace(config, mode="on", graph_tokens=graphs, **fields)


def data_rank() -> int:
    """This rank's place among the data-parallel ranks."""
    return int(parallel_state.get_data_parallel_rank())


def over_ranks(mine: Alignment) -> Alignment:
    """The verdict of all ranks together, the same on every rank."""
    everyone = compare.on_all_ranks((data_rank(), mine))
    parts = dict(everyone).values()  # of the ranks that have the same rollouts, one
    return Alignment(
        **vars(compare.over_ranks([verdict for _, verdict in everyone])),
        raw_tokens=sum(part.raw_tokens for part in parts),
        executed_tokens=sum(part.executed_tokens for part in parts),
        received_tokens=sum(part.received_tokens for part in parts),
        received_bytes=sum(part.received_bytes for part in parts),
        baseline=mine.baseline,
        pack_tokens=mine.pack_tokens,
        microbatches=sum(part.microbatches for part in parts),
        compared_with=mine.compared_with,
    )


def microbatches(
    groups: Sequence[Group], seed: int, multiple: int = 1, *, zero_sum: bool = False
) -> list[Microbatch]:
    """One microbatch per rollout, with advantages that differ by rollout.

    Advantages are drawn by seed: rewards may be equal throughout a group, and comparing zero
    gradients would prove nothing. With `zero_sum` those of a group of several sum to zero.
    """
    draw, items = np.random.default_rng(seed), []
    for group in groups:
        advantages = draw.standard_normal(len(group.rollouts))
        if zero_sum and len(advantages) > 1:
            advantages = advantages - advantages.mean()
        pairs = zip(group.rollouts, advantages.tolist(), strict=True)
        items += [batches.microbatch(one, value, multiple=multiple) for one, value in pairs]
    return items


def on_this_cp_rank(items: Sequence[Microbatch]) -> list[Microbatch]:
    """This rank's slices of whole microbatches."""
    rank = parallel_state.get_context_parallel_rank()
    size = parallel_state.get_context_parallel_world_size()
    return [batches.on_cp_rank(item, rank, size) for item in items]


def with_old_logprobs(
    items: Sequence[Microbatch], logprobs: Sequence[np.ndarray], seed: int
) -> list[Microbatch]:
    """The microbatches with old log-probs near the model's own, so that ratios differ from 1.

    Only the last pipeline stage has log-probs, and only its losses need them.
    """
    if not logprobs:
        return list(items)
    draw = np.random.default_rng(seed)
    with_old = []
    for item, values in zip(items, logprobs, strict=True):
        noise = 0.1 * draw.standard_normal(len(values))
        with_old.append(batches.with_logprobs(item, "old_logprobs", values + noise))
    return with_old


def run_step(
    schedule: Schedule, chunks: list[Any], items: Sequence[Microbatch], *, optimize: bool = True
) -> Trace:
    """Forward, backward and, to `optimize`, one AdamW step; the weights are put back afterwards."""
    buffers = [(b, b.clone()) for chunk in chunks for b in unwrap(chunk).buffers()]
    for chunk in chunks:
        chunk.zero_grad_buffer()
    # No clipping: at its edge a rounding difference would switch a token's gradient on or off.
    step = _recording(loss.forward_step(loss.GrpoConfig(clip_low=1.0, clip_high=1e9)))
    models = [unwrap(chunk) for chunk in chunks]
    take_auxiliary(models)  # multi-token prediction logs in passes without gradients, too
    logs = passes.run(schedule, step, chunks, items)
    gradients = {name: p.main_grad.detach().clone() for name, p in _parameters(chunks)}
    after = _after_adamw(chunks) if optimize else None
    auxiliary = take_auxiliary(models)
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    losses = [(log["loss"][0] / log["loss"][1].clamp(min=1)).double().cpu() for log in logs]
    logprobs = [log["logprobs"].double().cpu() for log in logs]
    return Trace(_joined(losses), gradients, after, logprobs=_joined(logprobs), auxiliary=auxiliary)


def _after_adamw(chunks: list[Any]) -> dict[str, Tensor]:
    """Every parameter after a step with the gradients that are there; the parameters stay."""
    before = {name: p.detach().clone() for name, p in _parameters(chunks)}
    optimizer = build_optimizer(chunks, lr=LR, eps=ADAM_EPS, clip_grad=0.0)
    optimizer.step()
    optimizer.zero_grad()  # it has set p.grad, where a backward would add to it
    after = {name: p.detach().clone() for name, p in _parameters(chunks)}
    with torch.no_grad():
        for name, parameter in _parameters(chunks):
            parameter.copy_(before[name])
    return after


def align(
    chunks: list[Any],
    groups: Sequence[Group],
    prefix_config: PrefixConfig,
    *,
    seed: int = 1234,
    multiple: int = 1,
    reference: Callable[[], list[Any]] | None = None,
    num_tokens: int | None = None,
    baseline: Baseline = ROLLOUT,
    least: int = 1,
    advance: Callable[..., None] = lambda *_: None,
) -> Alignment:
    """Compares the two schedules on one rank's rollouts.

    Args:
        chunks: this rank's model chunks, wrapped in DDP.
        groups: this rank's rollouts.
        prefix_config: of the prefix schedule.
        seed: of advantages and old log-probs; in FP8 advantages of a group sum to zero.
        multiple: positions of a rollout are padded to it (tp under sequence parallelism, times 2*cp
            with context parallelism).
        reference: builds fp32 chunks with the same weights; needed for 16 bit, in which errors are
            pooled over several draws.
        num_tokens: positions of all data-parallel ranks' rollouts, which a gradient sums up; None:
            this rank's are all.
        baseline: the microbatches of both schedules.
        least: packed microbatches to make at least; see `rl.baseline.num_packs`.
        advance: called with 1 after every draw, of which there are `num_draws`, and with 0 and
            words before every part of one.

    Raises:
        UserError: the model cannot run them.
    """
    packing.check(chunks, baseline)
    for chunk in chunks:
        install(chunk, prefix_config.kernel)  # what cannot run is refused before anything runs
    ours = PrefixSchedule(turned_on(prefix_config), SAYS)
    exact = reference() if reference is not None else None
    raw = sum(len(rollout) - 1 for group in groups for rollout in group.rollouts)
    make = functools.partial(made, groups, baseline, multiple, least)
    drawn = functools.partial(_draw, ours=ours, chunks=chunks, make=make, seed=seed, tell=advance)
    if any(map(overlaps, chunks)):
        drawn(0)  # the first step overlaps nothing
    first = [drawn(0)]
    items = first[0][0]
    if ours.report is None:
        raise RuntimeError("the prefix schedule left no report")
    conditions = snapshot.conditions(chunks, items, tokens=num_tokens or raw, lr=LR, eps=ADAM_EPS)
    verdict = compare.compare(*first[0][1:], conditions)
    if exact is None:
        advance(1)
    else:
        verdict = _pooled(exact, first, drawn, advance).judged(verdict)
    executed, crossed = ours.report.forest.executed_tokens, ours.report.crossed or Crossed()
    return Alignment(
        **vars(verdict), raw_tokens=raw, executed_tokens=executed,
        received_tokens=crossed.received_tokens, received_bytes=crossed.received_bytes,
        baseline=baseline.name, microbatches=len(items), compared_with=_compared_with(chunks),
        pack_tokens=baseline.pack_tokens if baseline.packed else 0,
    )  # fmt: skip


def _pooled(
    exact: list[Any],
    first: list[Drawn],
    drawn: Callable[[int], Drawn],
    advance: Callable[..., None],
) -> Errors:
    """Errors of both schedules against fp32 chunks, over all draws.

    A draw has gradients of the whole model: none is kept while the next one runs, so the first is
    taken out of its list.
    """
    errors = Errors()
    for draw in range(DRAWS):
        items, expected, found = drawn(draw) if draw else first.pop()
        advance(0, f"draw {draw + 1}, step of the stock schedule in fp32")
        errors.add(expected, found, run_step(stock_schedule(), exact, items, optimize=False))
        del expected, found
        advance(1)
    return errors


def num_draws(dtype: str) -> int:
    """Draws of tokens and advantages that `align` compares in a dtype."""
    return DRAWS if dtype == "bfloat16" else 1


def of_this_rank(
    spec: ModelSpec,
    layout: Layout,
    groups: Sequence[Group],
    config: PrefixConfig,
    baseline: Baseline,
    seed: int,
) -> tuple[Sequence[Group], int]:
    """This rank's groups of a step, and its least number of packed microbatches.

    Both schedules run what is dealt so, and can be compared as they are. `seed` is that of a random
    deal.
    """
    stock = not baseline.packed  # packs can be made equally many of any placement
    ranks = deal(groups, spec, layout, config, baseline.deal, stock=stock, seed=seed)
    return ranks[data_rank()], packs_of(ranks, baseline, layout, alignment(spec, layout))[
        data_rank()
    ]


def made(
    groups: Sequence[Group],
    baseline: Baseline,
    multiple: int,
    least: int,
    seed: int,
    vocab_size: int | None = None,
    *,
    zero_sum: bool = False,
) -> list[Microbatch]:
    """This rank's microbatches, with advantages of a seed, and with other tokens of a vocabulary
    if there is one; `zero_sum` as of `microbatches`."""
    drawn = groups if vocab_size is None else _relabelled(groups, vocab_size, seed)
    items = on_this_cp_rank(microbatches(drawn, seed, multiple, zero_sum=zero_sum))
    size = parallel_state.get_context_parallel_world_size()
    return packing.microbatches(items, baseline, cp_size=size, least=least)


def _draw(
    draw: int,
    ours: PrefixSchedule,
    chunks: list[Any],
    make: Callable[..., Any],
    seed: int,
    tell: Callable[..., None],
) -> Drawn:
    """Items, and what stock and prefix schedule make of them; draws after the first have other
    tokens, and neither an AdamW step nor a pass of the prefix schedule without gradients."""
    stock, first, model = stock_schedule(), seed + 2 * draw, unwrap(chunks[0])
    # In FP8 the limit of errors is that of groups whose advantages sum to zero, as trainers' do.
    zero_sum = precision.is_fp8(model.config)
    items = make(first, model.vocab_size if draw else None, zero_sum=zero_sum)
    tell(0, f"draw {draw + 1}, log-probs of the stock schedule")
    values = passes.logprobs(stock, chunks, items) or []
    if not draw:
        tell(0, "draw 1, log-probs of the prefix schedule")
    ours_values = values if draw else passes.logprobs(ours, chunks, items) or []
    items = with_old_logprobs(items, values, first + 1)
    tell(0, f"draw {draw + 1}, step of the stock schedule")
    expected = run_step(stock, chunks, items, optimize=not draw)
    tell(0, f"draw {draw + 1}, step of the prefix schedule")
    found = run_step(ours, chunks, items, optimize=not draw)
    return (
        items,
        replace(expected, forward=_forward(values)),
        replace(found, forward=_forward(ours_values)),
    )


def _relabelled(groups: Sequence[Group], vocab_size: int, seed: int) -> list[Group]:
    """The same rollouts in other tokens: what is shared stays shared."""
    other = np.random.default_rng(seed).permutation(vocab_size).astype(np.int32)
    return [
        replace(group, rollouts=tuple(replace(r, tokens=other[r.tokens]) for r in group.rollouts))
        for group in groups
    ]


def _compared_with(chunks: list[Any]) -> str:
    """What the stock schedule's attention is, in words."""
    modules = [module for chunk in chunks for module in chunk.modules()]
    gathers = (isinstance(m, LocalAttention) and m.pg_collection.cp.size() > 1 for m in modules)
    return GATHERED if any(gathers) else STOCK


def _forward(logprobs: Sequence[np.ndarray]) -> Tensor:
    return _joined([torch.from_numpy(values) for values in logprobs])


def _parameters(chunks: list[Any]) -> Iterator[tuple[str, Any]]:
    for chunk in chunks:
        yield from global_parameters(unwrap(chunk))


def _joined(values: list[Tensor]) -> Tensor:
    """All values in one row; none on a pipeline stage that has none."""
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(v.reshape(-1) for v in values)])


def _recording(step: loss.ForwardStep) -> loss.ForwardStep:
    """The forward step with the trained tokens' log-probs among its logs."""

    def recorded(data_iterator: Iterator[Microbatch], model: Any) -> tuple[Tensor, Any]:
        item = next(data_iterator)
        output, loss_func = step(itertools.chain([item]), model)

        def with_logprobs(values: Tensor) -> Any:
            total, num_tokens, logs = loss_func(values)
            mask = (item["loss_mask"] != 0).to(values.device)
            return total, num_tokens, {**logs, "logprobs": -values.detach()[mask]}

        return output, with_logprobs

    return recorded
