"""NeMo-RL's megatron_forward_backward: log-probs, and an update with its NLL loss, packed.

"dpo" in a layout's name: with its DPO loss, on pairs of rollouts of one prompt; "topk":
distillation on a teacher's largest logits; "value": its value model, with the head of
Megatron-Bridge; "unpacked": rows of padded samples, as DPO has them; "fused": with
`use_fused_linear_logprobs`; "r3": experts, with routes that rollouts bring; "recompute": with full
activation recomputation; "mtp": a hybrid model with experts and five detached layers of multi-token
prediction that are one, as in its Nemotron recipes, by megatron-core 0.19. Packs of Mamba2 need a
GPU: it is in "unpacked" ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

from tests.core.trainers import stand_ins

stand_ins.for_megatron()

from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer.moe.router_replay import RouterReplay  # noqa: E402

from benchmarks.trainers.slime_steps import further_losses  # noqa: E402
from megatron_prefix.lab import runtime  # noqa: E402
from megatron_prefix.lab.models.build import build_model, unwrap  # noqa: E402
from megatron_prefix.lab.models.presets import resolve  # noqa: E402
from megatron_prefix.trainers.table import NEMO_RL  # noqa: E402
from tests.core.trainers import worker  # noqa: E402
from tests.core.trainers.both import Both, Step, changed, config_of  # noqa: E402
from tests.core.trainers.cpu_training import run_on_cpu  # noqa: E402
from tests.core.trainers.verl_steps import PROMPT, VOCAB, drawn_routes, rows  # noqa: E402
from tests.oracle import attention  # noqa: E402

NEWER = "megatron.core.transformer.moe.moe_logging"
HEADS = "megatron/bridge/models/common/heads.py"
UNUSED = (
    "megatron.bridge", "hydra", "ray", NEWER, "nemo_rl.models.megatron.setup",
    "nemo_rl.models.policy", "nemo_rl.models.generation", "nemo_rl.utils.logger",
)  # fmt: skip
ROWS, TOPK = 4, 8
_FIVE = {
    "num_layers": 4, "mtp_num_layers": 5, "num_moe_experts": 8, "moe_ffn_hidden_size": 32,
    "moe_aux_loss_coeff": 1e-2,
}  # fmt: skip
NEMOTRON: tuple[dict[str, Any], ...] = (
    _FIVE | {"hybrid_override_pattern": "*E-E", "mtp_hybrid_override_pattern": "*E"},
    _FIVE | {"hybrid_override_pattern": "MEM*", "mtp_hybrid_override_pattern": "*E"},
)
"""In packs, and in rows."""


def prepare() -> None:
    """What NeMo-RL needs on the CPU, with this Megatron-Core."""
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.models.megatron import data as nemo_data
    from nemo_rl.models.megatron import router_replay

    router_replay._MISSING_ROUTE_SENTINEL = -1  # of nemo_rl.models.generation, which is a stand-in
    without_newer()
    BatchedDataDict.to = lambda self, device: self
    fields = {field.name for field in dataclasses.fields(PackedSeqParams)}  # newer ones have more
    nemo_data.PackedSeqParams = lambda **given: PackedSeqParams(
        **{name: value for name, value in given.items() if name in fields}
    )


def batches(layout: Any, config: dict[str, Any], spec: Any, *, brings: bool = False) -> list[Any]:
    """Processed microbatches of four rollouts each, packed by NeMo-RL or padded; with routes if
    rollouts bring them."""
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.models.megatron import data as nemo_data

    ids, mask = rows()
    routes = drawn_routes(spec) if brings else []
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
            **_targets(start, width),
        )  # fmt: skip
        for row, (tokens, held) in enumerate(zip(ids[members], mask[members], strict=True)):
            prompt, num = int(held[:PROMPT].sum()), int(held.sum())
            data["input_ids"][row, :num] = tokens[held.bool()]
            data["token_mask"][row, prompt:num] = 1
        if spec.mtp_num_layers:  # as its worker
            data["mtp_loss_mask"] = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
        if routes:
            data["routed_experts"] = _rows_of([routes[number] for number in alike[members]], width)
        found.append(data)
    multiple = layout.tp * (2 * layout.cp if layout.cp > 1 else 1)
    return list(
        nemo_data.make_processed_microbatch_iterator(
            iter(found), config, "input_lengths", multiple, 1, None, None
        )
    )


def _rows_of(routes: list[torch.Tensor], width: int) -> torch.Tensor:
    """Routes of some rollouts as NeMo-RL has them; none for a rollout's last token."""
    rows = torch.full((len(routes), width, *routes[0].shape[1:]), -1, dtype=torch.int16)
    for row, mine in zip(rows, routes, strict=True):
        row[: len(mine)] = mine
    return rows


def _targets(number: int, width: int) -> dict[str, torch.Tensor]:
    """What a teacher and a critic's trainer give; the teacher's logits are as of another model."""
    draw = torch.Generator().manual_seed(number)
    logits = torch.randn(ROWS, width, VOCAB, generator=draw).topk(TOPK)
    values = torch.randn(2, ROWS, width, generator=draw)
    return {
        "teacher_topk_logits": logits.values, "teacher_topk_indices": logits.indices,
        "returns": values[0], "values": values[1],
    }  # fmt: skip


