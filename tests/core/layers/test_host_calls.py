"""What the host does for a segment's attention in a layer does not grow with its spans."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from typing import Any

import pytest

from benchmarks.host_layers import kernel_of, run, wave


def calls(spans: int, layers: int) -> int:
    """Calls of Python and of C functions in the layers' forwards and backwards of a segment."""
    found: Counter[str] = Counter()

    def count(frame: Any, event: str, argument: Any) -> None:
        found[event] += event in ("call", "c_call")

    context, query = wave(spans, 4 * spans, layers, "cpu", spans)
    with kernel_of("cpu") as kernel:
        gc.disable()  # what others left would be counted
        sys.setprofile(count)
        try:
            run(context, query, layers, kernel)
        finally:
            sys.setprofile(None)
            gc.enable()
    return found.total()


@pytest.mark.parametrize("spans", [2, 17, 256])
def test_no_call_a_span_in_the_layer_loop(spans: int) -> None:
    """What is made from the lengths is made in a segment's first layer."""
    calls(1, 1)  # imports

    def a_layer(spans: int) -> int:
        return calls(spans, 3) - calls(spans, 2)

    for num in (1, spans):
        calls(num, 1)
    many = a_layer(spans)
    assert 100 < many <= a_layer(1) + 50  # a lone run is another kind of call
    assert many == a_layer(2)
