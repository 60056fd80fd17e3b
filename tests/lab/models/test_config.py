"""Megatron's TransformerConfig of a model: which kernels it asks for."""

import megatron.core.utils
import pytest
import torch
from packaging.version import Version

from megatron_prefix.lab.models.config import transformer_config
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.rl import routes
from megatron_prefix.lab.runtime import Layout


@pytest.mark.parametrize(
    ("model", "release", "overrides", "fused"),
    [
        ("tiny-moe", "2.7.0", {}, True),
        ("tiny-moe", "2.6.0", {}, False),
        ("tiny-moe", "2.7.0", routes.CONFIG, False),  # which fused routers do not follow
        ("tiny-llama", "2.7.0", {}, False),
    ],
)
def test_routers_are_fused_where_they_can_be(monkeypatch, model, release, overrides, fused):
    monkeypatch.setattr(megatron.core.utils, "get_te_version", lambda: Version(release))
    config = transformer_config(
        resolve(model), Layout(), torch.bfloat16, torch.device("cuda"), transformer_engine=True,
        overrides={"apply_rope_fusion": False, **overrides},
    )  # fmt: skip
    assert config.moe_router_fusion == fused
