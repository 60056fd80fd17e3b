"""The sparse attention of slime's and miles' own sources on a CPU, in fp64.

Its kernels are their definitions (lab/platforms/sparse_kernels.py), and transformer-engine's linear
layers plain ones. What computes in fp32 or bf16 does so in fp64.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import itertools
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.models.gpt import gpt_model
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from benchmarks.trainers.te_core import TEDotProductAttention
from megatron_prefix.lab.platforms import sparse_kernels
from megatron_prefix.tree.cp_layout import Slices
from tests.harness import queues
from tests.harness.sparse import HEADS, TOPK, WIDTH
from tests.oracle import trainer


class _Plain(nn.Linear):
    """The same on every tensor-parallel rank."""

    def __init__(self, inputs: int, outputs: int, config: Any) -> None:
        super().__init__(inputs, outputs, bias=False)
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


class _Normed(ColumnParallelLinear):
    """A norm of the input is in it, as in transformer-engine's."""

    def __init__(self, inputs: int, outputs: int, config: Any) -> None:
        super().__init__(
            inputs, outputs, config=config, init_method=config.init_method, bias=False,
            gather_output=False,
        )  # fmt: skip
        self.layer_norm_weight = nn.Parameter(torch.ones(inputs, dtype=self.weight.dtype))
        vars(self.layer_norm_weight)["sequence_parallel"] = config.sequence_parallel

    def forward(self, x: Tensor) -> Any:
        return super().forward(F.rms_norm(x, x.shape[-1:], self.layer_norm_weight))


class Duplicated(_Plain):
    """As transformer-engine's linear layer, on every tensor-parallel rank."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **_: Any) -> None:
        super().__init__(input_size, output_size, config)


class Normed(_Normed):
    """As its column-parallel one with a norm."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **_: Any) -> None:
        super().__init__(input_size, output_size, config)


