"""Megatron-RL's train_rl.forward_step: an update over bins that its packer has filled."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import torch

from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from tests.core.trainers import worker
from tests.core.trainers.both import Both, Step, config_of
from tests.core.trainers.cpu_training import run_on_cpu
from tests.core.trainers.verl_steps import PROMPT, VOCAB, rows

BIN, MOST = 160, 8
ARGUMENTS = Namespace(
    rl_use_sequence_packing=True, rl_inference_logprobs_is_correction=False, fp16=False, bf16=False,
    rl_sequence_packing_max_sequences_per_bin=MOST, rl_importance_sampling_truncation_coef=None,
    grpo_clamp_eps_lower=0.2, grpo_clamp_eps_upper=0.28, grpo_kl_beta=0.1,
    grpo_entropy_term_weight=0.01, check_for_nan_in_loss_and_grad=False, check_for_spiky_loss=False,
    context_parallel_size=1,
)  # fmt: skip


def packing_context() -> Any:
    """The bins of a step, as prepare_data_for_update leaves them."""
    from megatron.rl import sequence_packing_utils as packing

    ids, mask = rows()
    trajectories, generated = torch.zeros_like(ids), torch.zeros_like(mask, dtype=torch.bool)
    for row, (tokens, held) in enumerate(zip(ids, mask, strict=True)):
        prompt, num = int(held[:PROMPT].sum()), int(held.sum())
        trajectories[row, :num], generated[row, prompt:num] = tokens[held.bool()], True
    packer = packing.SequencePacker(BIN, 0, MOST)
    tokens, positions, attention, loss_mask, info = packer.pack_sequences(trajectories, generated)
    advantages = torch.linspace(-1, 1, len(ids))
    context = packing.PackingContext(
        bin_size=BIN, packer=packer, packing_info=info, original_generation_masks=generated,
        original_trajs=trajectories, packed_trajs=tokens, packed_position_ids=positions,
        packed_attention_mask=attention, packed_loss_mask=loss_mask,
        bin_advantages=[advantages[members] for members in info.bin_seq_indices],
    )  # fmt: skip
    context.cached_packed_seq_params = packing.create_packed_seq_params(context)
    context.old_logprobs = torch.full((len(tokens), BIN - 1), -4.9)
    context.ref_logprobs = torch.full((len(tokens), BIN - 1), -4.8)
    return context


def steps(name: str) -> list[Step]:
    """An update, on one rank."""
    import train_rl
    from megatron.rl import rl_utils

    layout = worker.layout_of(name)
    runtime.initialize(layout)
    spec = resolve("tiny-qwen3", num_layers=2).with_vocab(VOCAB)
    (chunk,) = build_model(spec, layout=layout, config_overrides={"variable_seq_lengths": True})
    # The wrapper for 16 bit takes `fp32_output`, and in 32 bit there is none.
    stock = chunk.forward
    chunk.forward = lambda *a, fp32_output=True, **k: stock(*a, **k)
    timer = SimpleNamespace(start=lambda: None, stop=lambda: None)
    train_rl.get_args = rl_utils.get_args = lambda: ARGUMENTS
    train_rl.get_timers = lambda: lambda *a, **k: timer
    train_rl.get_rerun_state_machine = lambda: None
    rl_utils.is_batch_invariant_mode_enabled = lambda: False
    rl_utils.get_nvtx_range = lambda: lambda *a, **k: contextlib.nullcontext()
    context = packing_context()
    rl_utils.get_rl_runtime_state().packing_context = context
    both, num = Both(config_of(name)), len(context.packed_trajs)
    both()(
        forward_step_func=train_rl.forward_step,
        data_iterator=iter([[torch.tensor([number])] for number in range(num)]),
        model=[chunk], num_microbatches=num, seq_length=BIN, micro_batch_size=1,
        decoder_seq_length=BIN, forward_only=False,
    )  # fmt: skip
    return both.steps


if __name__ == "__main__":
    run_on_cpu()
    kernels = "megatron.core.inference.contexts.attention_context.triton"
    worker.StandIns("fastapi", "httpx", "uvicorn", "wandb", kernels)
    worker.main(["train_rl"], steps)
