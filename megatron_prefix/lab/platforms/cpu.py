"""Megatron-Core on the CPU with gloo, without transformer-engine and apex.

Megatron-Core assumes CUDA in a few places. `enable()` gives each of them a CPU counterpart, for the
life of the process. Nothing here runs without that call. Every function names the lines of
megatron-core 0.16.1 (paths below megatron/core/) that need it; where a newer version has fixed the
cause, it has no effect.

There are three kinds: `torch.cuda` calls without a device check, features that gloo lacks, and code
of Megatron that assumes transformer-engine. This file is the whole list of functions that the
package rebinds, but for the schedule (auto/swap.py).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import queue
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron_prefix.errors import UserError

logger = logging.getLogger(__name__)

_enabled = False


def enabled() -> bool:
    """Whether `enable` has been applied in this process."""
    return _enabled


def enable(*, hide_gpus: bool = False) -> None:
    """Let Megatron-Core run on the CPU in this process. Does nothing the second time.

    Call it before Megatron is imported, which is then a second faster. It cannot be undone within
    the process.

    Args:
        hide_gpus: use the CPU although there is a GPU; torch then reports none.

    Raises:
        RuntimeError: a GPU is visible and `hide_gpus` is not set, or a GPU is already in use.
        UserError: megatron-core, or a package its import needs, is not installed.
    """
    global _enabled
    if _enabled:
        return
    if torch.cuda.is_available():
        _hide_gpus(hide_gpus)
    _forget_cuda_packages()
    _stand_in_for_torch_cuda()
    _place_on_cpu()
    _name_tensor_types_as_cuda()
    _import_megatron_without_compiling()
    _one_generator()
    _gather_unequal_shapes()
    _share_gloos_thread()
    _route_without_transformer_engine()
    _recompute_without_fp8()
    _load_distributed_adamw()
    _save_without_another_process()
    _enabled = True
    logger.info("CPU platform applied to torch %s", torch.__version__)


def _hide_gpus(insist: bool) -> None:
    """Make torch report that there is no GPU, or refuse."""
    if not insist:
        raise RuntimeError(
            "a GPU is visible, so the CPU platform is not applied; "
            "run on 'cuda', or insist with hide_gpus=True"
        )
    if torch.cuda.is_initialized():
        raise RuntimeError("this process already uses a GPU; choose the CPU platform at its start")
    _set(torch.cuda, is_available=lambda: False, device_count=lambda: 0)


def _forget_cuda_packages() -> None:
    """Keep transformer-engine and apex out: their optimizers and norms have CUDA kernels only.

    Megatron asks by `import` whether they are there (optimizer/__init__.py:11).
    """
    for name in ("transformer_engine", "apex"):
        if name in sys.modules and sys.modules[name] is not None:
            raise RuntimeError(f"{name} is imported already; apply the CPU platform before it")
        sys.modules[name] = None  # type: ignore[assignment]  # the import system's "not there"


def _set(owner: Any, **members: Any) -> None:
    """Rebind attributes of a module or class that belong to somebody else."""
    for name, value in members.items():
        setattr(owner, name, value)


# --- torch.cuda, called without checking for a GPU ------------------------------------------------


class _NoStream:
    """A stream or event on a device that runs everything in order: there is nothing to wait for.

    The MoE all-to-all dispatcher and the shared experts make some
    (transformer/moe/token_dispatcher.py:445, 871, transformer/moe/shared_experts.py:123).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        """Nothing is pending."""

    wait_event = wait = wait_stream

    def synchronize(self) -> None:
        """Nothing is pending."""

    def record(self, stream: Any = None) -> None:
        """Nothing to mark."""

    def record_event(self, event: Any = None) -> Any:
        """An event that has already happened."""
        return event if event is not None else _NoStream()

    def query(self) -> bool:
        """Everything before it has run."""
        return True


def _stand_in_for_torch_cuda() -> None:
    """Give the `torch.cuda` calls a CPU meaning.

    current_device: `device=torch.cuda.current_device()` wherever a buffer is made
    (tensor_parallel/mappings.py:91, pipeline_parallel/p2p_communication.py:313).
    synchronize: after a batch of sends (pipeline_parallel/p2p_communication.py:398), in
    timers.py:152 and in dist_checkpointing/strategies/filesystem_async.py:230.
    """
    only_stream = _NoStream()
    _set(
        torch.cuda,
        current_device=lambda: torch.device("cpu"),
        synchronize=lambda *args, **kwargs: None,
        Stream=_NoStream,
        Event=_NoStream,
        current_stream=lambda *args, **kwargs: only_stream,
        default_stream=lambda *args, **kwargs: only_stream,
    )


