"""What pretrain_gpt asks of a GPU, on the CPU; and the command line of a small model for it."""

import contextlib
import functools
import importlib
import sys
from types import SimpleNamespace

import torch

from tests.core.trainers import stand_ins, worker

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
