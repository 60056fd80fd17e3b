"""Stock schedule against prefix schedule: same weights, same rollouts, one optimizer step each.

What is compared is what training sees: every microbatch's loss, the log-prob of every trained
    token, every parameter's gradient and every parameter after the step.  The verdict follows the
    numerics policy (megatron_prefix/numerics.py): one tolerance from dtype and length; in 16 bit
    the error of the prefix schedule against an fp32 reference may be at most 1.1 times that of the
    stock schedule.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_prefix import numerics
from megatron_prefix.config import PrefixConfig
from megatron_prefix.data.rollouts import Group
from megatron_prefix.install import install
from megatron_prefix.models.build import unwrap
from megatron_prefix.models.local import ContextParallelAttention
from megatron_prefix.models.optimizer import build_optimizer
from megatron_prefix.models.weights import global_parameters
from megatron_prefix.pipeline.entry import PrefixSchedule
from megatron_prefix.rl import batches, loss
from megatron_prefix.router.observed import take_auxiliary

LR = 1e-3
ADAM_EPS = 1e-8
ERROR_RATIO = 1.1
"""In 16 bit: how much larger than the stock schedule's error ours may be (design, section 10)."""

STOCK = "stock schedule"
GATHERED = "stock schedule, its local attention over gathered keys"
"""The baseline where Megatron's local attention refuses context parallelism (models/local.py)."""

Microbatch = dict[str, Any]
Schedule = Callable[..., list[Any]]


@dataclass(frozen=True)
class Trace:
    """What one schedule computed.

    Attributes:
        losses: loss of every microbatch, float64 [microbatches].
        logprobs: of every trained token, float64 [trained tokens].
        gradients: by parameter name, on the CPU.
        parameters: after one optimizer step, by name, on the CPU.
        auxiliary: what the step left in the routers (router/observed.py).
    """

    losses: Tensor
    logprobs: Tensor
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    auxiliary: dict[str, Tensor]


@dataclass(frozen=True)
class Alignment:
    """The verdict; the keys of `align --json`.

    Attributes:
        loss_max_abs_diff: over microbatches.
        logprob_max_abs_diff: over trained tokens, with and without gradients.
        grad_max_rel_diff: over parameters, relative to each one's largest stock gradient.
        param_max_abs_diff: over parameters after one AdamW step.
        raw_tokens: positions of all rollouts.
        executed_tokens: positions that the prefix schedule computed.
        passed: every difference is within the policy.
        tolerance: the relative tolerance (in 16 bit: of the error ratio).
        grad_error_ratio_max: in 16 bit the largest ratio of errors over parameters, else None.
        grad_error_ratio_p50: its median.
        failures: what was outside, one line each.
        baseline: what the prefix schedule was compared with.
    """

    loss_max_abs_diff: float
    logprob_max_abs_diff: float
    grad_max_rel_diff: float
    param_max_abs_diff: float
    raw_tokens: int
    executed_tokens: int
    passed: bool
    tolerance: float
    grad_error_ratio_max: float | None = None
    grad_error_ratio_p50: float | None = None
    failures: tuple[str, ...] = ()
    baseline: str = STOCK

    def as_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def microbatches(groups: Sequence[Group], seed: int, multiple: int = 1) -> list[Microbatch]:
    """One microbatch a rollout, with advantages that differ by rollout.

    Advantages are drawn by seed: rewards may be equal throughout a group, and comparing zero
    gradients would prove nothing.
    """
    draw = np.random.default_rng(seed)
    return [
        batches.microbatch(rollout, float(draw.standard_normal()), multiple=multiple)
        for group in groups
        for rollout in group.rollouts
    ]


def on_this_cp_rank(items: Sequence[Microbatch]) -> list[Microbatch]:
    """This rank's slices of whole microbatches."""
    rank = parallel_state.get_context_parallel_rank()
    size = parallel_state.get_context_parallel_world_size()
    return [batches.on_cp_rank(item, rank, size) for item in items]


