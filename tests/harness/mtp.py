"""Models with a layer of multi-token prediction, and steps that show what it reads.

`python -m tests.harness.mtp` compares both schedules in all cases, in whatever Megatron-Core is
installed, and prints a line of JSON a case; tests/core/layers/test_mtp_newer.py runs it in a newer
one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

if __name__ == "__main__":
    from tests.core.trainers import stand_ins

    stand_ins.for_megatron()

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_prefix.features.mtp import layer as mtp
from megatron_prefix.features.mtp.layer import WithoutLabels
from megatron_prefix.lab import numerics, runtime
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.runtime.groups import forget_logged_losses
from megatron_prefix.megatron.logged_losses import logged_losses
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.run.schedule import PrefixSchedule
from megatron_prefix.tree import Pairs
from tests.harness import hybrid, steps
from tests.harness.one_group import schedule_with
from tests.harness.one_rank import one_rank, small_model
from tests.harness.ranks import run_ranks
from tests.harness.scales import Varying
from tests.harness.steps import Contract, Microbatch

FACTOR = 3.0
"""Of the loss: what is wrong in it must not vanish beside the model's own."""
SCHEDULES: dict[str, dict[str, Any]] = {
    "trees packed": {},
    "packs of chunks": {"chunk_tokens": 5, "segment_tokens": 16},
    "depth first": {"segment_tokens": 8},
    "recompute": {"memory": "recompute", "chunk_tokens": 7},
    "offload": {"memory": "offload", "chunk_tokens": 16},
    "host layers": {"cache_host_layers": 9, "memory": "recompute", "chunk_tokens": 7},
    "nothing shared": {"min_gain": 10**6},
}
MOE = dict(
    moe_router_load_balancing_type=["aux_loss", "seq_aux_loss"], moe_aux_loss_coeff=[0.02, 0.03],
    moe_z_loss_coeff=1e-2, moe_router_score_function="sigmoid", moe_router_pre_softmax=False,
    moe_router_enable_expert_bias=True, moe_router_dtype="fp64",
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": dict(spec=dict(tie_embeddings=True)),
    "experts": dict(name="tiny-moe", config_overrides=MOE),
    "full recomputation": dict(recompute="full"),
    "selective recomputation": dict(recompute="selective"),
    "norms of queries and keys": dict(name="tiny-qwen3"),
    "recurrent layers": dict(name="tiny-qwen3-next", spec=hybrid.gated_delta()),
}
CONTRACTS = {
    "triple": Contract(),
    "per token": Contract(per_token=True),
    "double": Contract(triple=False),
    "scaled": Contract(scale=8.0),
}


def model_of(**options: Any) -> Any:
    """A small model with the layer; equal arguments give equal weights."""
    over = {"mtp_loss_scaling_factor": FACTOR, **options.pop("config_overrides", {})}
    spec = {"mtp_num_layers": 1, **options.pop("spec", {})}
    return small_model(spec=spec, config_overrides=over, **options)


def masked() -> list[Microbatch]:
    """Labels are zero where they carry no loss, and prompts that begin alike go on differently."""
    found = hybrid.items()
    draw = np.random.default_rng(7)
    for item in found[:2]:  # the pair (input, label) is the others', the next input is not
        item["tokens"][:, 11:29] = torch.from_numpy(draw.integers(0, 60, 18))
    for item in found:
        item["labels"] = item["labels"] * (item["loss_mask"] != 0)
    return found


def weighed() -> list[Microbatch]:
    """A loss mask of any numbers, which differ by rollout; some prompt positions have none."""
    found = hybrid.items()
    draw = np.random.default_rng(8)
    for item in found:
        shape = item["loss_mask"].shape
        item["loss_mask"] = torch.from_numpy(draw.uniform(0, 2, shape) * (draw.random(shape) > 0.3))
        item["loss_mask"][:, -2:] = 1.5
    return found


def prefixes() -> list[Microbatch]:
    """Rollouts that end inside others, all positions with loss, two of them the same."""
    tokens = np.random.default_rng(9).integers(0, 60, 40)
    ends = (40, 20, 31, 31, 12)
    rollouts = [Pairs(tokens[: n - 1], tokens[1:n], np.ones(n - 1, bool)) for n in ends]
    return [steps.microbatch([one], 0, uid) for uid, one in enumerate(rollouts)]


