"""Megatron-LM's pretrain_gpt, its whole training loop on mock data whose samples begin alike.

"thd" in a layout's name: two samples are packed into one row; "sharded": the distributed
optimizer, with both overlaps.
"""

import contextlib
import functools
import sys

import torch

from megatron_prefix.lab import runtime
from tests.core.trainers import worker
from tests.core.trainers.both import Both, config_of
from tests.core.trainers.cpu_training import ARGUMENTS, LENGTH, VOCAB, leave_out_gpus, run_on_cpu


def take_sequence_parallelism():
    """Lets layers without transformer-engine have it: Megatron's own norm there refuses it."""
    from megatron.core.models import backends
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer import transformer_block

    from megatron_prefix.lab.models.local import RMSNorm

    backends.LNImpl = backends.WrappedTorchNorm = RMSNorm
    gpt_layer_specs.LNImpl = transformer_block.LayerNormImpl = RMSNorm


def train_on_cpu(both):
    """Puts `both` where the schedule was, and leaves out what a CPU lacks."""
    from megatron.training import training

    training.get_forward_backward_func = both
    leave_out_gpus()


def begin_alike(*, packed):
    """Makes the first three quarters of all samples of the mock data the same."""
    from megatron.core.datasets.gpt_dataset import MockGPTDataset

    stock = MockGPTDataset.__getitem__
    parts = 2 if packed else 1
    size = LENGTH // parts
    common = size * 3 // 4

    def item(self, index):
        found = dict(stock(self, index))
        draw = torch.Generator().manual_seed(index or 0)
        tokens = torch.randint(VOCAB, (parts, size + 1), generator=draw)
        tokens[:, :common] = torch.arange(common)
        found["tokens"], found["labels"] = tokens[:, :-1].flatten(), tokens[:, 1:].flatten()
        if packed:
            found["position_ids"] = torch.arange(size).repeat(parts)
            found["cu_seqlens"] = torch.arange(0, LENGTH + 1, size, dtype=torch.int32)
            found["max_seqlen"] = torch.tensor(size, dtype=torch.int32)
        return found

    MockGPTDataset.__getitem__ = item


def arguments(name):
    """pretrain_gpt's command line for a layout."""
    layout = worker.layout_of(name)
    found = [
        *ARGUMENTS.split(),
        "--tensor-model-parallel-size", str(layout.tp),
        "--pipeline-model-parallel-size", str(layout.pp),
        "--context-parallel-size", str(layout.cp),
        "--micro-batch-size", "1" if "thd" in name else "2",
    ]  # fmt: skip
    if "sharded" in name:
        found += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    return found


def pretrain(script):
    """What pretrain_gpt does as a program."""
    data, kind = script.train_valid_test_datasets_provider, script.ModelType.encoder_or_decoder
    data.is_distributed = True
    if hasattr(script, "gpt_config_from_args"):  # 0.19
        args = script.parse_and_validate_args(args_defaults={})
        config = script.pretrain_cfg_container_from_args(args, script.gpt_config_from_args(args))
        script.pretrain(config, data, kind, script.forward_step)
        return
    model = functools.partial(script.model_provider, script.gpt_builder)
    script.pretrain(data, model, kind, script.forward_step)


def steps(name):
    """Two iterations, on one rank."""
    import pretrain_gpt

    runtime.initialize(worker.layout_of(name))
    both = Both(config_of(name))
    train_on_cpu(both)
    begin_alike(packed="thd" in name)
    sys.argv = ["pretrain_gpt.py", *arguments(name)]
    with contextlib.redirect_stdout(sys.stderr):
        pretrain(pretrain_gpt)
    return both.steps


if __name__ == "__main__":
    run_on_cpu()
    worker.main(["pretrain_gpt"], steps)
