"""Random rollouts dealt to data-parallel ranks at random: a prompt runs once in the job, with the
stock schedule's losses and gradients in fp64.

Many more of them: python -m tests.core.alignment.test_random_across_ranks 300
"""

from __future__ import annotations

import random
import sys
import traceback
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab import runtime
from megatron_prefix.lab.data.rollouts import Group, Rollout
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.rl import loss
from megatron_prefix.lab.rl.baseline import Baseline
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import align
from megatron_prefix.run.calls import Callbacks
from tests.harness.fuzzing import rounds
from tests.harness.ranks import run_ranks
from tests.harness.rows import rows

pytestmark = pytest.mark.turns

VOCAB = 64
MOE = {"num_moe_experts": 4, "moe_aux_loss_coeff": 1.0, "moe_z_loss_coeff": 0.5}
GLOBAL = {**MOE, "moe_router_load_balancing_type": "global_aux_loss"}
MODELS: dict[str, tuple[str, dict[str, Any], tuple[Layout, ...]]] = {
    "dense": ("tiny-qwen3", {}, (Layout(dp=2), Layout(dp=3), Layout(dp=2, pp=2))),
    "chunks": ("tiny-qwen3", {}, (Layout(dp=2, pp=2, vpp=2),)),
    "shards": ("tiny-qwen3", {}, (Layout(dp=2, tp=2, sequence_parallel=True), Layout(dp=2, tp=2))),
    "CP2": ("tiny-qwen3", {}, (Layout(dp=2, cp=2),)),
    "experts": ("tiny-moe", MOE, (Layout(dp=2), Layout(dp=4))),
    "EP2": ("tiny-moe", MOE, (Layout(dp=2, ep=2), Layout(dp=4, ep=2), Layout(dp=2, pp=2, ep=2))),
    "global batch": ("tiny-moe", GLOBAL, (Layout(dp=2), Layout(dp=2, pp=2))),
    "global batch, EP2": (
        "tiny-moe",
        GLOBAL,
        (Layout(dp=2, pp=2, ep=2), Layout(dp=2, ep=2), Layout(dp=4, ep=2)),
    ),
    "MTP": (
        "tiny-qwen3",
        {"mtp_num_layers": 1},
        (Layout(dp=3), Layout(dp=2, pp=2), Layout(dp=2, tp=2, sequence_parallel=True)),
    ),
    "MTP and experts": ("tiny-moe", {**MOE, "mtp_num_layers": 1}, (Layout(dp=2, ep=2),)),
    "GatedDeltaNet": ("tiny-qwen3-next", {"num_moe_experts": None}, (Layout(dp=2),)),
}
EVEN = ("chunks", "EP2", "global batch", "global batch, EP2", "MTP and experts")
UNPACKED = ("CP2", *EVEN, "GatedDeltaNet")
"""Ranks that share experts, balance the global batch or have virtual stages need equally many
microbatches; GatedDeltaNet takes packs from megatron-core 0.18 on."""


def groups(rng: random.Random) -> list[Group]:
    """Up to five groups; rollouts leave one another in their prompts, or in what they answer."""
    draw = np.random.default_rng(rng.randrange(1 << 30))
    found = []
    for number in range(rng.randint(1, 5)):
        prompt = draw.integers(0, VOCAB, rng.randint(2, 40))
        turn = draw.integers(0, VOCAB, rng.randint(1, 12))
        rollouts = []
        for member in range(rng.randint(1, 6)):
            shared = turn[: rng.randint(0, len(turn))]
            ids = np.concatenate([prompt, shared, draw.integers(0, VOCAB, rng.randint(2, 12))])
            trained = min(len(prompt) + rng.choice([0, 0, 3, 9]), len(ids) - 1)
            spans = ((trained, len(ids)),)  # of what several begin with some may train less
            rollouts.append(
                Rollout(f"g{number}", str(member), ids.astype(np.int32), len(prompt), spans, 0.0)
            )
        found.append(Group(f"g{number}", tuple(rollouts)))
    return found


