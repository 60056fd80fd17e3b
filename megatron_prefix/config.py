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
(benchmarks/LOG.md, "four H200s of one host, timed")."""


@dataclass(frozen=True)
class PrefixConfig:
    """Configuration of the prefix schedule.

    Attributes:
        mode: "off": Megatron's schedule; "observe": Megatron's schedule, and metrics say what
            sharing would save; "auto": share where the cost model says that it pays; "on": always.
        chunk_tokens: longest span, at least `align`; 0: no limit; "auto": for every step the length
            with the shortest simulated step. No shorter than the multiples at which the layout
            begins spans.
        segment_tokens: most positions in a segment (a single span may exceed it); 0: no limit;
            "auto": for every step the number of SEGMENT_TOKENS with the shortest predicted time
            among those that keep the limit of memory. Of a number a half, a quarter or an eighth,
            from LEAST_SEGMENT on, or a length between two of these, is taken where that keeps the
            limit, or a pipeline waits less.
        min_gain: a shared span that saves fewer positions is dissolved. So is an inner segment that
            saves fewer than SEGMENT_GAIN times as many and less than a 16th of the step, where its
            spans cannot run in the waves that read them. 0 dissolves nothing, and no prompt runs in
            the segment of its suffixes.
        align: spans begin at multiples of it, besides those that the layout needs. With 64 the
            kernels of GatedDeltaNet cut a sequence where they do anyway, and a chain of spans is
            bitwise the whole; else it differs by rounding.
        loss_in_leaves: never share a position at or after a first trained one.
        trainer_masks: in a trainer whose model calls have no loss_mask, follow the mask of its
            microbatches, where its entry in megatron_prefix/trainers/table.py says where that is.
        kernel: name of the attention kernel, two of them (A+B), or "auto"
            (megatron_prefix/layers/blocks/kernels.py).
        memory: what an inner segment keeps between its forward and its backward. "retain": its
            saved tensors; "recompute_act": without what MLPs' activation functions give, which is
            computed again (features/recompute_act), waves too; "offload": all of them, on the host;
            "recompute": its K/V and its input, and its forward runs again; "auto": for every step
            and segment the cheapest policy with which the predicted peak keeps the limit: that of
            Megatron's own schedule on the same microbatches and 5 %
            (run/execute/memory_control.py), or `memory_budget_gb`. Without a budget it does not
            offload.
        memory_budget_gb: GiB of device memory that a step may use in addition to what is in use
            when it begins, instead of the limit of "auto". Limits prefetches of "offload", too.
            0: not set. In mode "auto" a step that cannot keep its limit runs as Megatron's.
        cache_host_layers: layers of every model chunk, of those with attention or a recurrence,
            whose K/V or states and their gradients are in host memory, and on the device only while
            the layer runs; evenly spread.
        cp_reduce: with context parallelism, when gK/gV are sent to the ranks that own the keys:
            after every "wave", or once a "segment", for which every rank keeps K/V and gK/gV of all
            of them: nothing is gathered twice, and the sidecar takes cp times the memory. "auto":
            "segment" in steps whose predicted peak, nothing recomputed, then fits in what the first
            training steps had free.
        across_ranks: whether what rollouts on several data-parallel ranks begin with runs once, on
            one of them, which sends its K/V or states, and final hidden states of what carries
            loss, to the others. "auto": where it can be, the slowest rank is predicted to be
            sooner, at the measured rate of messages, and the predicted peak keeps the limit of
            memory; "on": always, and what is in the way is refused; "off": every rank shares what
            it has. None: "auto" in mode "auto", else "off" (`across`). Where prompts may cross,
            chunk length "auto" cuts nothing.
        run_ahead: forwards that a pipeline stage runs ahead of its successor (1 or 2).
        min_speedup: in mode "auto", the predicted speedup below which the stock schedule runs.
        cost_file: where mode "auto" keeps what it measures of this model, layout and device, for
            the next run (megatron_prefix/features/measure); None: for this process only.
        plan_file: a plan to run instead of the planner's (megatron_prefix/features/plan_files),
            with what it says that each segment keeps.
        graph_tokens: positions of the longest segment whose layers run on CUDA graphs, but for
            core attention, recurrences and experts, and so take less of the host's time. Such
            segments are padded to multiples of a 32nd of it, and what they keep stays allocated
            between steps. 0: none does. "auto", in mode "auto": the longest for which the device
            was seen to wait for the host, if steps then take less time.
        verify: the first N steps of each kind that would be shared run with both schedules, on the
            same microbatches and from the same state. The trainer gets the stock schedule's
            results, bit for bit, and a line says how far the prefix schedule's were from them, in
            units of what rounding allows. A kind of step that differs by more is the stock
            schedule's from then on; mode "on" raises. 0: none.
        watchdog_minutes: after so many every rank says in its log where a step stands that has also
            taken ten times its usual and its predicted time (features/watchdog). 0: none does.
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
    graph_tokens: int | str = 0
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
        if isinstance(self.graph_tokens, str) and self.mode == "on":
            raise UserError("graph_tokens 'auto' is measured: give a number, or mode 'auto'")
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
