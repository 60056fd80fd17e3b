"""A rollout engine for verl that answers prompts with recorded rollouts, and a reward by a rule."""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ray
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

ANSWERS = "RECORDED_ANSWERS"
"""Variable: a JSON file, for each prompt (its ids, with spaces) a list of [ids, log-probs]."""


class Adapter(BaseRollout):
    """The engine's part in a worker: it is given the weights, and leaves them."""

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """There is nothing to release."""

    async def update_weights(self, weights: Iterable[tuple[str, Any]], **_: Any) -> None:
        """Reads all of them: the ranks export them together."""
        collections.deque(weights, maxlen=0)


class Server:
    """The engine itself: it answers a prompt that is asked again with its next rollout."""

    def __init__(self) -> None:
        self._answers = json.loads(Path(os.environ[ANSWERS]).read_text(encoding="utf-8"))
        self._asked: collections.Counter[str] = collections.Counter()

    async def generate(self, *, prompt_ids: list[int], **_: Any) -> TokenOutput:
        """As verl's server of vLLM."""
        prompt = " ".join(map(str, prompt_ids))
        answers = self._answers[prompt]
        tokens, log_probs = answers[self._asked[prompt] % len(answers)]
        self._asked[prompt] += 1
        return TokenOutput(
            token_ids=tokens, log_probs=log_probs, stop_reason="completed",
            extra_fields={"global_steps": 0},
        )  # fmt: skip

    async def nothing(self) -> None:
        """Sleeps, wakes up, forgets what it holds in a cache."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = nothing
    resume_generation = nothing


class Replica(RolloutReplica):
    """What starts the server."""

    async def launch_servers(self) -> None:
        """One, on no GPU."""
        self._server_handle = ray.remote(Server).options(num_cpus=0).remote()
        self.servers, self._server_address = [self._server_handle], f"recorded-{self.replica_rank}"


def score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """1 if the number of the last word is even, or 0."""
    return float(int(solution_str.split()[-1].strip("t")) % 2 == 0)
