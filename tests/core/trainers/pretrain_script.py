"""The smallest script on megatron.training's own loop: for its wheel, which has no pretrain_gpt.py.

Takes Megatron-LM's arguments; from 0.19 on.
"""

from functools import partial

import torch
from megatron.core import mpu, utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


def datasets(sizes, vp_stage=None):
    """Megatron's dataset of tokens, and no others."""
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed, sequence_length=args.seq_length, blend=(args.data_path, None),
        split=args.split, path_to_cache=args.data_cache_path, tokenizer=build_tokenizer(args),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        create_attention_mask=False, inter_document_masking=args.dataloader_inter_document_masking,
    )  # fmt: skip
    return BlendedMegatronDatasetBuilder(
        GPTDataset, sizes, lambda: mpu.get_tensor_model_parallel_rank() == 0, config
    ).build()


def batch_of(iterator):
    """A microbatch on every rank of its tensor-parallel group."""
    args, rank = get_args(), mpu.get_tensor_model_parallel_rank()
    found = {
        "attention_mask": None, "cu_seqlens": None, "cu_seqlens_padded": None, "max_seqlen": None,
        "local_cp_size": None, **(next(iterator) if rank == 0 else {}),
    }  # fmt: skip
    found = utils.get_batch_on_this_tp_rank(
        found, has_cu_seqlens=args.dataloader_inter_document_masking, is_hybrid_cp=False,
        create_attention_mask_in_dataloader=False, cp_size=1, tp_rank=rank,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        micro_batch_size=args.micro_batch_size, seq_length=args.seq_length,
        mtp_on_this_rank=bool(args.mtp_num_layers) and mpu.is_pipeline_last_stage(),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )  # fmt: skip
    return utils.flatten_batch_for_packed_sequences(found)


def loss(mask, output):
    """Sum and number of the losses of trained tokens."""
    total, num = (output.flatten() * mask.flatten()).sum(), mask.sum().to(torch.int)
    return total, num, {"lm loss": torch.stack([total.detach(), num])}


def forward_step(iterator, model):
    """A microbatch through the model."""
    batch = batch_of(iterator)
    packing = None
    if (ends := batch["cu_seqlens"]) is not None:
        ends, most = ends.flatten(), int(batch["max_seqlen"])
        packing = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends,
            max_seqlen_q=most, max_seqlen_kv=most,
        )  # fmt: skip
    output = model(
        batch["tokens"], batch["position_ids"], None, labels=batch["labels"],
        loss_mask=batch["loss_mask"], packed_seq_params=packing,
    )  # fmt: skip
    return output, partial(loss, batch["loss_mask"])


if __name__ == "__main__":
    args = parse_and_validate_args(args_defaults={})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    datasets.is_distributed = True
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
