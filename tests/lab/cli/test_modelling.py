"""`--set FIELD=VALUE`."""

import pytest

from megatron_prefix.errors import UserError
from megatron_prefix.lab.cli.modelling import overrides_of


def test_values_have_the_types_of_their_fields():
    given = ["num_layers=2", "qk_layernorm=False", "layernorm_epsilon=1e-5", "num_moe_experts=None"]
    assert overrides_of(given) == (
        ("num_layers", 2), ("qk_layernorm", False),
        ("layernorm_epsilon", 1e-5), ("num_moe_experts", None),
    )  # fmt: skip


def test_old_names_of_fields_are_taken_and_logged(caplog):
    given = ["num_experts=none", "squared_relu=true", "moe_normalize_top_k=False", "init_std=0.5"]
    assert dict(overrides_of(given)) == {
        "num_moe_experts": None, "gated_linear_unit": False, "moe_router_pre_softmax": True,
        "init_method_std": 0.5,
    }  # fmt: skip
    assert len(caplog.messages) == 4
    assert "--set squared_relu=true is now --set gated_linear_unit=False" in caplog.messages


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("num_layers=none", "num_layers is int; give a value of that type"),
        ("num_moe_experts=some", "num_moe_experts is int | None; give a value of that type"),
        (
            "moe_layer_freq=0,x",
            "moe_layer_freq is int | tuple[int, ...]; give a value of that type",
        ),
        ("qk_layernorm=yes", "qk_layernorm is bool; give a value of that type"),
        ("layers=2", "layers=2: no such field; fields: "),
    ],
)
def test_others_are_refused(setting, message):
    with pytest.raises(UserError) as refused:
        overrides_of([setting])
    assert message in str(refused.value)
