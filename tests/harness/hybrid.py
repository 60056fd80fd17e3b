"""Small hybrid models in fp64, and steps whose spans are of all lengths."""

from typing import Any

import numpy as np
import torch

from megatron_prefix.lab import numerics
from megatron_prefix.run.report import StepReport
from megatron_prefix.run.schedule import PrefixSchedule
from megatron_prefix.tree import Pairs
from tests.harness import steps
from tests.harness.one_group import schedule_with
from tests.harness.one_rank import small_model
from tests.harness.steps import Contract, Microbatch
from tests.oracle.data import of_all_lengths

GDN, MAMBA = "tiny-qwen3-next", "tiny-nemotron-h"


def gated_delta(layers: int = 2, every: int = 2) -> dict[str, Any]:
    """Fields of a spec: every so many layers attention, GatedDeltaNet elsewhere."""
    return {"num_layers": layers, "linear_attention_freq": every}


def mamba(pattern: str = "M*M-") -> dict[str, Any]:
    """Fields of a spec with layers by symbols."""
    return {"num_layers": len(pattern), "hybrid_override_pattern": pattern}


SPECS: dict[str, dict[str, Any]] = {GDN: gated_delta(), MAMBA: mamba()}


def model_of(name: str, **options: Any) -> Any:
    """A small model of a family; equal arguments give equal weights."""
    return small_model(name, **{"spec": SPECS[name], **options})


def items() -> list[Microbatch]:
    """The oracle's tree of all lengths: loss in the middle, short spans, and one alone."""
    return [
        steps.microbatch([Pairs(tokens[:-1], tokens[1:], trained)], group, uid)
        for uid, (group, (tokens, trained)) in enumerate(
            zip((0, 0, 0, 0, 0, 1, 1, 2), of_all_lengths(np.random.default_rng(1)), strict=True)
        )
    ]


def errors(model: Any, expected: steps.Reference, schedule: PrefixSchedule) -> dict[str, float]:
    """Every gradient's largest difference to plain autograd, relative to the terms in its sum (if
    there are any: weights of an indexer have none), and that of the losses."""
    logs, found = steps.run(schedule, Contract().step, model, items())
    assert found.keys() == expected.gradients.keys()
    pairs = zip(logs, expected.logs, strict=True)
    losses = [float(abs(ours["loss"] - theirs["loss"])) for ours, theirs in pairs]
    return {"losses": torch.tensor(losses).max().item()} | {
        name: float((found[name] - wanted).abs().max()) / (expected.terms[name] or 1.0)
        for name, wanted in expected.gradients.items()
    }


def worst(model: Any, expected: steps.Reference, **fields: Any) -> float:
    """The largest of `errors` with options of the prefix schedule; NaN wins."""
    found = errors(model, expected, schedule_with(**fields)).values()
    return torch.tensor(list(found), dtype=torch.float64).max().item()


def limit(width: int, layers: int) -> float:
    """What the numerics policy accepts of `worst`, for a model in fp64 with so many layers, whose
    longest sum has `width` terms."""
    num = sum(item["tokens"].numel() for item in items())
    return numerics.tolerance(torch.float64, num, width, layers + 1)


def report_of(model: Any, **fields: Any) -> StepReport:
    """What a step with options of the prefix schedule says of itself."""
    ours = schedule_with(**fields)
    steps.call(ours, Contract().step, model, items())
    assert ours.report is not None and ours.report.memory is not None
    return ours.report
