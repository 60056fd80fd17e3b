"""LoRA on Megatron's linear layers, as adapters of trainers are made: a frozen base, and beside a
linear layer two narrow ones that are its tensor-parallel counterparts.

"LoRA: Low-Rank Adaptation of Large Language Models", section 4.1. The same parts as in
Megatron-Bridge (`megatron.bridge.peft.utils.ParallelLinearAdapter`), which needs
transformer-engine to be imported.
"""

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import nn

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
RANK = 4


class Adapted(nn.Module):
    """A linear layer of Megatron's, frozen, plus a product of two narrow ones."""

    def __init__(self, to_wrap, name):
        super().__init__()
        self.to_wrap = to_wrap
        config, spread = to_wrap.config, isinstance(to_wrap, ColumnParallelLinear)
        draw = torch.Generator().manual_seed(sum(map(ord, name)))
        options = {
            "config": config, "bias": False, "skip_bias_add": True,
            "init_method": lambda weight: nn.init.normal_(weight, std=0.1, generator=draw),
        }  # fmt: skip
        if spread:  # x is whole on every rank, the output is cut
            self.linear_in = ColumnParallelLinear(
                to_wrap.input_size, RANK, gather_output=True, **options
            )
        else:
            self.linear_in = RowParallelLinear(
                to_wrap.input_size, RANK, input_is_parallel=True, **options
            )
        self.linear_out = ColumnParallelLinear(
            RANK, to_wrap.output_size, gather_output=not spread, **options
        )

    def forward(self, x, *args, **kwargs):
        output, bias = self.to_wrap(x, *args, **kwargs)
        narrow, _ = self.linear_in(x)
        wide, _ = self.linear_out(narrow)
        return output + wide, bias


def adapt(model, targets=TARGETS, layers=None):
    """Freezes a GPTModel (unwrapped, not in DDP yet) and puts adapters beside its linear layers.

    Args:
        targets: names of linear layers.
        layers: numbers of layers from 0 (None: all of the chunk).
    """
    model.requires_grad_(False)
    dtype = model.config.params_dtype
    for number, layer in enumerate(model.decoder.layers):
        if layers is not None and layer.layer_number - 1 not in layers:
            continue
        for module in list(layer.modules()):
            for name, child in list(module.named_children()):
                if name in targets:
                    setattr(module, name, Adapted(child, f"{number}.{name}").to(dtype))
