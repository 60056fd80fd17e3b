"""[pure] NeMo-RL, with its Megatron policy worker."""

from __future__ import annotations

from typing import Any

from megatron_prefix.refusals.table import MULTIMODAL, NEMO_MTP
from megatron_prefix.trainers.trainer import Trainer


def samples(microbatch: Any) -> list[tuple[Any, Any]] | None:
    """Tokens and trained positions of a ProcessedMicrobatch; see `Samples` in run/read/samples.py.

    A position predicts the next token, so it carries loss where that one's `token_mask` says so;
    `sample_mask` also leaves out whole samples.  The last position counts, too: reward models look
    at it.
    """
    data = getattr(microbatch, "data_dict", None)
    if data is None or "input_ids" not in data or "token_mask" not in data:
        return None
    ids, mask = data["input_ids"], data["token_mask"]
    if ids.dim() != 2 or mask.shape != ids.shape:
        return None
    flags = (mask != 0).roll(-1, 1)
    lengths = (
        data["input_lengths"].tolist() if "input_lengths" in data else [ids.shape[1]] * len(ids)
    )
    for row, length in zip(flags, lengths, strict=True):
        row[length - 1] = True
    rows = zip(ids, flags, lengths, strict=True)
    return [(tokens[:length], row[:length]) for tokens, row, length in rows]


TRAINER = Trainer(
    name="NeMo-RL",
    module="nemo_rl",
    package="nemo-rl",
    tried=("7ea279abf",),
    on="`import megatron_prefix.auto.on_import` at the head of nemo_rl/models/megatron/train.py: no"
    " option of its configuration only imports a module",
    loss="those whose next token the microbatch's token_mask has, and each sample's last one, in"
    " updates; all in passes for log-probs, and where tokens of microbatch and model call differ",
    together="policy.sequence_packing.enabled=false and policy.dynamic_batching.enabled=false, and"
    " whole groups per rank: grpo.num_prompts_per_step a multiple of the data-parallel size; either"
    " of the two deals out by length",
    refused=(MULTIMODAL, NEMO_MTP),
    samples=samples,
)