def dealt(rng: random.Random, num_ranks: int, multiple: int = 0) -> list[list[Group]]:
    """Groups of every rank, each with at least one rollout, or all with equally many, a multiple
    of a number."""
    everything = groups(rng)
    places = [(group, member) for group in everything for member in group.rollouts]
    rng.shuffle(places)
    while len(places) < num_ranks or (multiple and len(places) % (multiple * num_ranks)):
        places.append(rng.choice(places))
    ranks: list[list[Any]] = [[place] for place in places[:num_ranks]]
    for number, place in enumerate(places[num_ranks:]):
        ranks[number % num_ranks if multiple else rng.randrange(num_ranks)].append(place)
    return [
        [
            replace(group, rollouts=tuple(member for of, member in rank if of is group))
            for group in everything
            if any(of is group for of, _ in rank)
        ]
        for rank in ranks
    ]


def options(rng: random.Random) -> tuple[PrefixConfig, Baseline]:
    config = PrefixConfig(
        segment_tokens=rng.choice([16, 64, 16_384]),
        chunk_tokens=rng.choice([0, 8, 24]),
        min_gain=rng.choice([0, 0, 20]),
        memory=rng.choice(["retain", "recompute", "auto"]),
        across_ranks="on",
        kernel="math",
    )
    return config, rng.choice([Baseline("rollout"), Baseline("packed", pack_tokens=90)])


def steps(model: str, layout: Layout, seeds: list[int]) -> list[str]:
    """What went wrong in random steps, on one rank."""
    runtime.initialize(layout)
    preset, fields, _ = MODELS[model]
    num_layers = max(2, layout.pp * layout.vpp)
    spec = resolve(preset, **{"num_layers": num_layers, **fields}).with_vocab(VOCAB)
    chunks = build_model(spec, layout=layout, dtype="float64")
    wrong = []
    for seed in seeds:
        rng = random.Random(seed)
        config, baseline = options(rng)
        if model in UNPACKED:
            baseline = Baseline("rollout")
        # Some trainers do not say what carries loss: then all positions may.
        align.SAYS = Callbacks(rng.choice([loss.trained, None]), passes_together=True)
        multiple = layout.pp if layout.vpp > 1 else 1  # Megatron's own rule for virtual stages
        ranks = dealt(rng, layout.dp, multiple * (model in EVEN))
        mine = ranks[align.data_rank()]
        num_tokens = sum(len(r) - 1 for rank in ranks for group in rank for r in group.rollouts)
        try:
            found = align.align(
                chunks,
                mine,
                config,
                multiple=layout.alignment,
                baseline=baseline,
                num_tokens=num_tokens,
            )
            wrong += [f"{seed}: {line}" for line in align.over_ranks(found).failures]
        except Exception:  # noqa: BLE001  # with its seed
            wrong.append(f"{seed}: {traceback.format_exc()}")
            break
    runtime.shutdown()
    return wrong


def run(model: str, layout: Layout, seeds: list[int], timeout_s: float = 240.0) -> list[str]:
    results = run_ranks(layout.world_size, steps, model, layout, seeds, timeout_s=timeout_s)
    return [line for rank in results for line in rank]


# Of these the same goes across ranks in test_across_ranks.py and test_moe.py, not at random.
PRODUCTS = ("chunks", "experts", "EP2", "global batch", "MTP", "MTP and experts", "GatedDeltaNet")


@pytest.mark.parametrize("model", rows(MODELS, PRODUCTS))
def test_random_steps_are_the_stock_schedules(model: str) -> None:
    assert run(model, MODELS[model][2][0], [*range(rounds(2, 50, fewest=1))]) == []


def main(count: int) -> int:
    """Runs `count` steps, equally many of every model and layout; prints what went wrong."""
    cases = [(model, layout) for model, (*_, layouts) in MODELS.items() for layout in layouts]
    bad = 0
    for number, (model, layout) in enumerate(cases):
        seeds = [*range(1000 + number, 1000 + count, len(cases))]
        wrong = run(model, layout, seeds, timeout_s=3600.0)
        bad += len(wrong)
        print(f"{model}, {layout}: {len(seeds)} steps, {len(wrong)} wrong", *wrong, sep="\n  ")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
