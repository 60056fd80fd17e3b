"""Memory and speed of steps of real rollouts beside Megatron's own schedule, as they are predicted.

    python -m benchmarks.waves FOLDER --layers 12 --pp 1 2 4

FOLDER has rollout files SET.jsonl.gz.  Every set's rollouts are packed as trainers pack them, in
the order of their groups and shuffled; each row has both schedules' predicted peaks (bf16,
transformer-engine's layers, weights and gradients included), what keeps the limit, and the
predicted speedup.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import replace
from pathlib import Path

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.data.pairs import pairs_of_groups
from megatron_prefix.lab.data.rollouts import read_groups
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.predict.execution import Execution
from megatron_prefix.lab.predict.model import footprint_of
from megatron_prefix.lab.predict.peak_memory import predict_memory
from megatron_prefix.lab.rl.baseline import PACK_TOKENS, pack_sizes
from megatron_prefix.layers.model import cost_of
from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.cost import FLOPS_PER_SECOND
from megatron_prefix.plan.joint_forest import JointForest
from megatron_prefix.plan.memory_policy import Rates, automatic
from megatron_prefix.plan.prediction import heaviest_stock_plan, limit_of, predict
from megatron_prefix.plan.step_planner import Forecast, StepPlanner

SETS = {"gsm8k": 60, "math_cot": 16, "rag_musique": 8, "rag_hotpot_llm": 8}
SETS |= {"tau2_mixed": 8, "tau_airline": 8}
GIB = float(1 << 30)


def row(name: str, folder: Path, args: argparse.Namespace, pp: int, shuffle: bool) -> str:
    """A line of the table."""
    spec = resolve(args.model, num_layers=args.layers)
    groups = list(read_groups(folder / f"{name}.jsonl.gz"))[: SETS[name]]
    rollouts, _ = pairs_of_groups(groups)
    if shuffle:
        rollouts = random.Random(1).sample(rollouts, len(rollouts))
    sizes = pack_sizes([len(rollout) for rollout in rollouts], PACK_TOKENS)
    owners = [number for number, size in enumerate(sizes) for _ in range(size)]
    footprint = footprint_of(spec, Execution(num_stages=pp))
    cost, static, stock = cost_of(spec), 6.0 * spec.parameters() / pp, 0.0
    seconds = cost.in_seconds(FLOPS_PER_SECOND["cuda"], args.layers, pp)

    def judge(joint: JointForest, plan: Plan) -> Forecast:
        nonlocal stock
        heaviest = heaviest_stock_plan(joint.forest, [owners], pp)
        stock = max(one.peak for one in predict_memory(heaviest, footprint))
        limit = limit_of(stock, static)
        kept = automatic(plan, footprint, cost, Rates(1.0, 1.0), limit, False)
        plan = replace(plan, policies=kept)
        peak = max(one.peak for one in predict_memory(plan, footprint))
        predicted = predict(seconds, joint.forest, owners, plan)
        return Forecast(plan, plan, peak, limit, predicted, not any(kept))

    config = PrefixConfig(segment_tokens=args.segment_tokens)
    planner, took = StepPlanner(config, seconds, 1, pp, 1, None), -time.perf_counter()
    _, forest = planner.build(rollouts, owners, judge)
    took += time.perf_counter()
    plan, _, peak, *_ = planner.fitting(JointForest.alone(forest, owners), judge)
    longest = max(segment.padded_length for segment in forest.segments)
    before, now = ((peak + static) / GIB for peak in (stock, peak))
    order, recomputed = ("in groups", "shuffled")[shuffle], plan.policies.count("recompute")
    return (
        f"{name:15} {order:9} pp{pp} {len(sizes):3} packs {len(forest.segments):3} segments to"
        f" {longest:5}, {recomputed:2} recomputed, peak {before:5.1f} {now:5.1f} GiB"
        f" ({now / before:.2f}), {predict(seconds, forest, owners, plan).speedup:.2f}x,"
        f" planned in {took:.2f} s"
    )


def _length(text: str) -> int | str:
    return text if text == "auto" else int(text)


def main() -> None:
    """Prints a line a set, order and layout."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of the rollout files")
    parser.add_argument("--model", default="qwen3-8b", help="a preset (default qwen3-8b)")
    parser.add_argument("--layers", type=int, default=12, help="(default 12)")
    parser.add_argument("--pp", type=int, nargs="+", default=[1], help="pipeline sizes (default 1)")
    text = "a number, or auto (default 16384)"
    parser.add_argument("--segment-tokens", type=_length, default=16384, help=text)
    args = parser.parse_args()
    for pp in args.pp:
        for name in SETS:
            for shuffle in (False, True):
                print(row(name, args.folder, args, pp, shuffle), flush=True)


if __name__ == "__main__":
    main()
