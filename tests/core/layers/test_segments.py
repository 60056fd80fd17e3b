"""What the host does for a segment's attention in a layer does not grow with its spans. Rows of
tests/test_cases.py prove that attention is full and causal."""

import gc
import sys
from collections import Counter

from benchmarks.host_layers import kernel_of, run, wave


def calls(spans, layers):
    """Calls of Python and of C functions in the layers' forwards and backwards of a segment."""
    found = Counter()

    def count(frame, event, argument):
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


def test_no_call_a_span_in_the_layer_loop():
    """What is made from the lengths is made in a segment's first layer."""
    spans = 17
    calls(1, 1)  # imports

    def a_layer(spans):
        return calls(spans, 3) - calls(spans, 2)

    for num in (1, 2, spans):
        a_layer(num)
    many = a_layer(spans)
    assert 100 < many <= a_layer(1) + 50  # a lone run is another kind of call
    assert many == a_layer(2)
