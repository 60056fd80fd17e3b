"""What it would save to keep keys and values of multi-latent attention instead of latents.

    python -m benchmarks.expanded_keys FOLDER --model moonlight-16b-a3b --layers 12

FOLDER has rollout files SET.jsonl.gz.  Each set is a step of packs, as trainers pack them in the
order of their groups.  A row has the share of a step's FLOPs that expands ancestors' latents,
forward and backward; the predicted peak of the stock schedule and of ours, without weights; and
what our peak would be with keys, values and their gradients in the sidecar (bf16, transformer-
engine's layers): an inner segment then has them anyway, so the whole share would be saved.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.data.pairs import pairs_of_groups
from megatron_prefix.lab.data.rollouts import read_groups
from megatron_prefix.lab.models.presets import ModelSpec, resolve
from megatron_prefix.lab.predict.execution import Execution
from megatron_prefix.lab.predict.model import footprint_of
from megatron_prefix.lab.predict.peak_memory import predict_memory
from megatron_prefix.lab.rl.baseline import PACK_TOKENS, pack_sizes
from megatron_prefix.layers.model import cost_of
from megatron_prefix.plan.cost import CostModel, segment_work
from megatron_prefix.plan.planner import best_plan
from megatron_prefix.plan.prediction import heaviest_stock_plan
from megatron_prefix.tree import find_shared

SETS = {"gsm8k": 60, "math_cot": 16, "rag_musique": 8, "rag_hotpot_llm": 8}
SETS |= {"tau2_mixed": 8, "tau_airline": 8}
GIB = float(1 << 30)


def row(path: Path, groups: int, spec: ModelSpec, segment_tokens: int) -> str:
    """A line of the table."""
    rollouts, numbers = pairs_of_groups([*read_groups(path)][:groups])
    sizes = pack_sizes([len(rollout) for rollout in rollouts], PACK_TOKENS)
    owners = [number for number, size in enumerate(sizes) for _ in range(size)]
    options = PrefixConfig(segment_tokens=segment_tokens).tree_options(1)
    forest = find_shared(rollouts, numbers, options).forest(microbatch_of=owners)
    cost, footprint = cost_of(spec), footprint_of(spec, Execution(fused_layers=True))
    both = [
        sum(model.of_work(segment_work(one), kind) for one in forest.segments for kind in "FB")
        for model in (cost, without_expansion(spec))
    ]
    plan = best_plan(forest, 1, microbatches=owners)
    plan = replace(
        plan, policies=tuple("recompute" if s.inner else "retain" for s in plan.segments)
    )
    [ours] = predict_memory(plan, footprint)
    [stock] = predict_memory(heaviest_stock_plan(forest, [owners], 1), footprint)
    latents = sum(one.values + one.gradients for one in footprint.payloads[0])
    heads = spec.num_attention_heads
    width = spec.qk_head_dim + spec.qk_pos_emb_head_dim + spec.v_head_dim
    expanded = len(footprint.payloads[0]) * heads * width * (2 + 4)
    more = ours.cache_peak * (expanded / latents - 1)
    return (
        f"{path.name.partition('.')[0]:15} {1 - both[1] / both[0]:6.1%} of FLOPs; peak: stock"
        f" {stock.peak / GIB:6.1f}, ours {ours.peak / GIB:6.1f} of which payloads"
        f" {ours.cache_peak / GIB:5.2f}, with keys {(ours.peak + more) / GIB:7.1f} GiB"
    )


def without_expansion(spec: ModelSpec) -> CostModel:
    """The model's cost if nothing were expanded again."""
    cost = cost_of(spec)
    num = len(cost.prices) // 2
    prices = [price * (place % num != num - 1) for place, price in enumerate(cost.prices)]
    return replace(cost, prices=tuple(prices))


def main() -> None:
    """Prints a line a set."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of the rollout files")
    parser.add_argument("--model", default="moonlight-16b-a3b", help="a preset")
    parser.add_argument("--layers", type=int, default=12, help="(default 12)")
    parser.add_argument("--segment-tokens", type=int, default=8192, help="(default 8192)")
    args = parser.parse_args()
    spec = resolve(args.model, num_layers=args.layers)
    for name, groups in SETS.items():
        print(row(args.folder / f"{name}.jsonl.gz", groups, spec, args.segment_tokens), flush=True)


if __name__ == "__main__":
    main()