def rows() -> list[Microbatch]:
    """Several rollouts a microbatch, padded at the end."""
    draw = np.random.default_rng(10)
    prompt, found = draw.integers(0, 60, 12), []
    for uid in range(3):
        rollouts = []
        for end in (3, 6):
            tokens = np.r_[prompt, draw.integers(0, 60, end)]
            rollouts.append(Pairs(tokens[:-1], tokens[1:], np.arange(len(tokens) - 1) >= 8))
        found.append(steps.microbatch(rollouts, 0, uid))
    return found


ITEMS: dict[str, Callable[[], list[Microbatch]]] = {
    "tree": hybrid.items,
    "masked": masked,
    "weighed": weighed,
    "prefixes": prefixes,
    "rows": rows,
}


class Found(NamedTuple):
    """What a step gave: logs of losses, gradients, Megatron's log of this loss and of the routers'
    losses, and their biases."""

    logs: list[Any]
    gradients: dict[str, Tensor]
    logged: dict[str, Tensor]


def run(
    schedule: Any, model: Any, contract: Contract, items: list[Microbatch], **options: Any
) -> Found:
    """A step of a trainer; biases of experts are put back afterwards."""
    tracker, inner = MTPLossLoggingHelper.tracker, unwrap(model)
    tracker.clear()
    forget_logged_losses()
    MTPLossAutoScaler.set_loss_scale(torch.tensor(17.0))  # of another step
    before = [buffer.clone() for buffer in inner.buffers()]
    contract.configure(model)
    steps.zero_gradients(model)
    step = options.pop("step", contract.step)
    logs = steps.call(schedule, step, model, items, **options)
    logged = {name: value.clone() for name, value in tracker.items() if "values" in name}
    logged |= logged_losses()
    logged |= {name: one.clone() for name, one in inner.named_buffers() if "bias" in name}
    for buffer, value in zip(inner.buffers(), before, strict=True):
        buffer.copy_(value)
    return Found(logs, steps.gradients(model), logged)


def assert_same(found: Found, expected: Found, items: list[Microbatch]) -> None:
    """By the numerics policy; Megatron keeps its log in float32."""
    num = sum(item["tokens"].numel() for item in items)
    terms = {name: float(one.abs().max()) for name, one in expected.gradients.items()}
    steps.assert_gradients(found.gradients, steps.Reference(expected.gradients, terms), num)
    limit = numerics.tolerance(torch.float64, num)
    for ours, theirs in zip(found.logs, expected.logs, strict=True):
        if isinstance(theirs, dict):
            assert abs(ours["loss"] - theirs["loss"]) <= limit * (1 + abs(theirs["sum"]))
    assert found.logged.keys() == expected.logged.keys()
    limit = numerics.tolerance(torch.float32, len(items))
    for name, theirs in expected.logged.items():
        torch.testing.assert_close(found.logged[name], theirs, rtol=limit, atol=0.0)


def compared(
    model: str, contract: Contract, kind: str, *schedules: str, **over: Any
) -> Iterator[PrefixSchedule]:
    """Asserts that schedules do what Megatron's does; yields each of them.

    Args:
        model: of MODELS.
        contract: of the loss.
        kind: of ITEMS.
        schedules: of SCHEDULES; none: all.
        over: more fields of TransformerConfig.
    """
    options = MODELS[model]
    options = {**options, "config_overrides": {**options.get("config_overrides", {}), **over}}
    items = ITEMS[kind]()
    expected = run(stock_schedule(), model_of(**options), contract, items)
    ours = model_of(**options)
    for name in schedules or SCHEDULES:
        schedule = schedule_with(**SCHEDULES[name])
        assert_same(run(schedule, ours, contract, items), expected, items)
        yield schedule