def run_logprobs(
    schedule: Schedule, chunks: list[Any], items: Sequence[Microbatch]
) -> list[np.ndarray]:
    """Log-probs of the trained tokens of every microbatch, by a pass with forward_only."""
    with torch.no_grad():
        logs = call_schedule(schedule, loss.logprob_step(), chunks, items, forward_only=True)
    if not logs:
        return []  # not the last pipeline stage
    return [
        batches.trained_logprobs(item, log["logprobs"])
        for item, log in zip(items, logs, strict=True)
    ]


def with_old_logprobs(
    items: Sequence[Microbatch], logprobs: Sequence[np.ndarray], seed: int
) -> list[Microbatch]:
    """The microbatches with old log-probs near the model's own, so that ratios differ from 1.

    Only the last pipeline stage has log-probs, and only its losses need them.
    """
    if not logprobs:
        return list(items)
    draw = np.random.default_rng(seed)
    found = []
    for item, values in zip(items, logprobs, strict=True):
        column = torch.zeros_like(item["advantages"])
        noise = 0.1 * draw.standard_normal(len(values))
        column[item["loss_mask"] != 0] = torch.from_numpy(values + noise).to(column.dtype)
        found.append({**item, "old_logprobs": column})
    return found


def run_step(schedule: Schedule, chunks: list[Any], items: Sequence[Microbatch]) -> Trace:
    """Forward, backward and one AdamW step; the weights are put back afterwards."""
    before = {name: p.detach().clone() for name, p in _parameters(chunks)}
    buffers = [(b, b.clone()) for chunk in chunks for b in unwrap(chunk).buffers()]
    optimizer = build_optimizer(chunks, lr=LR, eps=ADAM_EPS, clip_grad=0.0)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    # No clipping: at its edge a rounding difference would switch a token's gradient on or off.
    step = _recording(loss.forward_step(loss.GrpoConfig(clip_low=1.0, clip_high=1e9)))
    logs = call_schedule(schedule, step, chunks, items)
    gradients = {name: p.main_grad.detach().cpu().clone() for name, p in _parameters(chunks)}
    optimizer.step()
    after = {name: p.detach().cpu().clone() for name, p in _parameters(chunks)}
    auxiliary = take_auxiliary([unwrap(chunk) for chunk in chunks])
    with torch.no_grad():
        for name, parameter in _parameters(chunks):
            parameter.copy_(before[name])
        for buffer, value in buffers:
            buffer.copy_(value)
    losses = [(log["loss"][0] / log["loss"][1].clamp(min=1)).double().cpu() for log in logs]
    logprobs = [log["logprobs"].double().cpu() for log in logs]
    return Trace(_joined(losses), _joined(logprobs), gradients, after, auxiliary)


def align(
    chunks: list[Any],
    groups: Sequence[Group],
    prefix_config: PrefixConfig,
    *,
    seed: int = 1234,
    multiple: int = 1,
    reference: Callable[[], list[Any]] | None = None,
    num_tokens: int | None = None,
) -> Alignment:
    """Compares the two schedules on one rank's rollouts.

    Args:
        chunks: this rank's model chunks, wrapped in DDP.
        groups: this rank's rollouts.
        prefix_config: of the prefix schedule.
        seed: of advantages and old log-probs.
        multiple: positions of a rollout are padded to it (tp under sequence parallelism, times 2*cp
            with context parallelism).
        reference: builds fp32 chunks with the same weights; needed for 16 bit.
        num_tokens: positions of all data-parallel ranks' rollouts, which a gradient sums up; None:
            this rank's are all.
    """
    for chunk in chunks:
        install(chunk, prefix_config.kernel)  # what cannot run is refused before anything runs
    stock, ours = get_forward_backward_func(), PrefixSchedule(replace(prefix_config, mode="on"))
    items = on_this_cp_rank(microbatches(groups, seed, multiple))
    expected_logprobs = run_logprobs(stock, chunks, items)
    forward_diff = _largest_difference(expected_logprobs, run_logprobs(ours, chunks, items))
    items = with_old_logprobs(items, expected_logprobs, seed + 1)
    expected = run_step(stock, chunks, items)
    found = run_step(ours, chunks, items)
    if ours.report is None:
        raise RuntimeError("the prefix schedule left no report")
    exact = run_step(stock, reference(), items) if reference is not None else None
    raw = sum(len(rollout) - 1 for group in groups for rollout in group.rollouts)
    executed = ours.report.forest.executed_tokens
    verdict = _judge(expected, found, exact, forward_diff, (num_tokens or raw, raw, executed))
    return replace(verdict, baseline=_baseline(chunks))