def _valued(model: Any) -> None:
    """Gives the last stage the head of a value model, as NeMo-RL's worker does."""
    # Of Megatron-Bridge only this file: what its packages import wants transformer-engine.
    file = next(path for one in sys.path if (path := Path(one, HEADS)).exists())
    spec = importlib.util.spec_from_file_location("heads", file)
    assert spec is not None and spec.loader is not None
    heads = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(heads)
    config = model.config
    heads.create_value_head_hook(config.hidden_size, config.sequence_parallel)([model])


def without_newer() -> None:
    """Takes the stand-in for a newer module away, once it was imported."""
    if not hasattr(sys.modules.get(NEWER), "__file__"):  # up to 0.7 it is not imported so early
        sys.modules[NEWER] = None  # type: ignore[assignment]


def loss_of(name: str, config: dict[str, Any], num: int, fused: dict[str, bool]) -> Any:
    """The update's post-processor."""
    from nemo_rl.algorithms.loss import NLLLossFn
    from nemo_rl.algorithms.loss import loss_functions as losses
    from nemo_rl.models.megatron import train

    prepare = None
    if "dpo" in name:
        loss = losses.DPOLossFn(losses.DPOLossConfig(), **fused)
    elif "topk" in name:
        loss = losses.DistillationLossFn(losses.DistillationLossConfig())
    elif "value" in name:
        adapter = importlib.import_module("megatron.core.distributed.fsdp.mcore_fsdp_adapter")
        for version in ("V1", "V2"):  # of a newer Megatron-Core, which the worker asks for
            setattr(adapter, f"FullyShardedDataParallel{version}", type(None))
        from nemo_rl.models.value.workers import megatron_value_worker

        loss = losses.MseValueLossFn(losses.MseValueLossConfig(cliprange=0.5))
        prepare = vars(megatron_value_worker)["_value_loss_prepare_fn"]
    else:
        loss = NLLLossFn(**fused)
    prepares = {"prepare_fn": prepare} if prepare else {}  # not up to 0.7
    return train.LossPostProcessor(loss, config, num_microbatches=num, **prepares)


def model_of(name: str, layout: Any) -> tuple[Any, Any]:
    """The model's numbers, and its chunk on this rank."""
    from nemo_rl.distributed import model_utils

    if "fused" in name:
        model_utils.patch_gpt_model_forward_for_linear_ce_fusion(chunk_size=32)
    tied = "value" not in name  # its worker unties the head from the embedding
    kind, more = ("tiny-moe", {}) if "r3" in name else ("tiny-qwen3", {"tie_embeddings": tied})
    overrides = {"variable_seq_lengths": True, "moe_enable_routing_replay": "r3" in name}
    if "mtp" in name:
        kind, more = "tiny-nemotron-h", NEMOTRON["unpacked" in name]
        overrides |= {"mtp_use_repeated_layer": True, "mtp_detach_heads": True}
    spec = resolve(kind, **{"num_layers": 2, **more}).with_vocab(VOCAB)
    recompute = "full" if "recompute" in name else "none"
    with changed(_valued) if "value" in name else contextlib.nullcontext():
        (chunk,) = build_model(spec, layout=layout, recompute=recompute, config_overrides=overrides)
    if "unpacked" in name:
        attention.put_into(chunk, ignores_masks=True)
    return spec, chunk


def steps(name: str) -> list[Step]:
    """A pass for log-probs and an update, on one rank."""
    from nemo_rl.models.megatron import train

    prepare()
    layout = worker.layout_of(name)
    runtime.initialize(layout)
    spec, chunk = model_of(name, layout)
    fused = {"use_fused_linear_logprobs": True} if "fused" in name else {}  # other names up to 0.7
    train.get_forward_backward_func = both = Both(
        config_of(name), samples=NEMO_RL.samples, masks_tokens=NEMO_RL.masks_tokens
    )
    replays = {"use_router_replay": "r3" in name}
    both.state = lambda: RouterReplay.global_router_replay_instances
    both.leaves_alike, both.left = "recompute" in name, further_losses
    packing = {"enabled": "unpacked" not in name, "max_total_tokens": 200}
    config = {"sequence_packing": packing}
    given = batches(layout, config, spec, brings="r3" in name)
    if "value" not in name:
        with torch.no_grad():
            train.megatron_forward_backward(
                chunk, iter(given), len(given), 64, 1, train.LogprobsPostProcessor(config, **fused),
                forward_only=True, **fused, **replays,
            )  # fmt: skip
    chunk.zero_grad_buffer()
    trained = sum(float(one.data_dict["token_mask"].sum()) for one in given)
    if "mtp" in name:  # as its worker
        for function in ("moe_grad_scale_func", "mtp_grad_scale_func"):
            setattr(unwrap(chunk).config, function, lambda: torch.tensor(1 / trained))
    train.megatron_forward_backward(
        chunk, iter(given), len(given), 64, 1, loss_of(name, config, len(given), fused), **fused,
        **replays, router_replay_train="r3" in name,
        global_valid_seqs=torch.tensor(12.0), global_valid_toks=torch.tensor(trained),
    )  # fmt: skip
    update = both.steps[-1]
    if not update.reason:
        assert update.scored < update.executed, "token_mask was ignored"
    return both.steps


if __name__ == "__main__":
    run_on_cpu()
    worker.StandIns(*UNUSED)
    worker.main(["nemo_rl.models.megatron.train"], steps)
