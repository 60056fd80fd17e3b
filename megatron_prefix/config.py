"""What a user can set, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_prefix.errors import UserError
from megatron_prefix.tree import TreeOptions

MODES = ("off", "observe", "auto", "on")
MEMORY_POLICIES = ("retain",)


@dataclass(frozen=True)
class PrefixConfig:
    """Configuration of the prefix schedule.

    Attributes:
        mode: "off": Megatron's schedule; "observe": Megatron's schedule, and what sharing would
            have saved goes to the metrics; "auto": share where the cost model says that it pays;
            "on": always share.
        chunk_tokens: longest segment; 0: no limit.
        wave_tokens: most positions in a wave (a single leaf may exceed it); 0: no limit.
        min_gain: a shared segment that saves fewer positions is dissolved; 0 dissolves nothing.
        loss_in_leaves: never share a position at or after a first trained one.
        share: "group": one tree a group; "batch": one tree over all rollouts of the step.
        kernel: name of the attention kernel, or "auto" (megatron_prefix/attention/kernels.py).
        memory: what happens to an inner segment between its forward and its backward.
        extra: forwards that a pipeline stage runs ahead of its successor (1 or 2).
        min_speedup: in mode "auto", the predicted speedup below which the stock schedule runs.
    """

    mode: str = "on"
    chunk_tokens: int = 0
    wave_tokens: int = 4096
    min_gain: int = 64
    loss_in_leaves: bool = False
    share: str = "group"
    kernel: str = "auto"
    memory: str = "retain"
    extra: int = 2
    min_speedup: float = 1.05

    def __post_init__(self) -> None:
        self.tree_options(align=1)
        for name, value, known in (
            ("mode", self.mode, MODES),
            ("memory", self.memory, MEMORY_POLICIES),
            ("extra", self.extra, (1, 2)),
        ):
            if value not in known:
                raise UserError(f"{name} is {value!r}: give one of {', '.join(map(str, known))}")
        if not self.min_speedup > 0:
            raise UserError(f"min_speedup is {self.min_speedup}: give a number above 0")

    def tree_options(self, align: int) -> TreeOptions:
        """The part that shapes the tree, for a layout whose alignment is `align`."""
        chunk = max(self.chunk_tokens, align) if self.chunk_tokens > 0 else self.chunk_tokens
        return TreeOptions(
            align, chunk, self.wave_tokens, self.min_gain, self.loss_in_leaves, self.share
        )
