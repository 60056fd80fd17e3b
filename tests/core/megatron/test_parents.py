"""The forward of a parent class, replaced for one instance."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from megatron_prefix.megatron import parents


class Parent:
    """Of the model."""

    def forward(self, x: int) -> int:
        return x + 1


class Mixed:
    """Another parent."""

    def forward(self, x: int) -> int:
        raise AssertionError


class Model(Parent, Mixed):
    """It calls its parent's."""

    def forward(self, x: int) -> int:
        return 10 * super().forward(x)


class Derived(Model):
    """It has no forward of its own."""


def times(factor: int, stock: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: factor * stock(*args, **kwargs)


@pytest.mark.parametrize("kind", [Model, Derived])
def test_one_instance_has_another_parent(kind: type[Model]) -> None:
    model, other = kind(), kind()
    with parents.replaced(model, Model, times(2, parents.forward(model, Model))):
        assert (model.forward(1), other.forward(1)) == (40, 20)
        assert isinstance(model, kind) and type(model).__name__ == kind.__name__
        with parents.replaced(model, Model, times(3, parents.forward(model, Model))):
            assert model.forward(x=1) == 120
        assert (model.forward(1), parents.forward(model, Model)(1)) == (40, 4)
    assert (model.forward(1), type(model), vars(model)) == (20, kind, {})


def test_an_error_inside_changes_nothing() -> None:
    model = Model()
    with contextlib.suppress(ValueError), parents.replaced(model, Model, times(2, abs)):
        raise ValueError
    assert (model.forward(1), type(model), vars(model)) == (20, Model, {})
