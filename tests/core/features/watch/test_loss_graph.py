"""Whether a loss reads what a model has computed inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_prefix.features.watch.traces import CallGraph, next_number


class Model(nn.Module):
    """Two layers; `inside` is what a hook on the first one keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)
        self.inside = torch.zeros(())

    def forward(self, x: Tensor) -> Any:
        self.inside = self.first(x)
        return self.second(self.inside.tanh())


Loss = Callable[[Model, Any], Tensor]


def reads_inside(loss: Loss, forward: Callable[..., Any] = Model.forward) -> bool:
    model, x = Model(), torch.ones(4, 3)
    begin = next_number()
    output = forward(model, x)
    graph = CallGraph.of(begin, output)
    return graph.is_read_inside(loss(model, output))


OUTPUT_ONLY: dict[str, Loss] = {
    "sum": lambda model, output: output.sum(),
    "cast by a wrapper": lambda model, output: output.double().sum(),
    "written in place": lambda model, output: output.div_(2.0).exp().sum(),
    "two views": lambda model, output: (output[:2].t() @ output[2:]).sum(),
    "a norm of weights": lambda model, output: output.sum() + model.first.weight.norm(),
    "detached": lambda model, output: output.sum() + model.inside.detach().sum(),
    "no graph": lambda model, output: torch.zeros(()),
}
INSIDE: dict[str, Loss] = {
    "alone": lambda model, output: model.inside.sum(),
    "beside the output": lambda model, output: output.sum() + 1e-6 * model.inside.pow(2).mean(),
    "as a factor": lambda model, output: (output * model.inside[:, :2]).sum(),
}


@pytest.mark.parametrize("loss", OUTPUT_ONLY.values(), ids=OUTPUT_ONLY)
def test_the_output_may_be_read(loss: Loss) -> None:
    assert not reads_inside(loss)


@pytest.mark.parametrize("loss", INSIDE.values(), ids=INSIDE)
def test_what_is_inside_is_noticed(loss: Loss) -> None:
    assert reads_inside(loss)


def test_outputs_may_be_trees_and_recomputed() -> None:
    def tree(model: Model, x: Tensor) -> Any:
        return {"logits": checkpoint(model.forward, x, use_reentrant=False), "name": "x"}

    assert not reads_inside(lambda model, output: output["logits"].sum(), tree)
    assert reads_inside(lambda model, output: output["logits"].sum() + model.inside.sum(), tree)


@pytest.mark.parametrize("shape", [(4, 1), (1, 4)])
def test_a_view_that_is_returned_may_be_written(shape: tuple[int, int]) -> None:
    """Megatron's logits of one sample are a transposed view, and verl divides them in place."""

    def viewed(model: Model, x: Tensor) -> Any:
        return model.forward(x).unflatten(0, shape).transpose(0, 1).contiguous()

    def divided(model: Model, output: Any) -> Tensor:
        return output.div_(0.9).logsumexp(-1).sum()

    assert not reads_inside(divided, viewed)
    assert reads_inside(lambda model, output: divided(model, output) + model.inside.sum(), viewed)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_read(context: Callable[[], Any]) -> None:
    with context():
        assert not reads_inside(INSIDE["alone"])


def test_what_was_computed_before_or_after_is_the_trainers() -> None:
    before = torch.ones(4, 2, requires_grad=True).exp()
    assert not reads_inside(lambda model, output: (output * before).sum())
    assert not reads_inside(lambda model, output: output.sum() + model.second.weight.exp().sum())