def _place_on_cpu() -> None:
    """Read a literal "cuda" device as the CPU, and let `.cuda()` return its object.

    `device="cuda"`: transformer/utils.py:35 (the causal mask), optimizer/optimizer.py:473, 907,
    optimizer/clip_grads.py:90, 103, pipeline_parallel/schedules.py:596, 983, 2138.
    `pin_memory`: models/common/embeddings/rope_utils.py:62; there is nothing to pin for.
    `.cuda()`: models/common/language_module/language_module.py:244 (tied embeddings),
    tensor_parallel/data.py:84.
    """

    def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(factory)
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            kwargs.pop("pin_memory", None)
            if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
                kwargs["device"] = "cpu"
            return factory(*args, **kwargs)

        return make

    for name in ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like"):
        _set(torch, **{name: on_cpu(getattr(torch, name))})

    def stay(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    _set(torch.Tensor, cuda=stay)
    _set(torch.nn.Module, cuda=stay)


def _name_tensor_types_as_cuda() -> None:
    """Let `tensor.type()` answer with the CUDA name of its type.

    The optimizers compare with 'torch.cuda.FloatTensor' and the like (optimizer/optimizer.py:671,
    690, optimizer/distrib_optimizer.py:361, 420, optimizer/clip_grads.py:167).
    """
    convert = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = convert(self, *args, **kwargs)
        if isinstance(answer, str):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    _set(torch.Tensor, type=type_name)


@contextlib.contextmanager
def _quiet_import() -> Iterator[None]:
    """Megatron warns at import that transformer-engine and apex are missing; here that is meant."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


_MEGATRON = (
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel.schedules",
)


def _import_megatron_without_compiling() -> None:
    """Import Megatron with `torch.compile` left out.

    jit.py:22 decorates the small fused functions with torch.compile. That costs more than a second
    of import, and starts a C++ compiler when one of them runs; as written they compute the same.
    """
    if "megatron.core.jit" in sys.modules:  # too late to leave it out: switch it off
        torch.compiler.set_stance("force_eager")
        return
    compiler = torch.compile

    def as_written(function: Any = None, *args: Any, **kwargs: Any) -> Any:
        return function if function is not None else as_written

    _set(torch, compile=as_written)
    try:
        with _quiet_import():
            for module in _MEGATRON:
                importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in ("megatron", "megatron.core", "triton"):
            raise
        package = "triton" if error.name == "triton" else "megatron-core"
        raise UserError(
            f"{package} is not installed, and Megatron-Core is imported here with all it needs "
            f"(from 0.18 that is triton, even on the CPU); run: pip install {package}"
        ) from None
    finally:
        _set(torch, compile=compiler)


def _one_generator() -> None:
    """Use the CPU's random generator where Megatron uses the GPU's.

    Every forward of stock attention forks the tracker, and activation recomputation saves and
    restores it, even without dropout (tensor_parallel/random.py:235, 245-280, 446-456). The
    tracker's warning that the CPU generator changed inside a fork is silenced: here that is
    intended. `torch.manual_seed` would note for every kind of device, with the stack, that it is to
    be seeded once it is there.
    """
    import megatron.core.tensor_parallel.random as megatron_random

    def get_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    def seed_all(seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    _set(torch.cuda, get_rng_state=get_state, set_rng_state=set_state, manual_seed=seed_all)
    for name in ("cuda", "xpu", "mtia"):
        if hasattr(getattr(torch, name, None), "manual_seed_all"):
            _set(getattr(torch, name), manual_seed_all=lambda seed: None)
    _set(megatron_random, _get_cuda_rng_state=get_state, _set_cuda_rng_state=set_state)
    logging.getLogger(megatron_random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


# --- gloo ----------------------------------------------------------------------------------------


def _padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """`tensor` [n, ...] padded with zeros to [length, ...]."""
    missing = tensor.new_zeros((length - tensor.shape[0], *tensor.shape[1:]))
    return torch.cat([tensor, missing])


def _gather_unequal_shapes() -> None:
    """Let all_gather and reduce_scatter take pieces of unequal length, which gloo refuses.

    MoE with expert tensor parallelism gathers the tokens routed to each rank
    (tensor_parallel/mappings.py:150, 198). Pieces are padded to the longest one.
    """
    gather, scatter = dist.all_gather, dist.reduce_scatter

    def all_gather(  # by the names that torch gives its arguments: some trainers use them
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        lengths = {output.shape[0] if output.dim() else 1 for output in tensor_list}
        if len(lengths) == 1:
            return gather(tensor_list, tensor, group=group, async_op=async_op)
        longest = max(lengths)
        padded = [tensor.new_empty((longest, *tensor.shape[1:])) for _ in tensor_list]
        gather(padded, _padded(tensor, longest), group=group)
        for output, piece in zip(tensor_list, padded, strict=True):
            output.copy_(piece[: output.shape[0]])
        return None

    def reduce_scatter(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        lengths = {piece.shape[0] if piece.dim() else 1 for piece in input_list}
        if len(lengths) == 1:
            return scatter(output, input_list, op=op, group=group, async_op=async_op)
        longest = max(lengths)
        summed = output.new_empty((longest, *output.shape[1:]))
        scatter(summed, [_padded(piece, longest) for piece in input_list], op=op, group=group)
        output.copy_(summed[: output.shape[0]])
        return None

    _set(dist, all_gather=all_gather, reduce_scatter=reduce_scatter)
    # Deprecation notes of torch about its own collectives, once a call, from inside Megatron.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")


@functools.cache
def _gloo_device(interface: str, process: int) -> Any:
    """With what all groups of a process send and receive; one that is forked has its own."""
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_default_device()


def _share_gloos_thread() -> None:
    """Let one thread serve all groups of a process.

    Megatron makes about twenty groups (parallel_state.py), and gloo a thread for each that wakes a
    hundred times a second, whether there is a message or not. Together they took a fifth of the
    processor's time in small steps.
    """
    gloo: Any = dist.ProcessGroupGloo
    make = gloo.__init__

    def share(self: Any, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> None:
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
        if args or set(kwargs) != {"timeout"} or "," in interface:  # other options than torch's own
            make(self, store, rank, size, *args, **kwargs)
            return
        options = gloo._Options()
        device = _gloo_device(interface, os.getpid())
        # One for a group's collectives: they are made in one order anyway.
        _set(options, _timeout=kwargs["timeout"], _devices=[device], _threads=1)
        make(self, store, rank, size, options)

    _set(gloo, __init__=share)


# --- Megatron without transformer-engine ---------------------------------------------------------


def _route_without_transformer_engine() -> None:
    """Let MLA be built, and the MoE router and the all-to-all dispatcher run on CPU tensors.

    transformer/moe/moe_utils.py:1192 reads `te_general_gemm`, which is never bound when
    transformer-engine is missing. transformer/moe/token_dispatcher.py:879 makes the split sizes a
    numpy array only for tensors on a GPU (transformer/moe/moe_utils.py:1093), and the all-to-all
    wants numbers. transformer/multi_latent_attention.py:54 takes transformer-engine for installed,
    as its import of stand-ins succeeds, and :143 asks for instances of one. So does 0.20's
    transformer/multi_token_prediction.py:1193, of classes that are made of stand-ins.
    """
    with _quiet_import():
        from megatron.core.transformer.moe import moe_utils, token_dispatcher

    if not hasattr(moe_utils, "te_general_gemm"):
        _set(moe_utils, te_general_gemm=None)

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    from megatron.core.post_training.modelopt.layers import Linear
    from megatron.core.transformer import multi_latent_attention

    if not isinstance(multi_latent_attention.TELinear, type):
        _set(multi_latent_attention, HAVE_TE=False, Linear=Linear)

    from megatron.core.transformer import multi_token_prediction

    if hasattr(multi_token_prediction, "is_inference_column_parallel_linear"):
        _set(multi_token_prediction, is_inference_column_parallel_linear=lambda _: False)

    for module in (moe_utils, token_dispatcher):
        if hasattr(module, "maybe_move_tensor_to_cpu"):
            _set(module, maybe_move_tensor_to_cpu=to_cpu)


def _recompute_without_fp8() -> None:
    """Read `fp8=False` as "no fp8" in selective recompute.

    tensor_parallel/random.py:636 takes everything but None for fp8 and then needs names that come
    from transformer-engine.
    """
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    build = CheckpointWithoutOutput.__init__

    @functools.wraps(build)
    def without_fp8(self: Any, fp8: Any = None, *args: Any, **kwargs: Any) -> None:
        build(self, fp8 or None, *args, **kwargs)

    _set(CheckpointWithoutOutput, __init__=without_fp8)


def _load_distributed_adamw() -> None:
    """Let a checkpoint of the distributed optimizer be loaded into torch's AdamW.

    torch keeps a `step` with each parameter's state, while the fused optimizers keep one per group.
    An optimizer that has not stepped has none, and describing it fails
    (optimizer/distrib_optimizer.py:642). On loading, :825 gives all parameters one shared tensor,
    and :942 looks `step` up among the parameter's tensors in the checkpoint, where it is not.
    fp32 parameters are written through a view of a leaf, hence no_grad.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    describe = DistributedOptimizer.state_dict
    write = DistributedOptimizer._set_main_param_and_optimizer_states

    @functools.wraps(describe)
    def describe_unstepped(self: Any) -> Any:
        if not self.optimizer.state:
            self.init_state_fn(self.optimizer, self.config)
            for state in self.optimizer.state.values():
                state["step"] = torch.tensor(0.0)
        return describe(self)

    @functools.wraps(write)
    @torch.no_grad()
    def write_with_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        group, index = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][index]]
        state["step"] = state["step"].clone()
        return write(self, model_param, {**tensors, "step": state["step"]})

    _set(
        DistributedOptimizer,
        state_dict=describe_unstepped,
        _set_main_param_and_optimizer_states=write_with_step,
    )


