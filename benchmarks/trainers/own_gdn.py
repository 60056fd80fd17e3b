"""What slime's and miles' own GatedDeltaNet needs on a CPU."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_prefix.features.recurrent.definition import l2norm
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.platforms.linear_kernels import causal_conv1d
from megatron_prefix.lab.runtime import Layout
from tests.harness import own_delta
from tests.harness.own_delta import FULL, LINEAR, SIZES


def put_kernels() -> None:
    """Stand-ins for flash-linear-attention; the rank is a process of its own."""
    kernels = types.ModuleType("fla.ops.gated_delta_rule")
    kernels.chunk_gated_delta_rule = own_delta.chunk_gated_delta_rule  # type: ignore[attr-defined]
    ranks = types.ModuleType("fla.ops.cp")
    ranks.build_cp_context = (  # type: ignore[attr-defined]
        lambda cu_seqlens, group, conv1d_kernel_size: own_delta.Parts(group, cu_seqlens)
    )
    modules = types.ModuleType("fla.modules")
    vars(modules).update(
        ShortConvolution=own_delta.ShortConvolution,
        FusedRMSNormGated=own_delta.FusedRMSNormGated,
    )
    convolution, norm = map(types.ModuleType, ("fla.modules.convolution", "fla.modules.l2norm"))
    vars(convolution).update(causal_conv1d=causal_conv1d)
    vars(norm).update(l2norm=l2norm)
    packages = types.ModuleType("fla"), types.ModuleType("fla.ops")
    for one in (*packages, modules, kernels, ranks, convolution, norm):
        sys.modules[one.__name__] = one


def write_config(folder: Path, kind: str, layer_types: Sequence[str], model: str) -> None:
    """As Hugging Face stores one, of a model like a preset with layers of these types."""
    config = {
        **SIZES, "model_type": kind, "hidden_size": resolve(model).hidden_size,
        "layer_types": [*layer_types], "num_hidden_layers": len(layer_types), "hidden_act": "silu",
        "dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def pass_states(chunks: Sequence[Any]) -> None:
    """As miles' actor does when its models are there, with context parallelism."""
    from megatron.core import parallel_state
    from miles_plugins.models.cp_utils import detect_and_setup_hybrid_cp

    group = parallel_state.get_context_parallel_group()
    for chunk in chunks:
        assert detect_and_setup_hybrid_cp(chunk, group, group.rank(), group.size())


@contextlib.contextmanager
def in_miles(layout: Layout, model: str) -> Iterator[None]:
    """Models like a preset that are built meanwhile begin with miles' layer of Qwen3.5."""
    from miles_plugins.models.qwen3_5 import Attention

    given = {"allgather_cp": False, "linear_attention_backend": "fla"}
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), "qwen3_5_text", (LINEAR, FULL), model)
        with own_delta.own_layers(
            (LINEAR, FULL), "attribute", layout.sequence_parallel, Attention,
            hf_checkpoint=folder, **given,
        ):  # fmt: skip
            yield
