"""Short prompts in front of what continues them. Rows of tests/test_cases.py prove that this is
exact."""

from collections import Counter

import pytest

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.layers.blocks import core
from megatron_prefix.layers.blocks.operators import MathKernel
from tests.core.features.graphs.test_graphs import shared_step
from tests.harness.one_rank import small_model

pytestmark = pytest.mark.usefixtures("on_one_rank")


def num_calls(monkeypatch, prompt, answer):
    """Of the kernel in forwards of a segment's attention: the most, in a step."""
    numbers, stock = Counter(), core.merge
    monkeypatch.setattr(core, "merge", lambda parts: numbers.update([len(parts)]) or stock(parts))
    config = PrefixConfig(kernel="math", min_gain=4, segment_tokens=64, graph_tokens=0)
    shared_step(PrefixSchedule(config), small_model(), prompt=prompt, answer=answer)
    return max(numbers)


@pytest.mark.parametrize(("takes", "expected"), [(True, 1), (False, 2)])
def test_a_short_prompt_takes_no_call(takes, expected, monkeypatch):
    """Unless a kernel would take one for every span."""
    monkeypatch.setattr(MathKernel, "takes_fronts", takes)
    assert num_calls(monkeypatch, prompt=8, answer=24) == expected


def test_a_long_prompt_takes_one_call(monkeypatch):
    assert num_calls(monkeypatch, prompt=64, answer=8) == 2
