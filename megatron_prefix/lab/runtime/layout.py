"""How the ranks of a job are laid out. [pure]"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from megatron_prefix.errors import UserError, shown

MOST, MOST_STAGES = 10**6, 1024
SIZES = ("tp", "pp", "vpp", "cp", "ep", "dp")


@dataclass(frozen=True)
class Layout:
    """The parallel layout of a job, in Megatron-Core's sense and rank order (tp-cp-ep-dp-pp).

    tp, pp, cp, dp: tensor, pipeline, context and data parallel size; their product is the world.
    vpp: model chunks that a pipeline stage holds (1: no interleaving).
    ep: expert parallel size. Expert parallelism re-uses the ranks of context and data parallelism,
        so it divides cp * dp and adds none.
    sequence_parallel: Megatron's sequence parallelism, over the tp ranks.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name in SIZES:
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MOST:
                raise UserError(
                    f"--{name} {shown(size)} is not a size; use an integer from 1 to {MOST}"
                )
        if self.pp * self.vpp > MOST_STAGES:
            raise UserError(
                f"--pp {self.pp} * --vpp {self.vpp} are {self.pp * self.vpp} model chunks; no model"
                f" has as many layers, use at most {MOST_STAGES}"
            )
        if self.sequence_parallel and self.tp == 1:
            raise UserError(
                "--sequence-parallel needs --tp of at least 2, not 1; leave it out or raise --tp"
            )
        if self.vpp > 1 and self.pp == 1:
            raise UserError(
                f"--vpp {self.vpp} needs --pp of at least 2, not 1; leave it out or raise --pp"
            )
        if (self.cp * self.dp) % self.ep:
            raise UserError(
                f"--ep {self.ep} must divide cp * dp = {self.cp * self.dp}; "
                f"use --dp {self.ep // gcd(self.ep, self.cp)} or a smaller --ep"
            )

    def check_layers(self, model: str, num_layers: int) -> None:
        """Refuses a model whose layers the pipeline stages do not divide.

        Raises:
            UserError: names both numbers and the fix.
        """
        stages = self.pp * self.vpp
        if num_layers % stages:
            raise UserError(
                f"model {model} has {num_layers} layers, which {stages} pipeline stages "
                f"(pp {self.pp} * vpp {self.vpp}) do not divide; change --pp or --vpp"
            )

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def alignment(self) -> int:
        """Spans end at multiples of it: tp with sequence parallelism, times 2*cp if cp > 1."""
        return (self.tp if self.sequence_parallel else 1) * (2 * self.cp if self.cp > 1 else 1)

    @classmethod
    def fill(
        cls,
        *,
        world_size: int | None = None,
        dp: int | None = None,
        tp: int = 1,
        pp: int = 1,
        vpp: int = 1,
        cp: int = 1,
        ep: int = 1,
        sequence_parallel: bool = False,
    ) -> Layout:
        """A layout; if `dp` is None, it is chosen to fill the world.

        Without `world_size` it is the smallest dp that `ep` allows, so `ep=2` alone makes a world
        of 2.

        Raises:
            UserError: the sizes do not multiply to `world_size`, or contradict one another.
        """
        one = cls(tp, pp, vpp, cp, 1, 1, sequence_parallel)  # refuses sizes below 1
        if dp is None:
            if not isinstance(ep, int) or ep < 1:
                raise UserError(f"--ep {shown(ep)} is not a size; use an integer from 1")
            dp = ep // gcd(ep, cp) if world_size is None else max(1, world_size // one.world_size)
        layout = cls(tp, pp, vpp, cp, ep, dp, sequence_parallel)
        if world_size is not None and layout.world_size != world_size:
            raise UserError(
                f"tp {tp} * pp {pp} * cp {cp} * dp {dp} = {layout.world_size} ranks, but the world "
                f"has {world_size}; change a size or start {layout.world_size} ranks"
            )
        return layout
