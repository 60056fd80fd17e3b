"""[pure] The trainers on Megatron-Core that are known, an entry each; their pages are in docs.

What of a trainer is read anew when the schedule is asked for (its command line, its microbatches)
is a function in front of the entries.
"""

from __future__ import annotations

import sys
from typing import Any

from megatron_prefix.errors import Refusal
from megatron_prefix.refusals.table import (
    BRIDGE_TEACHER,
    DISTILLATION,
    DYNAMIC_CP,
    LEGACY_MODELS,
    LORA_DROPOUT,
    MULTI_LORA,
    OWN_CP_LOOP,
    PACKED_BINS_CP,
    RESET_MASK,
    RLINF_STAGES,
    ROLL_MTP,
    SKYRL_ROWS,
    SWIFT_METRICS,
    TREE_TRAINING,
)
from megatron_prefix.trainers.trainer import Trainer


def arguments() -> Any:
    """Megatron-LM's command line as it was parsed; None before that, and without it."""
    module = sys.modules.get("megatron.training.global_vars")
    try:
        return module.get_args() if module else None
    except AssertionError:  # nobody has parsed one
        return None


def _megatron_lm_refusal() -> Refusal | None:
    args = arguments()
    if getattr(args, "export_kd_teacher_load", None):
        return DISTILLATION
    if getattr(args, "use_legacy_models", False):
        return LEGACY_MODELS
    return None


