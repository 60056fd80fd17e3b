"""What a part of a trainer's code changes: random states, exchanges with other ranks, and values;
and what a loss reads of a model.

Each function reads something before and after that part runs; what differs was changed by it.  The
host waits for the device, so this is for steps that are watched (first_step.py).

A loss may read only the output of a model call, or also what was computed inside: a hook that keeps
a layer's activations for the loss sees whole rollouts with the stock schedule, and segments with
ours.  Autograd's graph tells (`CallGraph`): nodes are numbered in the order in which a thread makes
them, so those of a model call have numbers between two that are taken around it.
"""

from __future__ import annotations

import collections
import hashlib
import logging
import random
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import (
    _pytree as pytree,  # torch's own; torch.utils.pytree is not public before 2.9
)

from megatron_prefix.device.modules import modules_of
from megatron_prefix.run.read import random_numbers
from megatron_prefix.run.read.model_walk import members_of

logger = logging.getLogger(__name__)

SAMPLED = 1 << 16
"""Elements of a tensor that are compared, evenly spread; of smaller ones all are."""
ITEMS = 64
"""Items of a list that are compared, from its end."""
NODES = 10_000
"""Nodes of a loss that are looked at; what it computes itself has some tens."""


def random_states(device: torch.device) -> dict[str, bytes]:
    """Digests of the generators that a trainer draws from, by name."""
    states = random_numbers.torch_states(device)
    return {name: _digest(state) for name, state in states.items()} | other_states({})


def other_states(held: Mapping[str, Any]) -> dict[str, bytes]:
    """Digests of generators that are not torch's own, and of `held` ones."""
    states: dict[str, Any] = {
        "Python's random": random.getstate(),
        "NumPy": np.random.get_state(),  # the global one, which trainers use
    }
    states |= {name: _state_of(generator) for name, generator in held.items()}
    return {name: _digest(state) for name, state in states.items()}


def held_generators(models: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Generators that are attributes of modules, by names for people."""
    kinds = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
    for number, module in enumerate(modules_of(*models)):
        for name, value in vars(module).items():
            if isinstance(value, kinds):
                yield f"{name} of {type(module).__name__} {number}", value


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state()


def exchanges(groups: Iterable[Any]) -> list[int]:
    """How many collectives every group has begun."""
    # Private: nothing public counts them without standing between the trainer and torch.
    return [group._get_sequence_number_for_group() for group in groups]


def groups_beyond(inside: set[int], others: Iterable[int]) -> list[Any]:
    """This rank's process groups that hold ranks of other pipelines.

    Args:
        others: ranks that stand in its place in other pipelines.
    """
    ranks = {*others} - inside
    if not ranks:
        return []
    # Private: torch has no public list of its groups.
    groups = list(dist.distributed_c10d._world.pg_map)
    return [group for group in groups if ranks.intersection(dist.get_process_group_ranks(group))]


class Values:
    """Values in some tensors, arrays, lists and dicts, as they are now.

    Args:
        holders: of values, by a name for people.
    """

    def __init__(self, holders: Iterable[tuple[str, Any]]) -> None:
        self._held = [(name, holder, _digest(holder)) for name, holder in holders]

    def changed(self) -> list[tuple[str, Any]]:
        return [(name, tensor) for name, tensor, before in self._held if _digest(tensor) != before]


def _digest(value: Any) -> bytes:
    """Of what a value holds: its elements, or which objects; what cannot be read stays the same."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        for part in _parts_of(value, 2):
            digest.update(part)
    except Exception:  # sparse tensors, odd classes: looking must not end a step
        logger.debug("a %s cannot be compared", type(value).__name__, exc_info=True)
        return b""
    return digest.digest()


def _parts_of(value: Any, depth: int) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        yield from _of_tensor(value)
    elif isinstance(value, np.ndarray):
        flat = value.reshape(-1)
        yield repr((value.shape, value.dtype.str)).encode()
        yield np.ascontiguousarray(flat[:: 1 + flat.size // SAMPLED]).tobytes()
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        yield repr(value).encode()
    elif isinstance(value, list | tuple | collections.deque):
        yield repr((len(value), depth > 0)).encode()
        for item in list(value)[-ITEMS:] if depth else ():
            yield from _parts_of(item, depth - 1)
    elif isinstance(value, dict):
        for key in list(value)[:ITEMS] if depth else ():
            yield repr(key).encode()
            yield from _parts_of(value[key], depth - 1)
    elif isinstance(value, set | frozenset):
        yield repr((len(value), sum(map(hash, value)))).encode()
    else:
        yield repr((id(value), type(value).__qualname__)).encode()
        yield from _of_object(value, depth)


def _of_object(value: Any, depth: int) -> Iterator[bytes]:
    kinds = (kind.__module__.partition(".")[0] for kind in type(value).__mro__)
    if not depth or isinstance(value, type | types.ModuleType) or "torch" in kinds:
        return
    yield from _parts_of(members_of(value), depth)


def _of_tensor(tensor: Tensor) -> Iterator[bytes]:
    yield repr((tuple(tensor.shape) if not tensor.is_nested else None, tensor.dtype)).encode()
    flat = (tensor.values() if tensor.is_nested else tensor).detach().reshape(-1)
    sample = flat[:: 1 + flat.numel() // SAMPLED].contiguous().cpu()
    yield sample.view(torch.uint8).numpy().tobytes() if sample.numel() else b""


class CallGraph(NamedTuple):
    """The nodes of a model call.

    Attributes:
        begin, end: numbers of its nodes, from the first to behind the last.
        outputs: nodes of its output's tensors, which a loss may read.
    """

    begin: int
    end: int
    outputs: tuple[Any, ...]

    @classmethod
    def of(cls, begin: int, output: Any) -> CallGraph:
        """The call that has just returned this, and before which `next_number` was `begin`."""
        leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        # A write to a view, as trainers divide logits, hangs the graph on to what it is a view of.
        bases = [leaf._base for leaf in leaves if leaf._base is not None]
        nodes = (tensor.grad_fn for tensor in (*leaves, *bases))
        return cls(begin, next_number(), tuple(node for node in nodes if node is not None))

    def is_read_inside(self, loss: Tensor) -> bool:
        todo, seen = [loss.grad_fn], set(self.outputs)
        while todo and len(seen) < NODES:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if self.begin <= _node_number(node) < self.end:
                return True
            todo += [following for following, _ in node.next_functions]
        return False


def next_number() -> int:
    """The number of a node that this thread makes now."""
    with torch.inference_mode(False), torch.enable_grad():
        return _node_number(torch.ones((), requires_grad=True).clone().grad_fn)


def _node_number(node: Any) -> int:
    # Private: nothing public tells when a node was made.
    return int(node._sequence_nr())
