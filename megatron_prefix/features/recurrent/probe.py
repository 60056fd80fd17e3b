"""Whether the kernels of recurrent layers work on a machine: found by running them.

Some versions of Triton miscompile the backward of the gated delta rule without an error
(flash-linear-attention's issue 640: Triton 3.4 to 3.7.0 on Hopper), so an import proves nothing.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from megatron_prefix.device import tolerance
from megatron_prefix.errors import named
from megatron_prefix.features.recurrent.definition import chunk_gated_delta_rule

logger = logging.getLogger(__name__)
PACKAGES = ("fla-core", "flash-linear-attention", "mamba-ssm", "causal-conv1d", "triton")
"""What the kernels depend on, for messages."""
COMPILED = ("GatedDeltaNet",)
"""Those whose kernels compile for minutes before they first run."""
_BOUNDS = (0, 70, 73, 200)


@torch.inference_mode(False)  # which turns gradients on, too
def rule_refusal(
    rule: Callable[..., Any], device: str, dtype: torch.dtype, key_dim: int, value_dim: int,
    heads: int = 2,
) -> str | None:  # fmt: skip
    """Why a gated delta rule cannot be used; None if it can.

    Runs three sequences with states, forward and backward, and compares outputs, states and all
    gradients with the definition in fp64; also where a first pass for log-probs has no gradients.

    Args:
        rule: with the signature of flash-linear-attention's `chunk_gated_delta_rule`.
    """
    inputs = _inputs(dtype, key_dim, value_dim, heads)
    names = ("output", "final state", *(f"gradient of {name}" for name in inputs))
    try:
        results = _run(rule, inputs, torch.device(device))
        references = _run(chunk_gated_delta_rule, inputs, torch.device("cpu"), True)
        limit = tolerance.tolerance(dtype, _BOUNDS[-1], max(key_dim, value_dim), 1)
        for name, result, reference in zip(names, results, references, strict=True):
            error = tolerance.relative_error(result.cpu(), reference)
            if not error <= limit:
                return f"wrong {name} (relative error {error:.1e}) with {_package_versions()}"
    except Exception as error:  # noqa: BLE001  # a kernel fails in its own way
        return f"{named(error)} with {_package_versions()}"
    return None


@functools.cache
def tried(
    rule: Callable[..., Any], device: str, key_dim: int, value_dim: int, heads: int
) -> str | None:
    """What `rule_refusal` says, in 16 bit on a GPU; once a process."""
    if device == "cpu":
        return rule_refusal(rule, device, torch.float64, key_dim, value_dim, heads)
    logger.warning(
        "trying GatedDeltaNet's kernels for %d heads of widths %d and %d: Triton compiles and"
        " tunes them for some minutes, unless TRITON_CACHE_DIR has them",
        heads,
        key_dim,
        value_dim,
    )
    return rule_refusal(rule, device, torch.bfloat16, key_dim, value_dim, heads)


@functools.cache
def refusals(
    device: str, key_dim: int = 128, value_dim: int = 128, heads: int = 32, compiles: bool = True
) -> dict[str, str | None]:
    """By Megatron's module, why its kernels cannot be used on a device; None if they can.

    Mamba2's kernels are only imported. Triton compiles and tunes those of GatedDeltaNet for these
    widths and this number of a rank's value heads (fla's autotuners ask for them), for minutes
    unless its cache has them: give a model's own, and its first step finds them done. Without
    `compiles` they are only imported too.
    """
    if device == "cpu":  # the CPU platform runs the definition itself
        return {"GatedDeltaNet": None, "MambaMixer": None}
    missing = {
        "GatedDeltaNet": _missing_import("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
    }
    if missing["GatedDeltaNet"] is None and compiles:
        rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        missing["GatedDeltaNet"] = tried(rule, device, key_dim, value_dim, heads)
    scan = "mamba_ssm.ops.triton.ssd_combined", "mamba_split_conv1d_scan_combined"
    missing["MambaMixer"] = _missing_import(*scan) or _missing_import(
        "causal_conv1d", "causal_conv1d_fn"
    )
    return missing


def _missing_import(module: str, name: str) -> str | None:
    package = module.partition(".")[0]
    try:
        getattr(importlib.import_module(module), name)
    except Exception as error:  # noqa: BLE001  # a broken installation raises anything
        fix = {
            "fla": "pip install fla-core==0.4.2",
            "mamba_ssm": "build mamba-ssm for this torch and CUDA",
            "causal_conv1d": "build causal-conv1d for this torch and CUDA",
        }[package]
        return f"{package} cannot be imported ({type(error).__name__}): {fix}"
    return None


def _inputs(dtype: torch.dtype, key_dim: int, value_dim: int, heads: int) -> dict[str, Tensor]:
    """Decays are slow, so that a state reaches the end of its sequence."""
    draw = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float32)

    length, num = _BOUNDS[-1], len(_BOUNDS) - 1
    unit = torch.nn.functional.normalize
    return {
        "queries": unit(random(1, length, heads, key_dim), dim=-1).to(dtype),
        "keys": unit(random(1, length, heads, key_dim), dim=-1).to(dtype),
        "values": random(1, length, heads, value_dim).to(dtype),
        "decays": -random(1, length, heads).abs() / 50,
        "beta": random(1, length, heads).sigmoid().to(dtype),
        "initial state": random(num, heads, key_dim, value_dim) / key_dim**0.5,
    }


def _run(
    rule: Callable[..., Any], inputs: dict[str, Tensor], device: torch.device, exact: bool = False
) -> Sequence[Tensor]:
    """Output, final states, and the gradients of `inputs` by fixed gradients of both."""
    parts = [part.to(device, torch.float64 if exact else part.dtype) for part in inputs.values()]
    if device.type == "cpu" and not exact and parts[0].dtype == torch.float64:
        parts = [part.double() for part in parts]
    parts = [part.requires_grad_() for part in parts]
    query, key, value, decay, beta, state = parts
    out, final = rule(
        query, key, value, g=decay, beta=beta, initial_state=state, output_final_state=True,
        **_lengths(rule, device),
    )  # fmt: skip
    draw = torch.Generator().manual_seed(6)
    gradients = [torch.randn(x.shape, generator=draw).to(x) for x in (out, final)]
    input_gradients = torch.autograd.grad((out, final), parts, gradients)
    return [x.detach() for x in (out, final, *input_gradients)]


def _lengths(rule: Callable[..., Any], device: torch.device) -> dict[str, Tensor]:
    """As a segment's layers give them (features/recurrent/delta.py)."""
    arguments = {"cu_seqlens": torch.tensor(_BOUNDS, device=device)}
    if "cu_seqlens_cpu" in inspect.signature(rule).parameters:
        arguments["cu_seqlens_cpu"] = torch.tensor(_BOUNDS)
    return arguments


def _package_versions() -> str:
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(versions) or "no package"
