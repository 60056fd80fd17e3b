"""Megatron-LM's pretrain_gpt, its whole training loop on mock data whose samples begin alike.

"thd" in a layout's name: two samples are packed into one row; "sharded": the distributed
optimizer, with both overlaps.
"""

import contextlib
import functools
import importlib
import sys
from types import SimpleNamespace

import torch

from megatron_prefix.lab import runtime
from tests.core.trainers import stand_ins, worker
from tests.core.trainers.both import Both, config_of

LENGTH, VOCAB = 64, 127
ARGUMENTS = f"""--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128
    --seq-length {LENGTH} --max-position-embeddings {LENGTH} --position-embedding-type rope
    --vocab-size {VOCAB} --tokenizer-type NullTokenizer --mock-data --global-batch-size 8
    --train-iters 2 --eval-iters 0 --eval-interval 100 --log-interval 1 --lr 1e-3 --num-workers 0
    --attention-dropout 0 --hidden-dropout 0 --transformer-impl local --use-cpu-initialization
    --no-masked-softmax-fusion --no-bias-dropout-fusion --no-bias-gelu-fusion --no-rope-fusion
    --no-gradient-accumulation-fusion --no-persist-layer-norm --distributed-backend gloo
    --no-create-attention-mask-in-dataloader"""


def run_on_cpu():
    """What megatron.training asks of torch.cuda beyond what lab/platforms/cpu.py answers."""
    from megatron.core.models import backends
    from megatron.core.models.gpt import gpt_layer_specs

    from megatron_prefix.lab.models.local import LocalAttention

    try:
        importlib.import_module("triton")
    except ModuleNotFoundError:  # megatron.training imports kernels that it does not use here
        worker.StandIns("megatron.core.transformer.custom_layers.batch_invariant_kernels")
    stand_ins.where_missing("six")  # core_v0.16.1's tokenizer of BERT, which is only imported
    properties = SimpleNamespace(major=9, minor=0, total_memory=1 << 34, name="cpu")
    for name in "memory_allocated max_memory_allocated memory_reserved max_memory_reserved".split():
        setattr(torch.cuda, name, lambda *a, **k: 0)
    torch.cuda.stream = lambda *a, **k: contextlib.nullcontext()
    torch.cuda.memory_stats = lambda *a, **k: {}
    torch.cuda.empty_cache = torch.cuda.set_device = lambda *a, **k: None
    torch.cuda.get_device_properties = lambda *a, **k: properties
    torch.cuda.device_count = lambda: 8
    torch.cuda.IntTensor, torch.cuda.FloatTensor = torch.IntTensor, torch.FloatTensor
    torch.cuda.LongTensor, torch.cuda.DoubleTensor = torch.LongTensor, torch.DoubleTensor
    # Stock attention that takes packed samples and context parallelism.
    gpt_layer_specs.DotProductAttention = backends.DotProductAttention = LocalAttention


def take_sequence_parallelism():
    """Lets layers without transformer-engine have it: Megatron's own norm there refuses it."""
    from megatron.core.models import backends
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer import transformer_block

    from megatron_prefix.lab.models.local import RMSNorm

    backends.LNImpl = backends.WrappedTorchNorm = RMSNorm
    gpt_layer_specs.LNImpl = transformer_block.LayerNormImpl = RMSNorm


def leave_out_gpus():
    """Leaves out of megatron.training what needs a GPU or a compiler."""
    from megatron.core import utils
    from megatron.training import initialize, training

    # pretrain_gpt of 0.16.1 hands on the cumulated lengths as [1, n], which rotary embeddings
    # without transformer-engine do not take. It may have been imported already.
    name = "get_thd_batch_on_this_cp_rank"
    if stock := getattr(utils, name, None):

        def flat(batch, ends, *rest):
            return stock(batch, ends.flatten(), *rest)

        for module in (utils, sys.modules.get("pretrain_gpt")):
            if hasattr(module, name):
                setattr(module, name, flat)
    training.initialize_megatron = functools.partial(
        training.initialize_megatron, allow_no_cuda=True
    )
    initialize._compile_dependencies = lambda: None
    training.set_jit_fusion_options = lambda *a, **k: None
    training.report_theoretical_memory = lambda *a, **k: None


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
