"""How evenly slime's dealing and whole groups load data-parallel ranks, on the bundled rollouts.

    python -m benchmarks.trainers.dealing_balance FOLDER

FOLDER/slime is a checkout, whose `build_dp_schedule` deals four groups a rank. What ranks run is
counted by prompts (features/dealing/rollouts.py): a prompt once for its rollouts on a rank.
"""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_prefix.features.dealing.hooks import deal_after_import
from megatron_prefix.features.dealing.rollouts import Rollouts
from tests.harness.data import groups

SETS, RANKS, GROUPS_OF_RANK = ("rag_hotpot_llm", "rag_musique", "tau2_mixed"), (8, 64), 4
MODEL = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8, "kv_channels": 128,
    "ffn_hidden_size": 12288, "num_layers": 36, "vocab_size": 151936, "num_experts": None,
    "multi_latent_attention": False, "moe_layer_freq": None, "q_lora_rank": None,
}  # fmt: skip
"""What slime counts FLOPs of: Qwen3-8B."""


def batch(name: str, num: int) -> dict[str, list[Any]]:
    """A step of so many groups; each begins with its number, as a set may be repeated."""
    known = [group for group in groups(name, num) if len(group.rollouts) > 1]
    data: dict[str, list[Any]] = {"tokens": [], "response_lengths": []}
    for number in range(num):
        for rollout in known[number % len(known)].rollouts:
            data["tokens"].append(np.concatenate([[number], rollout.tokens]))
            data["response_lengths"].append(len(rollout.tokens) - rollout.prompt_len)
    return data


def rows(name: str, num_ranks: int) -> list[str]:
    """A line for slime's dealing, and one for whole groups."""
    module: Any = importlib.import_module("slime.utils.dp_schedule")
    data = batch(name, GROUPS_OF_RANK * num_ranks)
    lengths = list(map(len, data["tokens"]))
    config = {"dp_size": num_ranks, "cp_size": 1, "vpp_size": 1,
              "microbatch_group_size_per_vp_stage": 1}  # fmt: skip
    args = SimpleNamespace(
        use_dynamic_batch_size=True, max_tokens_per_gpu=max(16384, *lengths), balance_data=True,
        balance_by_flops=False, **MODEL,
    )  # fmt: skip
    prompts = np.array(lengths) - np.array(data["response_lengths"])
    costs = Rollouts.of_tokens(data["tokens"], prompts).dealt_costs
    alone, lines = costs.load(range(len(lengths))), []
    dealings = {"slime": module.build_dp_schedule.__wrapped__, "whole": module.build_dp_schedule}
    for dealing, function in dealings.items():
        parts, _, numbers, _ = function(
            args, config, lengths, global_batch_size=len(lengths),
            rollout_indices=list(range(len(lengths))),
        )  # fmt: skip
        loads = [costs.load(part) for part in parts]
        balance, share = max(loads) / np.mean(loads), alone / num_ranks / max(loads)
        lines.append(
            f"| {name} | {num_ranks} | {dealing} | {balance:.3f} | {share:.3f} | {numbers[0]} |"
        )
    return lines


def main() -> None:
    """Prints the table."""
    sys.path.insert(0, f"{sys.argv[1]}/slime")
    deal_after_import()
    print("| rollouts | ranks | dealing | slowest over mean | share of one rank's speedup"
          " | microbatches |\n|---|---|---|---|---|---|")  # fmt: skip
    for name in SETS:
        for num_ranks in RANKS:
            print(*rows(name, num_ranks), sep="\n", flush=True)


if __name__ == "__main__":
    main()
