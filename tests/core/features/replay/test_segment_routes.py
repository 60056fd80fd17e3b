"""Routes of segments' positions: each span's stand where its positions are, padding in between."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megatron_prefix.features.replay.segments import SegmentRoutes

ONE: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
LAYERS, TOPK = 2, 2


def span(rollouts: tuple[int, ...], start: int, end: int, padded: int) -> Any:
    return SimpleNamespace(
        rollouts=rollouts, start=start, end=end, length=end - start, padded=padded
    )


def routes_of(rollout: int) -> np.ndarray:
    """[positions, layers, topk], of numbers that say whose they are."""
    found = np.arange(12)[:, None, None] + 20 * np.arange(LAYERS)[:, None] + 40 * np.arange(TOPK)
    return (found + 100 * (1 + rollout)).astype(np.int16)


def test_spans_of_a_segment_stand_behind_one_anothers_padding() -> None:
    spans = [
        [span((0, 1), 0, 5, 8), span((), 0, 0, 4)],  # a filler has no rollouts
        [span((1,), 5, 9, 8), span((0,), 5, 12, 8)],
    ]
    segments = [
        SimpleNamespace(spans=some, padded_length=sum(one.padded for one in some)) for some in spans
    ]
    rollouts: Any = [SimpleNamespace(routes=routes_of(number)) for number in range(2)]
    found = SegmentRoutes(
        SimpleNamespace(segments=segments), rollouts, (LAYERS, TOPK),  # type: ignore[arg-type]
        SimpleNamespace(pp=ONE, cp=ONE), torch.device("cpu"),
    )  # fmt: skip
    for layer in range(LAYERS):
        router = SimpleNamespace(layer_number=1 + layer, tp_group=ONE)
        first, second = (
            found.of(router, index, segment.padded_length).numpy()
            for index, segment in enumerate(segments)
        )
        padding = [[*range(TOPK)]]
        assert first.tolist() == [*routes_of(0)[:5, layer].tolist(), *padding * 7]
        assert second.tolist() == [
            *routes_of(1)[5:9, layer].tolist(), *padding * 4,
            *routes_of(0)[5:12, layer].tolist(), *padding,
        ]  # fmt: skip
