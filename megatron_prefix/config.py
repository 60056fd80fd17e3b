"""The options of the prefix schedule."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

from megatron_prefix.errors import UserError, shown
from megatron_prefix.tree import TreeOptions

MODES = ("off", "observe", "auto", "on")
MEMORY_POLICIES = ("retain", "recompute_act", "offload", "recompute", "auto")
CP_REDUCE = ("auto", "wave", "segment")
ACROSS_RANKS = ("off", "auto", "on")
KERNELS = ("math", "flash_cpu", "flash", "cudnn", "fa4")
"""Names of the attention kernels (megatron_prefix/layers/blocks/kernels.py)."""
CHOICES: dict[str, tuple[Any, ...]] = {
    "mode": MODES,
    "memory": MEMORY_POLICIES,
    "cp_reduce": CP_REDUCE,
    "across_ranks": ACROSS_RANKS,
    "run_ahead": (1, 2),
}
"""What a field of PrefixConfig may be, where that is a list."""
LEAST_MEMORY_GB, MOST_MEMORY_GB = 1e-6, 1e6
"""A kilobyte, in which no step runs; no machine has as much as the other."""
MOST_COUNT = 10**9
"""The largest number of tokens or layers; no step has as many."""
TYPES: dict[str, type] = {
    "str": str, "int": numbers.Integral, "float": numbers.Real, "bool": bool, "None": type(None),
}  # fmt: skip
"""What the parts of a field's annotation take; NumPy's numbers, too."""


SEGMENT_TOKENS = (2048, 4096, 8192, 16384, 32768)
"""What segment_tokens "auto" chooses from."""
LEAST_SEGMENT = 1024
"""Segments are not made shorter than this to keep a limit of memory."""
SEGMENT_GAIN = 32
"""Times `min_gain` that an inner segment saves at least. On an H200, with 12 layers of Qwen3-8B's
widths, steps of rag_musique took as long with one segment more as with 950 positions more
(benchmarks/LOG.md, "How large a segment must be")."""


@dataclass(frozen=True)
class PrefixConfig:
    """Configuration of the prefix schedule. docs/configuration.md is made of this text.

    Attributes:
        mode: "off": the stock schedule. "observe": the stock schedule; metrics say what sharing
            would save. "auto": share the steps that are predicted to be faster. "on": share every
            step, and raise an error where a step cannot be shared.
        chunk_tokens: cut prompts and other spans that are longer than this into chunks. 0: never;
            "auto": for each step the length with the shortest simulated time, or that of the last
            step if that was much like it. At least `align`; a length below the multiple at which
            the layout begins spans is raised to it.
        segment_tokens: most positions in one forward; a single span may exceed it. 0: no limit;
            "auto": for each step the fastest of 2,048 to 32,768 (powers of two; in a pipeline
            1,024, too) whose predicted peak fits the memory limit. A given number is halved, up to
            three times, in a pipeline four, and not below 1,024, where only that fits the limit or
            a pipeline then waits less. A step much like the last one takes its length.
        min_gain: do not share a prefix that saves fewer positions than this. A prompt runs
            apart from the suffixes that read it only if that saves 32 times as many, or a 16th of
            the step; a shorter one runs within their forwards, or is not shared. 0: share every
            prefix, always apart.
        align: end shared prefixes at multiples of this many positions, in addition to what the
            layout requires. 64 makes GatedDeltaNet's results independent of where its kernels cut a
            sequence; other values differ by rounding.
        loss_in_leaves: share only what comes before the first trained token of a rollout. Results
            are the same without it, also for losses over whole sequences (GSPO).
        trainer_masks: take the mask of the trainer's microbatches where its model calls have no
            loss_mask and its page says that there is one (NeMo-RL). Off: every position is trained.
        kernel: attention kernel. "math": the formula, slow and exact; "flash_cpu", "flash",
            "cudnn": torch's flash attention for CPUs, its FlashAttention-2, its cuDNN; "fa4":
            FlashAttention-4. "A+B": A where queries read a prompt's keys, B where they read their
            own. "auto": fa4 if it runs, else by shape.
        memory: what a prompt's segment keeps from its forward to its backward. "retain": its saved
            tensors. "recompute_act": the same without the outputs of MLP activation functions,
            which run again, in waves too. "offload": saved tensors move to the host. "recompute":
            K/V and its input; its forward runs again. "auto": for each segment the cheapest of
            these that fits the memory limit; it offloads only with `memory_budget_gb`.
        memory_budget_gb: GiB of device memory that a step may use on top of what is allocated when
            it begins. 0: the limit is the stock schedule's peak on the same microbatches plus 5 %.
            In mode "auto" a step that cannot fit runs with the stock schedule.
        cache_host_layers: number of layers in each model chunk, evenly spread, whose K/V or states
            and their gradients stay in host memory until the layer runs.
        cp_reduce: with context parallelism, when a prompt's K/V are gathered and gK/gV sent back.
            "wave": for every wave. "segment": once for each of the prompt's segments, while every
            rank keeps all K/V and gK/gV (cp times the memory). "auto": "segment" if the predicted
            peak fits the free memory.
        across_ranks: run a prefix that several data-parallel ranks share on one of them, which
            sends its K/V, states and trained hidden states to the others. "off": never. "auto":
            where it is possible, predicted to be faster for the slowest rank, and fits the memory
            limit. "on": always; what prevents it is an error. Not set: "auto" in mode "auto", else
            "off". `chunk_tokens` "auto" then cuts nothing.
        run_ahead: with pipeline stages, how many forwards a stage runs ahead of the next stage, 1
            or 2. 1 takes less memory, 2 waits less.
        min_speedup: in mode "auto", the predicted speedup below which the stock schedule runs.
        cost_file: JSON file in which mode "auto" keeps its measurements of this model, layout and
            device for the next run. Not set: they end with the process.
        plan_file: a plan to run instead of the planner's: a file that `plan --csv` has written.
        graph_tokens: run the layers of segments of up to this many positions as CUDA graphs, except
            experts, Mamba2's scan and some attention. Segments are padded to multiples of a 32nd of
            it, and what they keep stays allocated between steps. 0: no graphs. "auto": the longest
            length at which the device waits for the host, if the first steps get faster and fit the
            memory limit, and unless a trainer returns memory to the device between steps.
        verify: run the first N shared steps of each kind (updates, passes without gradients), and
            the first N with CUDA graphs, with both schedules on the same microbatches, compare
            them, and return the stock schedule's results. A kind of step that differs by more than
            rounding gets the stock schedule from then on; mode "on" raises. 0: none.
        watchdog_minutes: when a step has taken this many minutes, and ten times its usual and its
            predicted time, every rank logs what it is doing. 0: never.
    """

    mode: str = "on"
    chunk_tokens: int | str = 0
    segment_tokens: int | str = 16384
    min_gain: int = 32
    align: int = 1
    loss_in_leaves: bool = False
    trainer_masks: bool = True
    kernel: str = "auto"
    memory: str = "auto"
    memory_budget_gb: float = 0.0
    cache_host_layers: int = 0
    cp_reduce: str = "auto"
    across_ranks: str | None = None
    run_ahead: int = 2
    min_speedup: float = 1.05
    cost_file: str | None = None
    plan_file: str | None = None
    graph_tokens: int | str = "auto"
    verify: int = 0
    watchdog_minutes: float = 5.0

    def __post_init__(self) -> None:
        for name, values in CHOICES.items():
            value = getattr(self, name)
            if value not in values and value != self.__dataclass_fields__[name].default:
                raise UserError(f"{name} is {value!r}: give one of {', '.join(map(str, values))}")
        for name, field in self.__dataclass_fields__.items():
            check_type(name, types_of(field), value := getattr(self, name))
            if isinstance(value, numbers.Integral) and int(value) > MOST_COUNT:
                raise UserError(f"{name} is {shown(value)}: give at most {MOST_COUNT}")
        kernel_parts(self.kernel)
        if self.align < 1:
            raise UserError(f"align is {self.align!r}: give an integer from 1")
        self.tree_options(1)
        if 0 < self.memory_budget_gb < LEAST_MEMORY_GB:
            raise UserError(
                f"memory_budget_gb is {self.memory_budget_gb}, and no step runs in less than"
                f" {LEAST_MEMORY_GB:g}: give GiB, or 0 (not set)"
            )
        if not 0 <= self.memory_budget_gb <= MOST_MEMORY_GB:
            raise UserError(
                f"memory_budget_gb is {self.memory_budget_gb}: give a number from 0 to"
                f" {MOST_MEMORY_GB:.0f}"
            )
        for name in ("cache_host_layers", "graph_tokens", "verify"):
            value = getattr(self, name)
            if not isinstance(value, str) and value < 0:
                raise UserError(f"{name} is {value}: give a number from 0")
        if not 0 <= self.watchdog_minutes < math.inf:
            raise UserError(f"watchdog_minutes is {self.watchdog_minutes}: give a number from 0")
        if not 0 < self.min_speedup < math.inf:
            raise UserError(f"min_speedup is {self.min_speedup}: give a finite number above 0")

    @property
    def across(self) -> str:
        """`across_ranks`; by `mode` where that is not set."""
        return self.across_ranks or ("auto" if self.mode == "auto" else "off")

    @property
    def memory_budget(self) -> float | None:
        """`memory_budget_gb` in bytes; None if there is no such limit."""
        return self.memory_budget_gb * (1 << 30) or None

    def tree_options(self, multiple: int, whole: int = 1) -> TreeOptions:
        """Options of trees in a layout that pads spans to a multiple, and segments to whole ones;
        "auto" lengths are chosen later. All rollouts of a step are compared. A chunk is at least
        as long as that multiple."""
        chunk = 0 if isinstance(self.chunk_tokens, str) else self.chunk_tokens
        segment = (
            SEGMENT_TOKENS[-1] if isinstance(self.segment_tokens, str) else self.segment_tokens
        )
        if chunk >= self.align:  # else TreeOptions refuses what the user has set
            chunk = max(chunk, math.lcm(multiple, self.align))
        return TreeOptions(
            multiple, chunk, segment, self.min_gain, SEGMENT_GAIN * self.min_gain,
            self.loss_in_leaves, "batch", self.align, whole,
        )  # fmt: skip


# Values -------------------------------------------------------------------------------------------


def types_of(field: Any) -> set[str]:
    """The parts of a field's annotation: names of `TYPES`."""
    return set(str(field.type).split(" | "))


