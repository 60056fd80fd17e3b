"""verl's own `_balance_batch`, of both of its trainers, on a step of whole groups; without Ray.

`python -m tests.core.trainers.verl_batches FOLDER` prints what either trainer did: per
data-parallel rank and mini-batch the groups of its rollouts, and the metrics; where another method
has taken the place of verl's own, what that did comes first. FOLDER has verl; what its trainers
import besides is replaced by what they use of it here.
"""

import inspect
import json
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from tests.core.trainers.stand_ins import where_missing

MISSING = (
    "torchdata", "cachetools", "uvicorn", "fastapi", "transfer_queue", "hydra", "aiohttp",
    "torchtitan", "veomni", "nemo_automodel",
)  # fmt: skip
RANKS, MINI_BATCHES, GROUPS, SIZE, PROMPT = 4, 2, 16, 4, 60


@dataclass
class KVBatchMeta:
    """That of transfer_queue, as far as trainers order one."""

    keys: list[str]
    tags: list[dict[str, int]]

    def __len__(self):
        return len(self.keys)

    def reorder(self, order):
        self.keys = [self.keys[number] for number in order]
        self.tags = [self.tags[number] for number in order]


def trainer():
    """What `_balance_batch` reads of a trainer; two tensor-parallel ranks have the same data."""
    options = SimpleNamespace(
        actor=SimpleNamespace(ppo_mini_batch_size=GROUPS // MINI_BATCHES),
        rollout=SimpleNamespace(n=SIZE),
    )
    places = [rank for rank in range(RANKS) for _ in range(2)]
    return SimpleNamespace(
        actor_rollout_wg=SimpleNamespace(_dispatch_info={"actor": places}),
        config=SimpleNamespace(actor_rollout_ref=options),
        tokenizer=SimpleNamespace(eos_token_id=0),
        _get_dp_size=lambda *_: RANKS,
        _get_required_batch_multiple=lambda size: size,
    )


def lengths():
    """Tokens of every rollout's prompt and answer; siblings are next to each other."""
    rng = np.random.default_rng(5)
    prompts = np.repeat(rng.integers(PROMPT // 2, PROMPT + 1, GROUPS), SIZE)
    return prompts, rng.integers(1, 3 * PROMPT, GROUPS * SIZE)


def balanced_v0(method, metrics):
    """Groups and lengths in the order in which RayPPOTrainer leaves them."""
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    prompts, answers = lengths()
    mask = torch.zeros(GROUPS * SIZE, 4 * PROMPT, dtype=torch.long)
    for row, prompt, answer in zip(mask, prompts, answers, strict=True):
        row[PROMPT - prompt : PROMPT + answer] = 1
    tensors = {"attention_mask": mask, "prompts": mask[:, :PROMPT]}
    names = np.array([f"g{row // SIZE}" for row in range(GROUPS * SIZE)], dtype=object)
    batch = DataProto.from_dict(tensors, {"uid": names})
    assert method(RayPPOTrainer)(trainer(), batch, metrics=metrics) is None
    return batch.non_tensor_batch["uid"].tolist(), batch.batch["attention_mask"].sum(-1).tolist()


def balanced_v1(method, metrics):
    """The same of V1's trainer."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    tags = [
        {"prompt_len": int(prompt), "seq_len": int(prompt + answer)}
        for prompt, answer in zip(*lengths(), strict=True)
    ]
    keys = [f"g{row // SIZE}_{row % SIZE}_0" for row in range(GROUPS * SIZE)]
    batch = method(PPOTrainer)(trainer(), KVBatchMeta(keys, tags), metrics=metrics)
    return [key.partition("_")[0] for key in batch.keys], [tag["seq_len"] for tag in batch.tags]


def main():
    sys.path.insert(0, sys.argv[1])
    where_missing(*MISSING)

    def own(trainer):
        return inspect.unwrap(trainer._balance_batch)

    for method in (own, lambda trainer: trainer._balance_batch):
        for balanced in (balanced_v0, balanced_v1):
            metrics = {}
            groups, tokens = balanced(method, metrics)
            size = len(groups) // (RANKS * MINI_BATCHES)
            parts = [groups[start : start + size] for start in range(0, len(groups), size)]
            sums = [sum(one) for one in np.array_split(tokens, RANKS)]
            found = {"parts": parts, "tokens": list(map(int, sums)), "metrics": metrics}
            print(json.dumps({"trainer": balanced.__name__, **found}))


if __name__ == "__main__":
    main()
