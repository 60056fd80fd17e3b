"""Device memory of CUDA graphs, as predicted: where they write stays theirs.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_prefix.features.graphs.choice import size_of_set
from megatron_prefix.features.graphs.kinds import elsewhere, without_graphs
from megatron_prefix.layers.kind import Kind
from megatron_prefix.plan.actions import Action, Plan
from megatron_prefix.plan.footprint import Footprint
from megatron_prefix.predict.execution import Execution
from megatron_prefix.predict.kinds import memory_of
from megatron_prefix.predict.model import of_layers


@dataclass(frozen=True)
class GraphPlaces:
    """Of the layers of a rank; see `Places` in plan/footprint.py.

    Attributes:
        most: positions of the longest segment whose layers run on graphs.
        apart: bytes a position that a layer saves elsewhere for a wave: all, if it has no graphs;
            on average.
        twice: of these, bytes that are copied to a place, too.
    """

    most: int
    apart: float
    twice: float

    @classmethod
    def of_layers(
        cls, most: int, config: Any, layers: Sequence[Sequence[Kind]], form: Execution
    ) -> GraphPlaces:
        """Of a model.

        Args:
            most: see the class.
            config: the model's.
            layers: what fills the slots of each, of all stages.
            form: how it is computed.
        """
        apart = twice = 0.0
        for kinds in layers:
            memory = [memory_of(kind, config, form) for kind in kinds]
            parts = [
                elsewhere(kind, config, form, of) for kind, of in zip(kinds, memory, strict=True)
            ]
            twice += sum(part.twice for part in parts)
            if without_graphs(config, kinds):
                apart += of_layers([memory], config.hidden_size, 1, form).wave
            else:
                apart += sum(part.apart for part in parts)
        return cls(most, apart / len(layers), twice / len(layers))

    def saved(self, plan: Plan, footprint: Footprint, rank: int, action: Action) -> float:
        """See Places."""
        segment, policy = plan.segments[action.segment], plan.policy(action.segment)
        if policy == "offload" or segment.source >= 0 or segment.padded_length > self.most:
            return 0.0
        layer = footprint.inner if segment.inner else footprint.wave
        layer -= self.apart + _dropped(plan, footprint, action)
        positions = segment.padded_length / footprint.parts
        return positions * layer * _num_layers(plan, footprint, rank, action)

    def held(self, plan: Plan, footprint: Footprint, rank: int) -> float:
        """See Places. Sets are for segments about as long (`size_of_set`): as many as such segments
        have some at once, each what the one of them that keeps most does, and what its layers have
        for a moment. K and V have their places there in any case. A segment that is recomputed has
        a set while it runs."""
        layer = footprint.wave - self.apart + self.twice  # a position
        largest: dict[tuple[int, int], float] = {}
        live: Counter[tuple[int, int]] = Counter()
        most: Counter[tuple[int, int]] = Counter()
        for action in plan.programs[rank]:
            if not self.saved(plan, footprint, rank, action):
                continue
            length = plan.segments[action.segment].padded_length
            key = action.chunk, size_of_set(length, self.most)
            num = _num_layers(plan, footprint, rank, action)
            size = num * (layer - _dropped(plan, footprint, action)) + footprint.temporary
            largest[key] = max(largest.get(key, 0.0), size * (length / footprint.parts))
            recomputes = plan.policy(action.segment) == "recompute"
            live[key] += 0 if recomputes else 1 if action.kind == "F" else -1
            most[key] = max(most[key], live[key] + recomputes)
        return sum(most[key] * size for key, size in largest.items())


def _dropped(plan: Plan, footprint: Footprint, action: Action) -> float:
    """Of what a layer saves, bytes a position that policy "recompute_act" drops."""
    return footprint.act * (plan.policy(action.segment) == "recompute_act")


def _num_layers(plan: Plan, footprint: Footprint, rank: int, action: Action) -> int:
    """Layers with graphs: the last one of the last stage may run on what is read only."""
    is_last = plan.stage(rank, action.chunk) == plan.num_stages - 1
    return footprint.num_layers - (footprint.ends_early and is_last)
