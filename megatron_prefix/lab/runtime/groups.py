"""Process groups: creates and destroys torch.distributed's and Megatron's."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import sys
import threading
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from megatron_prefix.errors import UserError, shown
from megatron_prefix.lab import platforms
from megatron_prefix.lab.platforms import Platform
from megatron_prefix.lab.runtime import hosts
from megatron_prefix.lab.runtime.layout import Layout

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

MESSAGE_TIMEOUT_MINUTES = 10.0
"""How long a message may take: longer than the longest step of one rank for which others wait."""

JOINING_MINUTES = 10.0
"""How long ranks wait, at least, for those of other nodes to start."""

RENDEZVOUS = "MEGATRON_PREFIX_RENDEZVOUS"
"""Environment variable: the file through which ranks that `launch` started find one another."""

LEAVING_S = 15.0
"""Seconds in which process groups are destroyed."""
STAYING = (
    "process groups were not left in %.0f s: another rank has not answered their last message; this"
    " rank's work is done, and it ends without them"
)
_stays = False  # groups that this process could not leave
_leaving: list[threading.Thread] = []  # what still tries to

_JOINED = itertools.count()  # how often this process has joined a job under torchrun


@dataclass(frozen=True)
class World:
    """This process as one rank of the job."""

    layout: Layout
    platform: Platform
    device: torch.device
    rank: int
    world_size: int


def env_world_size() -> int | None:
    """The number of ranks this process was started among (torchrun, `launch`), None if alone.

    Raises:
        UserError: the environment says so in part, or what it says cannot be.
    """
    if not {"RANK", "WORLD_SIZE"} & os.environ.keys():
        return None
    wanted = ["RANK", "WORLD_SIZE"]
    wanted += [] if RENDEZVOUS in os.environ else ["MASTER_ADDR", "MASTER_PORT"]
    missing = [name for name in wanted if not os.environ.get(name)]
    if missing:
        raise UserError(
            f"the environment has RANK or WORLD_SIZE, but no {' and no '.join(missing)}; start with"
            " torchrun, or unset RANK and WORLD_SIZE"
        )
    rank, world_size = _whole("RANK"), _whole("WORLD_SIZE")
    if not rank < world_size:
        raise UserError(
            f"the environment has RANK {rank} and WORLD_SIZE {world_size}; ranks count from 0 to"
            f" {world_size - 1}: start with torchrun"
        )
    if "LOCAL_RANK" in os.environ:
        _whole("LOCAL_RANK")
    if "MASTER_PORT" in wanted:
        _whole("MASTER_PORT")
    return world_size


def first_rank() -> bool:
    """Whether this process speaks for all that were started with it (torchrun)."""
    return os.environ.get("RANK", "0") == "0"


def _whole(name: str) -> int:
    """A variable of the environment as a number."""
    text = os.environ[name]
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UserError(
            f"the environment has {name} {shown(text)}, which is not an integer from 0; start with"
            " torchrun, or unset RANK and WORLD_SIZE"
        )
    return int(text)


def initialize(
    layout: Layout,
    device: str = "cpu",
    seed: int = 1234,
    message_timeout_minutes: float = MESSAGE_TIMEOUT_MINUTES,
) -> World:
    """Join the job: torch.distributed, Megatron's process groups, and its random generators.

    Under torchrun the environment says where the ranks meet; ranks started by `launch` meet in a
    file; a process alone needs neither. Every rank of the job calls this and waits for the others.

    Args:
        layout: must have as many ranks as the world.
        device: "cpu" or "cuda".
        seed: of Megatron's random generators (dropout); weights are seeded by the model builder.
        message_timeout_minutes: how long a rank waits for another before the job fails; for those
            that have not started yet under torchrun, at least JOINING_MINUTES.

    Raises:
        UserError: the world has another size than `layout`, `device` cannot be had, or ranks of
            torchrun have not come.
        RuntimeError: a process group exists already.
    """
    world_size = env_world_size() or 1
    if world_size != layout.world_size:
        raise UserError(
            f"the layout has {layout.world_size} ranks but the world has {world_size}; "
            f"start {layout.world_size} ranks (torchrun --nproc-per-node) or change the layout"
        )
    # Megatron relies on kernels being issued in order where communication overlaps computation.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    platform = platforms.select(device)
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if torch.distributed.is_initialized():
        raise RuntimeError("a process group exists already; call runtime.shutdown() first")
    rank = int(os.environ.get("RANK", "0")) if world_size > 1 else 0
    local = platform.device(int(os.environ.get("LOCAL_RANK", str(rank))))
    if local.type == "cuda":
        torch.cuda.set_device(local)
        # Megatron's timers meet in a barrier every step; the device is the one set above.
        warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under current")
    _join(platform.backend, rank, world_size, timedelta(minutes=message_timeout_minutes))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        distributed_timeout_minutes=message_timeout_minutes,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    logger.info("rank %d of %d on %s, %s", rank, world_size, local, layout)
    return World(layout, platform, local, rank, world_size)


def _join(backend: str, rank: int, world_size: int, timeout: timedelta) -> None:
    """Make the default process group."""
    import torch.distributed as dist

    started_here = RENDEZVOUS in os.environ or env_world_size() is None
    if started_here:  # one host: gloo need not look up its name, nor leave it
        for _, interface in socket.if_nameindex():
            if interface in ("lo", "lo0"):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if RENDEZVOUS in os.environ:
        store: dist.Store = dist.FileStore(os.environ[RENDEZVOUS], world_size)
    elif not started_here:
        # Keys of its own each time: torchrun keeps its store while a job joins, leaves and joins.
        shared, rank, world_size = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(f"{RENDEZVOUS}/{next(_JOINED)}", shared)
        hosts.meet(store, rank, world_size, max(timeout, timedelta(minutes=JOINING_MINUTES)))
    else:
        store = dist.HashStore()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def shutdown(failed: bool = False) -> None:
    """Leave the job: destroy Megatron's groups and the default one, if there are any.

    Ranks do not wait for one another, so a rank may leave after a failure. What no other rank will
    ever answer may keep a group from being destroyed; after LEAVING_S it is left to the process's
    end, see `ends_with_groups`.

    Args:
        failed: an exception ends this rank. NCCL's groups then stay until the process ends: their
            last message may be one that no other rank will ever answer, and destroying them waits
            for it.
    """
    import torch

    global _stays
    if not torch.distributed.is_initialized() or _leaving:
        return
    _stays = failed and torch.distributed.get_backend() == "nccl"
    if _stays:
        return
    from megatron.core import parallel_state

    forget_logged_losses()
    parallel_state.destroy_model_parallel()
    # It leaves some groups behind. A process that is forked now would inherit them without their
    # threads, and wait for these when it makes its own.
    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, torch.distributed.ProcessGroup):
            setattr(parallel_state, name, None)
    _destroy()


def _destroy() -> None:
    """Destroys all process groups, on a thread that nobody waits for longer than LEAVING_S."""
    import torch

    global _stays
    errors: list[BaseException] = []
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def destroy() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # each thread has its own
            torch.distributed.destroy_process_group()
        except BaseException as error:  # noqa: BLE001  # raised below
            errors.append(error)

    thread = threading.Thread(target=destroy, name="leaving", daemon=True)
    thread.start()
    thread.join(LEAVING_S)
    if thread.is_alive():
        _stays = True
        _leaving.append(thread)
        logger.warning(STAYING, LEAVING_S)
    elif errors:
        raise errors[0]


def ends_with_groups() -> bool:
    """Whether this process has groups that it could not leave: an interpreter that ends in order
    would wait for them, see `end`."""
    return _stays


def end(code: int) -> NoReturn:
    """Ends this process at once, when all that it had to say has been written."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def forget_logged_losses() -> None:
    """Empties Megatron's log, before another model."""
    from megatron_prefix.megatron.logged_losses import log_of_losses

    log_of_losses().clear()