def _nemo_samples(microbatch: Any) -> list[tuple[Any, Any]] | None:
    """Tokens and trained positions of a ProcessedMicrobatch; see `Samples` in run/calls.py.

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


VERL = Trainer(
    name="verl",
    module="verl",
    package="verl",
    tried=("0.9.1", "0.10.0.dev", "0.9.0", "0.8.0"),
    on="`MEGATRON_PREFIX_MODE=auto`: verl imports the package as a plugin (`verl.plugins`)",
    loss="every position: `response_mask` acts in the loss",
    together="`VERL_USE_EXTERNAL_MODULES=megatron_prefix.auto.whole_groups` on the driver",
    refused=(DYNAMIC_CP,),
    losses_set=frozenset({"batch_num_tokens"}),  # in global_batch_info of their configuration
    passes_together=True,  # forward_backward_batch reduces over these ranks before each call
    masks_tokens=True,  # for multi-token prediction alone: log-probs are of all positions
)

SLIME = Trainer(
    name="slime",
    module="slime",
    package="slime",
    tried=("624b824a8", "0.3.1"),
    on="`--custom-megatron-init-path megatron_prefix.auto.init`",
    loss="the `loss_mask` of the model call",
    together="`import megatron_prefix.auto.whole_groups` in `slime/utils/dp_schedule.py`",
    passes_together=True,  # forward_only calls once for every update that follows
)

# It comes from slime.
MILES = Trainer(
    name="miles",
    module="miles",
    package="miles",
    tried=("31f1ca961", "0.1.0"),
    on=SLIME.on,
    loss=SLIME.loss,
    together=SLIME.together.replace("slime/", "miles/"),
    refused=(MULTI_LORA,),
    passes_together=True,  # forward_only, once for every update; its lengths are of all ranks
    refusal=lambda: MULTI_LORA if getattr(arguments(), "multi_lora", False) else None,
)

NEMO_RL = Trainer(
    name="NeMo-RL",
    module="nemo_rl",
    package="nemo-rl",
    tried=("7ea279abf", "0.7.0"),
    on="`import megatron_prefix.auto.on_import` in `nemo_rl/models/megatron/train.py`",
    loss="those whose next token `token_mask` has, and each sample's last one, in updates; every"
    " position in passes for log-probs, and where tokens of microbatch and model call differ",
    together="with sequence packing, `import megatron_prefix.auto.whole_groups` in"
    " `nemo_rl/distributed/batched_data_dict.py`",
    samples=_nemo_samples,
    masks_tokens=True,  # for multi-token prediction alone: `token_mask`
)

MS_SWIFT = Trainer(
    name="ms-swift",
    module="swift.megatron",
    package="ms-swift",
    tried=("4.6.0", "3602360a5"),
    on="`--external_plugins`, a file with `import megatron_prefix.auto.on_import`",
    loss="every position: labels of -100 act in the loss",
    together="GRPO: a rank samples all rollouts of its prompts; a pair is one row of the data set",
    refused=(LORA_DROPOUT, SWIFT_METRICS),
)

SKYRL = Trainer(
    name="SkyRL",
    module="skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper",
    package="skyrl",
    tried=("0.4.0", "a9564572e"),
    on="`import megatron_prefix.auto.on_import` in"
    " `skyrl/backends/skyrl_train/workers/megatron/megatron_worker.py`",
    loss="every position: its mask acts in the loss",
    together="its dispatch, which cuts a mini-batch into equal parts in the order of its rollouts",
    refused=(SKYRL_ROWS,),
)

RLINF = Trainer(
    name="RLinf",
    module="rlinf.workers.megatron_worker",
    package="rlinf",
    tried=("a3816b596", "0.3.0"),
    on="`RLINF_EXT_MODULE=megatron_prefix.auto.on_import`",
    loss="every position: its mask acts in the loss",
    together="no `enable_dp_load_balance`, no `shuffle_rollout` with `n_minibatches` above 1",
    refused=(RLINF_STAGES,),
)

AREAL = Trainer(
    name="AReaL",
    module="areal.engine.megatron_engine",
    package="areal",
    tried=("cbff54d64", "2.0.0", "4aef98d8d"),
    on="`import megatron_prefix.auto.on_import` in a module that its workers import",
    loss="every position: its mask acts in the loss",
    together="its workflow; in mini-batches, too, with `import megatron_prefix.auto.whole_groups`"
    " in that module",
    refused=(TREE_TRAINING,),
)

ROLL = Trainer(
    name="ROLL",
    module="roll.distributed.strategy.megatron_strategy",
    package="",
    tried=("8eb27cc2d", "0.3.0"),
    on="`import megatron_prefix.auto.on_import` in the module of `actor_train.worker_cls`",
    loss="every position: the `loss_mask` of its model calls is over tokens",
    together="`import megatron_prefix.auto.whole_groups` in `roll/utils/functionals.py`",
    refused=(ROLL_MTP,),
    masks_tokens=True,
)

# Its own training loop; trainers that only build models with it are not it.
MEGATRON_BRIDGE = Trainer(
    name="Megatron-Bridge",
    module="megatron.bridge.training.train",
    package="megatron-bridge",
    tried=("0.6.2", "067f987df"),
    on="`torchrun -m megatron_prefix.run SCRIPT ... --prefix-schedule auto`",
    loss="every position: its `loss_mask` acts in the loss",
    together="nothing, but a packed row that has a whole group",
    refused=(BRIDGE_TEACHER,),
)

# train_rl.py of Megatron-LM.
MEGATRON_RL = Trainer(
    name="Megatron-RL",
    module="megatron.rl.rl_utils",
    package="",
    tried=("core_v0.16.1 (55ac70825)",),
    on="`torchrun -m megatron_prefix.run train_rl.py ... --prefix-schedule auto`",
    loss="every position: `packed_loss_mask` acts in the loss",
    together="`--grpo-prompts-per-step` a multiple of the data-parallel size, and no"
    " `--rl-use-sequence-packing`",
    refused=(PACKED_BINS_CP,),
    # megatron.training imports the module in every script.
    is_used=lambda: bool(getattr(arguments(), "perform_rl_step", False)),
)

# pretrain_gpt.py, and other scripts on megatron.training.
MEGATRON_LM = Trainer(
    name="Megatron-LM",
    module="megatron.training",
    package="",
    tried=("core_v0.16.1 (55ac70825)", "core_v0.19.0 (5be962670)", "wheel 0.19.2"),
    on="`torchrun -m megatron_prefix.run pretrain_gpt.py ... --prefix-schedule auto`",
    loss="the `loss_mask` of the model call",
    together="nothing, but a row that packs a whole group (`--sft`,"
    " `--dataloader-inter-document-masking`)",
    refused=(RESET_MASK, DISTILLATION, LEGACY_MODELS, OWN_CP_LOOP),
    refusal=_megatron_lm_refusal,
)

TRAINERS: tuple[Trainer, ...] = (
    VERL, SLIME, MILES, NEMO_RL, MS_SWIFT, SKYRL, RLINF, AREAL, ROLL, MEGATRON_BRIDGE, MEGATRON_RL,
    MEGATRON_LM,
)  # fmt: skip
"""The last three are imported by some of the others."""