class Norm(nn.LayerNorm):
    """As its norm."""

    def __init__(self, hidden_size: int, config: Any, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            vars(parameter)["sequence_parallel"] = config.sequence_parallel


def _uncast(stock: Any) -> Any:
    return lambda self: self if self.is_floating_point() else stock(self)


class _Linear:
    """As Megatron's linear layer of routers, which has a dtype of its own."""

    @staticmethod
    def apply(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
        return F.linear(x, weight)


def load(trainer: str) -> Any:
    """A trainer's module, whose folder is on the path."""
    for name in ("tilelang", "tilelang.language", "apex", "apex.transformer"):
        sys.modules.setdefault(name, mock.MagicMock())
    functional = types.ModuleType("apex.transformer.functional")
    rope = sparse_kernels.fused_apply_rotary_pos_emb_thd
    vars(functional)["fused_apply_rotary_pos_emb_thd"] = rope
    sys.modules["apex.transformer.functional"] = functional
    folder = f"{trainer}_plugins.models.glm5"
    found = importlib.import_module(f"{folder}.glm5")
    vars(found).update(TELinear=Duplicated, WeightLinearFunction=_Linear)
    indexer = importlib.import_module(f"{folder}.ops.indexer")
    indexer.indexer_fwd_interface = lambda *inputs, clean_logits: sparse_kernels.indexer_scores(
        *inputs
    )
    kernels, definition = (
        importlib.import_module(f"{folder}.ops.sparse_mla"),
        sparse_kernels.SparseMLA,
    )
    kernels.sparse_mla_fwd_interface = lambda q, kv, indices, sm_scale: definition.run(
        q, kv, indices, sm_scale
    )
    kernels.sparse_mla_bwd = lambda q, kv, out, grad, indices, lse, sm_scale: definition.gradients(
        q, kv, indices, sm_scale, grad
    )
    return found


def spec_of(module: Any) -> ModuleSpec:
    """Its self-attention, as `get_glm5_spec` has it."""
    parts = module.DSASelfAttentionSubmodules(
        linear_q_down_proj=Duplicated, linear_q_up_proj=Normed, linear_kv_down_proj=Duplicated,
        linear_kv_up_proj=Normed, core_attention=TEDotProductAttention,
        linear_proj=RowParallelLinear, q_layernorm=IdentityOp, kv_layernorm=IdentityOp,
        linear_v_up_proj=IdentityOp, wq_b=Duplicated, wk=Duplicated, k_norm=Norm,
        weights_proj=Duplicated,
    )  # fmt: skip
    return ModuleSpec(module.DSAMLASelfAttention, {"attn_mask_type": AttnMaskType.causal}, parts)


def parts(name: str, args: Any) -> Slices:
    """How a trainer cuts calls in a layout, by its option, which is set."""
    args.allgather_cp = "dsa" in name
    return Slices.CONTIGUOUS if args.allgather_cp else Slices.ZIGZAG


def in_layout(trainer: str, name: str) -> contextlib.AbstractContextManager[None]:
    """Models of a layout whose name has "dsa" have a trainer's own layers: in pairs, of which
    the first chooses."""
    return real_sparse(trainer, 2, 1) if "dsa" in name else contextlib.nullcontext()


def choices(batch: Any, layer: int) -> Tensor:
    """What a sampler's indexer may have chosen in a microbatch, as places in its pack: copies of a
    prompt have the same, and last positions without loss none."""
    entry = torch.full((batch["tokens"].numel(), TOPK), -1, dtype=torch.int32)
    seeds = [[layer, *numbers] for numbers in batch["routes"][0].flatten(1).tolist()]
    for start, stop in itertools.pairwise(batch["ends_padded"].tolist()):
        for place in range(start, stop):
            if batch["loss_mask"][0, place] or place + 1 < stop:  # of a last one miles has none
                drawn = np.random.default_rng(seeds[place]).permutation(place - start + 1)[:TOPK]
                entry[place, : len(drawn)] = torch.from_numpy(drawn + start)
    return entry


@contextlib.contextmanager
def replaying() -> Iterator[None]:
    """Models that are built meanwhile have miles' layers, whose indexers replay such choices."""
    replays = importlib.import_module("miles.utils.replay_base")
    manager = replays.indexer_replay_manager

    def fill(self: trainer.Trainer) -> None:
        for module in self._modules():
            if (queue := getattr(module, "indexer_replay", None)) is not None:
                queue.clear()
                entries = [choices(batch, module.layer_number) for batch in self.found]
                queue.top_indices_list += entries

    stages = staticmethod(lambda stage: setattr(manager, "stage", stage))
    with (
        real_sparse("miles", 2, 1), mock.patch.object(manager, "enabled", True),
        mock.patch.object(trainer.Trainer, "_fill_queues", fill),
        mock.patch.object(queues.Entries, "set_stages", stages),
    ):  # fmt: skip
        yield


@contextlib.contextmanager
def real_sparse(trainer: str, every: int = 1, first: int = 0) -> Iterator[None]:
    """GPTModels that are built meanwhile have a trainer's own layers, which choose few keys."""
    module, stock = load(trainer), gpt_model.GPTModel

    def with_own(config: Any, block: Any, **options: Any) -> Any:
        sizes = {"index_num_attention_heads": HEADS, "index_head_dim": WIDTH}
        sharing = {"index_topk_freq": every, "index_skip_topk_offset": first}
        vars(config).update(sizes | sharing | {"indexer_rope_interleave": True})
        block.layer_specs = [copy.deepcopy(layer) for layer in block.layer_specs]
        for layer in block.layer_specs:
            layer.submodules.self_attention = spec_of(module)
        model = stock(config, block, **options)
        for layer in model.decoder.layers:
            layer.self_attention.index_topk = TOPK
        return model

    casts = {name: _uncast(getattr(Tensor, name)) for name in ("float", "bfloat16")}
    with mock.patch.object(gpt_model, "GPTModel", with_own), mock.patch.multiple(Tensor, **casts):
        yield
