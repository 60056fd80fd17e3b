"""YaRN's scale of queries and keys where apply_rope_fusion is on.

Megatron turns rows [batch, positions] with the scale, in its own functions. Packs go through
transformer-engine's kernel, which has none: releases differ in whether they then leave it out
(`apply_rotary_pos_emb` of megatron/core/models/common/embeddings/rope_utils.py). A segment is a
row; where the trainer's calls are packs and the release leaves the scale out, so does the segment.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

from megatron_prefix.layers.kind import Override, Running
from megatron_prefix.layers.rebound import rebound

_SCALE = "_yarn_get_concentration_factor_from_config"
"""What an attention asks for the scale, by a global name."""


def differs(config: Any) -> bool:
    """Whether packs and rows of a model are turned differently."""
    fused = getattr(config, "apply_rope_fusion", False)
    return bool(fused) and _is_scaled(config) and not packs_are_scaled()


def is_known(module: Any) -> bool:
    """Whether an attention asks for the scale as Megatron's does."""
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and _SCALE in code.co_names


def overrides(module: Any, running: Running) -> Iterator[Override]:
    """The attention's forward, which leaves the scale out in segments of packs."""
    if not (_is_scaled(module.config) and is_known(module)):
        return
    stock = module.forward
    unscaled = rebound(stock, **{_SCALE: lambda config: 1.0})

    def forward(*args: Any, **kwargs: Any) -> Any:
        packed = running.current is not None and running.packed
        return (unscaled if packed and differs(module.config) else stock)(*args, **kwargs)

    yield module, "forward", forward


@functools.cache
def packs_are_scaled() -> bool:
    """Whether this release turns packs without the kernel where there is a scale, as rows."""
    from megatron.core.models.common.embeddings import rope_utils

    return inspect.getsource(rope_utils.apply_rotary_pos_emb).count("mscale != 1.0") > 1


def _is_scaled(config: Any) -> bool:
    """Whether YaRN makes rotated queries and keys longer, as megatron-core's function says. Latents
    have other fields and kernels."""
    scale, scale_all_dim = (getattr(config, f"yarn_mscale{of}", None) for of in ("", "_all_dim"))
    longer = (getattr(config, "yarn_rotary_scaling_factor", None) or 1.0) > 1.0
    return longer and (scale is None or scale_all_dim is None or scale != scale_all_dim)