def _judge(
    expected: Trace,
    found: Trace,
    exact: Trace | None,
    forward_diff: float,
    tokens: tuple[int, int, int],
) -> Alignment:
    """The verdict; `tokens`: positions that a gradient sums up, this rank's, and executed."""
    num_summed, raw, executed = tokens
    dtype = next(iter(expected.parameters.values())).dtype
    limit = ERROR_RATIO if exact is not None else numerics.tolerance(dtype, num_summed)
    gradients = {n: _error(found.gradients[n], g) for n, g in expected.gradients.items()}
    loss_diff = float((found.losses - expected.losses).abs().max())
    logprob_diff = max(forward_diff, float((found.logprobs - expected.logprobs).abs().max()))
    parameters = {
        n: float((found.parameters[n].double() - p.double()).abs().max())
        for n, p in expected.parameters.items()
    }
    ratios: list[float] = []
    failures: list[str] = []
    if not any(g.abs().max() > 0 for g in expected.gradients.values()):
        failures.append("every stock gradient is zero: nothing was compared")
    if exact is not None:
        ratios = _error_ratios(expected, found, exact)
        failures += [] if max(ratios) <= limit else [f"gradient error ratio {max(ratios):.3f}"]
        limits = _forward_limits(expected, exact)
    else:
        failures += [f"gradient of {n}: {e:.2e}" for n, e in gradients.items() if not e <= limit]
        failures += _parameter_failures(expected, parameters, limit, dtype)
        failures += _auxiliary_failures(expected, found, raw)
        scale = max(1.0, float(expected.logprobs.abs().max()), float(expected.losses.abs().max()))
        limits = (limit * scale, limit * scale)
    for name, value, most in (
        ("loss", loss_diff, limits[0]),
        ("log-prob", logprob_diff, limits[1]),
    ):
        if not value <= most:
            failures.append(f"{name}: {value:.2e} exceeds {most:.2e}")
    return Alignment(
        loss_diff, logprob_diff, max(gradients.values()), max(parameters.values()), raw, executed,
        not failures, limit, max(ratios, default=None),
        float(np.median(ratios)) if ratios else None, tuple(failures),
    )  # fmt: skip


def _baseline(chunks: list[Any]) -> str:
    """What the stock schedule's attention is, in words."""
    modules = [module for chunk in chunks for module in chunk.modules()]
    return GATHERED if any(isinstance(m, ContextParallelAttention) for m in modules) else STOCK


def _error_ratios(expected: Trace, found: Trace, exact: Trace) -> list[float]:
    """Per parameter |prefix - fp32| / |stock - fp32| of the gradients, in the 2-norm."""
    ratios = []
    for name, truth in exact.gradients.items():
        stock = float((expected.gradients[name].double() - truth.double()).norm())
        ours = float((found.gradients[name].double() - truth.double()).norm())
        if not (math.isfinite(stock) and math.isfinite(ours)):
            raise ValueError(f"gradient of {name} is not finite: stock {stock}, prefix {ours}")
        ratios.append(1.0 if ours == stock else ours / stock if stock else math.inf)
    return ratios


def _forward_limits(expected: Trace, exact: Trace) -> tuple[float, float]:
    """In 16 bit losses and log-probs may differ by what 16 bit costs the stock schedule."""
    loss_error = float((expected.losses - exact.losses).abs().max())
    logprob_error = float((expected.logprobs - exact.logprobs).abs().max())
    return (1 + ERROR_RATIO) * loss_error, (1 + ERROR_RATIO) * logprob_error


