"""What `bench` runs: synthetic groups and steps of rollout files, with a model in a layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import UserError, shown
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.data.rollouts import Group
from megatron_prefix.lab.models.presets import ModelSpec
from megatron_prefix.lab.rl.baseline import Baseline
from megatron_prefix.lab.runtime.layout import Layout

_MOST_TOKENS = 10**8  # of the groups of a shape, which are made in memory


@dataclass(frozen=True)
class Setting:
    """What all rows of a result have in common.

    Attributes:
        spec: the model's shape.
        layout: of the job's ranks.
        baseline: the microbatches of both schedules.
        seed: of the advantages.
        dtype: of the model.
        forward_only: time passes without gradients, as trainers make them for log-probs.
        warm_up_calls: calls of each schedule before the timed ones, at least. By the third some
            kernels have chosen by the shapes that they have met, and made their plans.
    """

    spec: ModelSpec
    layout: Layout
    baseline: Baseline
    seed: int = 1234
    dtype: str = "float32"
    forward_only: bool = False
    warm_up_calls: int = 3


@dataclass(frozen=True)
class GroupShape:
    """What one row of the sweep runs.

    Attributes:
        prompt: tokens of the shared prompt.
        response: tokens of each response.
        rollouts: rollouts of the group.
        segment_tokens: see PrefixConfig; None keeps the configured one.
    """

    prompt: int
    response: int
    rollouts: int
    segment_tokens: int | None = None

    @classmethod
    def parse(cls, text: str) -> GroupShape:
        """Reads P:R:n or P:R:n:WAVE_TOKENS.

        Raises:
            UserError: anything else.
        """
        try:
            numbers = [int(part) for part in text.split(":")]
        except ValueError:
            numbers = []
        if len(numbers) not in (3, 4) or min(numbers, default=0) < 1:
            raise UserError(
                f"shape {shown(text)}: give P:R:n, e.g. 10240:2048:8, or P:R:n:WAVE_TOKENS"
            )
        return cls(*numbers)

    @property
    def name(self) -> str:
        """What reports call it."""
        return f"{self.prompt}:{self.response}:{self.rollouts}"

    def groups(self, num: int, vocab_size: int, seed: int) -> list[Group]:
        """Groups of the shape, of random tokens.

        Raises:
            UserError: more than fit in memory.
        """
        tokens = num * self.rollouts * (self.prompt + self.response)
        if tokens > _MOST_TOKENS:
            raise UserError(
                f"{num} groups of {self.name} are too large ({tokens} tokens); give at most"
                f" {_MOST_TOKENS} tokens: a smaller shape, or fewer with --shape-groups"
            )
        made = generate(
            num, self.prompt, self.response, self.rollouts, vocab_size=vocab_size, seed=seed
        )
        return list(made)


@dataclass(frozen=True)
class Work:
    """What one row of the result times.

    Attributes:
        name: P:R:n of a synthetic shape, or the rollout file.
        config: of the prefix schedule.
        warm_up: groups of the steps that are run before the timed ones, at least one.
        steps: groups of every timed step.
        repeats: how often each step is timed; its time is the median.
    """

    name: str
    config: PrefixConfig
    warm_up: Sequence[Sequence[Group]]
    steps: Sequence[Sequence[Group]]
    repeats: int = 1
