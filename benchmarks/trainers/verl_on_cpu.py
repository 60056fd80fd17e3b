"""Importing this module inside `import verl` lets it run on the CPU, with a recorded engine.

For `VERL_USE_EXTERNAL_MODULES`, which Ray's workers inherit; verl_run.py says what stands in.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from typing import Any

import torch

from benchmarks.trainers.verl_run import UNUSED
from megatron_prefix.auto.after_import import AfterImport
from megatron_prefix.lab.platforms import cpu
from tests.core.trainers import stand_ins


def _torch() -> None:
    """What verl and Megatron ask of `torch.cuda`, and of torch's groups."""
    stand_ins.for_megatron()
    cpu.enable()
    from benchmarks.trainers.megatron_lm_steps import take_sequence_parallelism
    from tests.core.trainers.cpu_training import run_on_cpu

    run_on_cpu()
    take_sequence_parallelism()
    torch.compiler.set_stance("force_eager")
    torch.cuda.mem_get_info = lambda *_: (0, 0)
    torch.cuda.get_device_name = lambda *_: "CPU"
    torch.cuda.nvtx.range = lambda *_, **__: contextlib.nullcontext()
    begin = torch.distributed.init_process_group

    @functools.wraps(begin)
    def on_gloo(backend: Any = None, *args: Any, **options: Any) -> None:
        """verl names a backend for the CPU and one for its device, which is the CPU."""
        begin("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **options)

    torch.distributed.init_process_group = on_gloo


def _verl() -> None:
    """The CPU as a platform of verl's, and fp32, which its Megatron engine has no word for."""
    from verl.plugin.platform import set_platform
    from verl.plugin.platform.platform_cuda import PlatformCUDA
    from verl.utils.torch_dtypes import PrecisionType

    members = {
        "device_name": "cpu", "is_available": lambda self: True,
        "current_device": lambda self: "cpu", "communication_backend_name": lambda self: "gloo",
        "set_allocator_settings": lambda self, settings: None,
        "is_ipc_supported": lambda self: False,
    }  # fmt: skip
    set_platform(type("PlatformCPU", (PlatformCUDA,), members)())
    os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # its engines are registered for that
    PrecisionType.to_dtype = staticmethod(lambda precision: torch.float32)


def _local_layers(bridge: Any) -> None:
    """Lets mbridge build Megatron's local layers, whose norms have names of their own."""
    spec = bridge.get_gpt_decoder_block_spec

    @functools.wraps(spec)  # mbridge looks at its arguments
    def local(config: Any, use_transformer_engine: bool, **options: Any) -> Any:
        return spec(config, use_transformer_engine=False, **options)

    mapping = bridge.LLMBridge._weight_name_mapping_mcore_to_hf

    def named(self: Any, name: str) -> list[str]:
        name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
        return mapping(self, name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"))

    bridge.get_gpt_decoder_block_spec = local
    bridge.LLMBridge._weight_name_mapping_mcore_to_hf = named


def _recorded(replica: Any) -> None:
    """Makes the engine known where verl looks engines up."""
    from verl.workers.rollout import base

    engine = "benchmarks.trainers.verl_engine"
    base._ROLLOUT_REGISTRY["recorded", "async"] = f"{engine}.Adapter"
    load = functools.partial(_loaded, engine)
    replica.RolloutReplicaRegistry.register("recorded", load)


def _loaded(module: str) -> Any:
    return importlib.import_module(module).Replica


_torch()
stand_ins.where_missing(*UNUSED)
_verl()
AfterImport("mbridge.core.llm_bridge", _local_layers).begin()
AfterImport("verl.workers.rollout.replica", _recorded).begin()
