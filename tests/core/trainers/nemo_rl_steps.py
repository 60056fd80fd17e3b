"""NeMo-RL's megatron_forward_backward: log-probs, and an update with its NLL loss, packed.

"dpo" in a layout's name: with its DPO loss, on pairs of rollouts of one prompt; "unpacked": rows of
padded samples, as DPO has them; "fused": with `use_fused_linear_logprobs`; "r3": experts, with
routes that rollouts bring; "recompute": with full activation recomputation.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.router_replay import RouterReplay

from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.trainers import nemo_rl
from tests.core.trainers import worker
from tests.core.trainers.both import Both, Step, config_of
from tests.core.trainers.megatron_lm_steps import run_on_cpu
from tests.core.trainers.verl_steps import PROMPT, VOCAB, drawn_routes, rows
from tests.oracle import attention

NEWER = "megatron.core.transformer.moe.moe_logging"
ROWS = 4


def batches(layout: Any, config: dict[str, Any], spec: Any) -> list[Any]:
    """Processed microbatches of four rollouts each, packed by NeMo-RL or padded; with routes for a
    model with experts."""
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.models.megatron import data as nemo_data

    BatchedDataDict.to = lambda self, device: self
    fields = {field.name for field in dataclasses.fields(PackedSeqParams)}  # newer ones have more
    nemo_data.PackedSeqParams = lambda **given: PackedSeqParams(
        **{name: value for name, value in given.items() if name in fields}
    )
    ids, mask = rows()
    routes = drawn_routes(spec) if spec.num_moe_experts else []
    alike = sorted(range(len(ids)), key=lambda row: ids[row, :PROMPT].tolist())
    ids, mask = ids[alike], mask[alike]  # pairs of one prompt
    lengths = mask.sum(1)
    found = []
    for start in range(0, len(ids), ROWS):
        members = slice(start, start + ROWS)
        width = int(lengths[members].max())
        data = BatchedDataDict(
            input_ids=torch.zeros(ROWS, width, dtype=torch.long),
            input_lengths=lengths[members], sample_mask=torch.ones(ROWS),
            token_mask=torch.zeros(ROWS, width),
            reference_policy_logprobs=torch.full((ROWS, width), -4.9),
        )  # fmt: skip
        for row, (tokens, held) in enumerate(zip(ids[members], mask[members], strict=True)):
            prompt, num = int(held[:PROMPT].sum()), int(held.sum())
            data["input_ids"][row, :num] = tokens[held.bool()]
            data["token_mask"][row, prompt:num] = 1
        if routes:  # none for a rollout's last token
            shape = ROWS, width, *routes[0].shape[1:]
            data["routed_experts"] = torch.full(shape, -1, dtype=torch.int16)
            for row, number in enumerate(alike[members]):
                data["routed_experts"][row, : len(routes[number])] = routes[number]
        found.append(data)
    multiple = layout.tp * (2 * layout.cp if layout.cp > 1 else 1)
    return list(
        nemo_data.make_processed_microbatch_iterator(
            iter(found), config, "input_lengths", multiple, 1, None, None
        )
    )


def model_of(name: str, layout: Any) -> tuple[Any, Any]:
    """The model's numbers, and its chunk on this rank."""
    from nemo_rl.distributed import model_utils

    if "fused" in name:
        model_utils.patch_gpt_model_forward_for_linear_ce_fusion(chunk_size=32)
    kind = "tiny-moe" if "r3" in name else "tiny-qwen3"
    spec = resolve(kind, num_layers=2).with_vocab(VOCAB)
    overrides = {"variable_seq_lengths": True, "moe_enable_routing_replay": "r3" in name}
    recompute = "full" if "recompute" in name else "none"
    (chunk,) = build_model(spec, layout=layout, recompute=recompute, config_overrides=overrides)
    if "unpacked" in name:
        attention.put_into(chunk, ignores_masks=True)
    return spec, chunk


def steps(name: str) -> list[Step]:
    """A pass for log-probs and an update, on one rank."""
    from nemo_rl.algorithms.loss import NLLLossFn
    from nemo_rl.algorithms.loss.loss_functions import DPOLossConfig, DPOLossFn
    from nemo_rl.models.megatron import router_replay, train

    router_replay._MISSING_ROUTE_SENTINEL = -1  # of nemo_rl.models.generation, which is a stand-in
    if not hasattr(sys.modules[NEWER], "__file__"):
        sys.modules[NEWER] = None  # type: ignore[assignment]  # not there, as before the stand-in
    layout = worker.layout_of(name)
    runtime.initialize(layout)
    (spec, chunk), fused = model_of(name, layout), {"use_fused_linear_logprobs": "fused" in name}
    train.get_forward_backward_func = both = Both(config_of(name), samples=nemo_rl.TRAINER.samples)
    replays = {"use_router_replay": "r3" in name}
    both.state = lambda: RouterReplay.global_router_replay_instances
    both.leaves_alike = "recompute" in name
    packing = {"enabled": "unpacked" not in name, "max_total_tokens": 200}
    config = {"sequence_packing": packing}
    given = batches(layout, config, spec)
    with torch.no_grad():
        train.megatron_forward_backward(
            chunk, iter(given), len(given), 64, 1, train.LogprobsPostProcessor(config, **fused),
            forward_only=True, **fused, **replays,
        )  # fmt: skip
    chunk.zero_grad_buffer()
    trained = sum(float(one.data_dict["token_mask"].sum()) for one in given)
    loss = DPOLossFn(DPOLossConfig(), **fused) if "dpo" in name else NLLLossFn(**fused)
    train.megatron_forward_backward(
        chunk, iter(given), len(given), 64, 1,
        train.LossPostProcessor(loss, config, num_microbatches=len(given)), **fused, **replays,
        router_replay_train="r3" in name,
        global_valid_seqs=torch.tensor(12.0), global_valid_toks=torch.tensor(trained),
    )  # fmt: skip
    forward, update = both.steps[len(both.steps) // 2 - 1], both.steps[-1]
    if not update.reason:
        assert update.scored < forward.scored == forward.executed, "token_mask was ignored"
    return both.steps


if __name__ == "__main__":
    run_on_cpu()
    unused = ("nemo_rl.models.policy", "nemo_rl.models.generation", "nemo_rl.utils.logger")
    worker.StandIns("megatron.bridge", "hydra", "ray", NEWER, *unused)
    worker.main(["nemo_rl.models.megatron.train"], steps)