def _save_without_another_process() -> None:
    """Let a rank that saves a checkpoint keep the list of what it has written to itself.

    Megatron keeps it in a process that it spawns
    (dist_checkpointing/strategies/filesystem_async.py:54), for saves that go on beside the
    training; there it imports torch, in two seconds a rank. Such saves fail here: "results_queue
    should not be empty".
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    written: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for name in ("_get_write_results_queue", "get_write_results_queue"):  # the second from 0.18 on
        if hasattr(filesystem_async, name):
            _set(filesystem_async, **{name: lambda *_, **__: written})


# --- recurrent layers without fla, causal-conv1d and mamba-ssm -----------------------------------

_GATED_DELTA_NET = "megatron.core.ssm.gated_delta_net"
_MAMBA = "megatron.core.ssm.mamba_mixer"
_TENSOR_OPS = "megatron.core.inference.contexts.attention_context.triton.tensor_ops"


def load_recurrent_layers() -> None:
    """Import Megatron's GatedDeltaNet and Mamba with kernels for the CPU (linear_kernels.py).

    Megatron looks for flash-linear-attention, causal-conv1d and mamba-ssm while it imports
    ssm/gated_delta_net.py:35 and ssm/mamba_mixer.py:48, and Mamba imports triton for inference
    (ssm/mamba_mixer.py:21). These imports find stand-ins, which are gone right after them: other
    packages see what is installed. Does nothing without `enable`, and the second time.

    Raises:
        UserError: Mamba was imported before without its kernels.
    """
    if not _enabled or getattr(sys.modules.get(_MAMBA), "_on_cpu", False):
        return
    if _MAMBA in sys.modules and not sys.modules[_MAMBA].HAVE_MAMBA_SSM:
        raise UserError(
            f"{_MAMBA} was imported without mamba-ssm: build the model first, or import"
            " megatron_prefix.lab.models.build before it and call"
            " platforms.cpu.load_recurrent_layers()"
        )
    from megatron_prefix.features.recurrent.definition import chunk_gated_delta_rule, l2norm
    from megatron_prefix.lab.platforms import linear_kernels as kernels

    delta = {
        "l2norm": l2norm,
        "chunk_gated_delta_rule": chunk_gated_delta_rule,
        "causal_conv1d": kernels.causal_conv1d,
        "causal_conv1d_fn": kernels.causal_conv1d_fn,
    }
    with _stand_ins(kernels, delta), _quiet_import():
        importlib.import_module(_MAMBA)
        importlib.import_module("megatron.core.ssm.mamba_block")
        importlib.import_module(_GATED_DELTA_NET)
    for name, module in list(sys.modules.items()):  # they may have been imported before, without
        if name.startswith(_GATED_DELTA_NET):
            # All of them: an import that failed has left some names undefined.
            _set(module, **delta, HAVE_FLA=True)
    _set(sys.modules[_MAMBA], _on_cpu=True)


@contextlib.contextmanager
def _stand_ins(kernels: Any, delta: dict[str, Any]) -> Iterator[None]:
    """Modules with the packages' names and our kernels, to be found by imports for a while."""
    scan = {"mamba_split_conv1d_scan_combined": kernels.mamba_split_conv1d_scan_combined}
    contents: dict[str, dict[str, Any]] = {
        "fla.modules.l2norm": delta,
        "fla.modules.convolution": delta,
        "fla.ops.gated_delta_rule": delta,
        "causal_conv1d": {**delta, "causal_conv1d_update": None},
        "causal_conv1d.causal_conv1d_varlen": {"causal_conv1d_varlen_states": None},
        "mamba_ssm.ops.triton.selective_state_update": {"selective_state_update": None},
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": kernels.RMSNorm},
        "mamba_ssm.ops.triton.ssd_combined": {**scan, "mamba_chunk_scan_combined": None},
    }
    names = ("tensor_get_slice_after", "tensor_masked_update", "tensor_merge")
    if importlib.util.find_spec("triton") is None:
        contents[_TENSOR_OPS] = dict.fromkeys(names)
    made: dict[str, types.ModuleType] = {}
    for name, content in contents.items():
        parts = [name] if name.startswith("megatron") else name.split(".")
        for depth in range(1, len(parts) + 1):
            whole = ".".join(parts[:depth])
            made.setdefault(whole, types.ModuleType(whole))
        vars(made[name]).update(content)
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