def wanted(kinds: set[str]) -> str:
    """What to give for a field of such kinds, for a message."""
    if "bool" in kinds:
        return "true or false"
    words = "an integer" if "int" in kinds else "a number"
    if "str" not in kinds:
        return words
    return f"{words} or 'auto'" if "int" in kinds else "text"


def check_type(name: str, kinds: set[str], value: Any) -> None:
    """Refuses a value of another type; a bool is not a number, and the text of a number is "auto".

    Raises:
        UserError: naming the field, the value and what to give.
    """
    right = isinstance(value, tuple(TYPES[kind] for kind in kinds))
    if isinstance(value, bool):
        right = "bool" in kinds
    elif isinstance(value, str) and "int" in kinds:
        right = right and value == "auto"
    if not right:
        raise UserError(f"{name} is {shown(value)}: give {wanted(kinds)}")


def kernel_parts(name: str) -> list[str]:
    """The names in that of an attention kernel: one or two of `KERNELS`, or "auto".

    Raises:
        UserError: it names no kernel.
    """
    parts = name.split("+")
    if name != "auto" and (len(parts) > 2 or not set(parts) <= set(KERNELS)):
        names = ", ".join(KERNELS)
        raise UserError(f"attention kernel {name!r} is not auto, one of {names}, or a+b")
    return parts
