"""`--set FIELD=VALUE`."""

from __future__ import annotations

import pytest

from megatron_prefix.errors import UserError
from megatron_prefix.lab.cli.modelling import overrides_of
from megatron_prefix.lab.models import presets


def test_values_have_the_types_of_their_fields() -> None:
    given = ["num_layers=2", "qk_layernorm=False", "norm_eps=1e-5", "num_experts=None"]
    assert overrides_of(given) == (
        ("num_layers", 2), ("qk_layernorm", False), ("norm_eps", 1e-5), ("num_experts", None),
    )  # fmt: skip


def test_a_model_without_its_experts_has_mlps() -> None:
    whole = presets.resolve("qwen3-next-80b-a3b")
    spec = presets.resolve("qwen3-next-80b-a3b", **dict(overrides_of(["num_experts=none"])))
    assert whole.is_moe and not spec.is_moe
    assert spec.parameters() < whole.parameters() / 10


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("num_layers=none", "num_layers is int; give such a value"),
        ("num_experts=some", "num_experts is int | None; give such a value"),
        ("qk_layernorm=yes", "qk_layernorm is bool; give such a value"),
        ("layers=2", "layers=2: no such field; fields: "),
    ],
)
def test_others_are_refused(setting: str, message: str) -> None:
    with pytest.raises(UserError) as refused:
        overrides_of([setting])
    assert message in str(refused.value)