def compared_across_ranks(model: str, contract: Contract, kind: str, over: dict[str, Any]) -> int:
    """As `compared`, on one of two data-parallel ranks which prompts cross; how many positions it
    received. What is logged is so on any rank, and only the sum is Megatron's."""
    runtime.initialize(Layout(dp=2))
    options = {**MODELS[model], "layout": Layout(dp=2), "config_overrides": over}
    items = ITEMS[kind]()[dist.get_rank() :: 2]
    ours = schedule_with(across_ranks="on", chunk_tokens=7)
    both = [run(one, model_of(**options), contract, items) for one in (stock_schedule(), ours)]
    for found in both:
        for value in found.logged.values():
            dist.all_reduce(value)
    assert_same(both[1], both[0], items)
    runtime.shutdown()
    return ours.report.forest.received_tokens  # type: ignore[union-attr]


def cases_across_ranks() -> Iterator[tuple[str, Contract, str, dict[str, Any]]]:
    """Likewise, for two ranks: they have not equally many microbatches."""
    for kind in ITEMS:
        yield "dense", Contract(scale=7.0), kind, {}
    yield "tied", Contract(per_token=True), "masked", {}
    if hasattr(TransformerConfig, "mtp_detach_heads"):
        yield "dense", Contract(), "weighed", {"mtp_detach_heads": True}
        yield "tied", Contract(logits=True), "masked", {"mtp_detach_heads": True}


def cases() -> Iterator[tuple[str, Contract, str, dict[str, Any]]]:
    """Model, contract, items and more fields of its config."""
    yield "dense", Contract(), "tree", {}
    yield from new_cases()
    yield "experts", Contract(), "prefixes", {}


def old_cases() -> Iterator[tuple[str, Contract, str, dict[str, Any]]]:
    """More that older releases run, too, and products of what they have not."""
    yield from new_cases(products=True)
    yield "full recomputation", Contract(), "masked", {}
    for kind in ITEMS:
        if kind != "tree":
            yield "dense", Contract(), kind, {}
    for contract in CONTRACTS.values():
        yield "dense", contract, "weighed", {}


def new_cases(*, products: bool = False) -> Iterator[tuple[str, Contract, str, dict[str, Any]]]:
    """What older releases have not; or what goes together in it, and stands in other cases."""
    calls = mtp.without_labels() is not WithoutLabels.FAILS
    detached = hasattr(TransformerConfig, "mtp_detach_heads")
    kinds = (("tree", "masked"), ("tree", "weighed")) if products else (("weighed",), ("masked",))
    for kind in kinds[0] if calls else ():
        yield "dense", Contract(logits=True), kind, {}
    for kind in kinds[1] if detached else ():
        yield "tied", Contract(logits=True, per_token=True), kind, {"mtp_detach_heads": True}
    if calls and not products:
        yield "experts", Contract(logits=True), "prefixes", {}
        yield "experts", Varying(logits=True, way="calls"), "prefixes", {}
        yield "experts", Varying(way="before"), "tree", {}
    if detached and not products:
        yield "dense", Contract(), "tree", {"mtp_detach_heads": True}
        yield "full recomputation", Contract(), "tree", {"mtp_detach_heads": True}


def main(*, old: bool) -> None:
    """See the top of the file; with `old`, what older releases run, too, and nothing else."""
    for number, case in enumerate(cases_across_ranks()):
        if (0 < number <= len(ITEMS)) == old:
            _tell(case, lambda case=case: {"received": run_ranks(2, compared_across_ranks, *case)})
    with one_rank():
        for case in old_cases() if old else cases():
            _tell(case, lambda case=case: _shared(*case))


def _shared(model: str, contract: Contract, kind: str, over: dict[str, Any]) -> dict[str, Any]:
    made = list(compared(model, contract, kind, "trees packed", "recompute", **over))
    forest = made[0].report.forest  # type: ignore[union-attr]
    return {"executed": forest.executed_tokens, "raw": forest.raw_tokens}


def _tell(case: tuple[Any, ...], found: Callable[[], dict[str, Any]]) -> None:
    import megatron.core

    model, contract, kind, over = case
    line = {"case": [model, str(contract), kind, over], "megatron": megatron.core.__version__}
    try:
        line |= {**found(), "error": ""}
    except Exception as error:  # noqa: BLE001  # told by the test
        line |= {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def config_of(model: Any) -> Any:
    """The config of a model that may be wrapped."""
    return unwrap(model).config


if __name__ == "__main__":
    main(old="--old" in sys.argv)