def _parameter_failures(
    expected: Trace, differences: dict[str, float], limit: float, dtype: torch.dtype
) -> list[str]:
    """The first AdamW step is lr * g / (|g| + eps): a gradient that is off by d moves a parameter
    by at most lr * min(2, d / eps), and storing it rounds once more."""
    found = []
    for name, parameter in expected.parameters.items():
        gradient = limit * float(expected.gradients[name].abs().max())
        rounding = 2 * torch.finfo(dtype).eps * float(parameter.abs().max())
        most = LR * min(2.0, gradient / ADAM_EPS) + rounding
        if not differences[name] <= most:
            found.append(f"parameter {name}: {differences[name]:.2e} exceeds {most:.2e}")
    return found


def _auxiliary_failures(expected: Trace, found: Trace, num_tokens: int) -> list[str]:
    """Routers' logged losses and biases, which Megatron keeps in fp32 whatever the model's dtype."""
    if expected.auxiliary.keys() != found.auxiliary.keys():
        return [f"routers left {sorted(found.auxiliary)}, not {sorted(expected.auxiliary)}"]
    limit = numerics.tolerance(torch.float32, num_tokens)
    errors = {n: _error(found.auxiliary[n], v) for n, v in expected.auxiliary.items()}
    return [f"{name}: {error:.2e}" for name, error in errors.items() if not error <= limit]


def _error(actual: Tensor, expected: Tensor) -> float:
    try:
        return numerics.relative_error(actual, expected)
    except ValueError:
        return math.inf


def _largest_difference(expected: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> float:
    pairs = zip(expected, found, strict=True)
    return max((float(np.abs(a - b).max()) for a, b in pairs if len(a)), default=0.0)


def _parameters(chunks: list[Any]) -> Iterator[tuple[str, Any]]:
    for chunk in chunks:
        yield from global_parameters(unwrap(chunk))


def _joined(values: list[Tensor]) -> Tensor:
    """All values in one row; a single zero on a pipeline stage that has none."""
    return torch.cat([torch.zeros(1, dtype=torch.float64), *(v.reshape(-1) for v in values)])


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


def call_schedule(
    schedule: Schedule,
    step: loss.ForwardStep,
    chunks: list[Any],
    items: Sequence[Microbatch],
    forward_only: bool = False,
) -> list[Any]:
    """Runs a schedule on microbatches of their own lengths."""
    longest = max(item["tokens"].shape[1] for item in items)
    many = len(chunks) > 1
    return schedule(
        forward_step_func=step,
        data_iterator=[iter(items) for _ in chunks] if many else iter(items),
        model=chunks if many else chunks[0],
        num_microbatches=len(items),
        seq_length=longest,
        micro_batch_size=1,
        forward_only=forward_only,
    )


def data_rank() -> int:
    """This rank's place among the data-parallel ranks."""
    return int(parallel_state.get_data_parallel_rank())


def over_ranks(mine: Alignment) -> Alignment:
    """The verdict of all ranks together, the same on every rank."""
    verdicts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(verdicts, mine)
    owners: list[Any] = [None] * len(verdicts)
    torch.distributed.all_gather_object(owners, data_rank())
    parts = dict(zip(owners, verdicts, strict=True))

    def most(name: str) -> Any:
        values = [getattr(v, name) for v in verdicts if getattr(v, name) is not None]
        # max() forgets a NaN that does not come first; a NaN anywhere must stay one.
        return max(values, key=lambda x: math.inf if math.isnan(x) else x, default=None)

    failures = [
        f"rank {rank}: {line}" if len(verdicts) > 1 else line
        for rank, verdict in enumerate(verdicts)
        for line in verdict.failures
    ]
    return Alignment(
        most("loss_max_abs_diff"), most("logprob_max_abs_diff"), most("grad_max_rel_diff"),
        most("param_max_abs_diff"), sum(v.raw_tokens for v in parts.values()),
        sum(v.executed_tokens for v in parts.values()), all(v.passed for v in verdicts),
        most("tolerance"), most("grad_error_ratio_max"), most("grad_error_ratio_p50"),
        tuple(failures), mine.baseline,
    )  # fmt: skip
