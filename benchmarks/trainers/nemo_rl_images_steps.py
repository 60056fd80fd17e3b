"""NeMo-RL's megatron_forward_backward on images, with models of the Megatron-Bridge that it pins:
log-probs of four rollouts a call, and an update with its NLL loss of one a call, in fp64.

"qwen2", "qwen3" and "qwen35" in a layout's name: Qwen2.5-VL, Qwen3-VL and Qwen3.5, which has
GatedDeltaNet and experts, in rows of padded samples with a causal model's mask, as its recipes have
them. "packed": with sequence packing, which the last two do themselves; "frozen": the tower is not
trained; "text": without images.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np
import torch

from tests.core.trainers import stand_ins

stand_ins.for_megatron()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402

from benchmarks.trainers import te_core, vision_models, vision_sources  # noqa: E402
from benchmarks.trainers.nemo_rl_steps import NEWER, loss_of, without_newer  # noqa: E402
from megatron_prefix.lab import runtime  # noqa: E402
from megatron_prefix.lab.models.build import unwrap  # noqa: E402
from megatron_prefix.trainers.table import NEMO_RL  # noqa: E402
from tests.core.trainers import worker  # noqa: E402
from tests.core.trainers.both import Both, Step, config_of  # noqa: E402
from tests.core.trainers.cpu_training import run_on_cpu  # noqa: E402
from tests.harness import vision  # noqa: E402

QWEN3 = "megatron.bridge.models.qwen_vl.modelling_qwen3_vl"
SAMPLES, ROWS, START = 12, 4, vision.IMAGE - 1
EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 32}
UNUSED = (
    "megatron.bridge.models.model_provider", "megatron.bridge.training.config",
    "megatron.bridge.training.state", "hydra", "ray", "nemo_rl.models.megatron.setup",
    "nemo_rl.models.policy", "nemo_rl.models.generation", "nemo_rl.utils.logger",
)  # fmt: skip


def words(name: str) -> set[str]:
    """What a layout's name has besides its ranks."""
    return {*name.split("-")}


def model_of(name: str, layout: Any) -> Any:
    """The model's chunk on this rank."""
    (word,) = words(name) & vision_models.BY_WORD.keys()
    made = vision_models.MODELS[f"Megatron-Bridge, {vision_models.BY_WORD[word]}"]
    options = {"num_layers": 3 * layout.pp, **made.build, "calculate_per_token_loss": True}
    make = made.make if word == "qwen2" else functools.partial(_attending, made.make)
    (chunk,) = vision.build(
        made.kind, layout, make=make, spec=made.spec, fields=EXPERTS if word == "qwen35" else {},
        freeze="frozen" in name, **options,
    )  # fmt: skip
    te_core.put_into(chunk)
    unwrap(chunk).vision_start_token_id = START
    return chunk


def _attending(make: Any, name: str, config: Any, spec: Any, **options: Any) -> Any:
    """A model with Qwen3-VL's own attention."""
    vision_sources.load()
    own = importlib.import_module(f"{QWEN3}.attention")
    own.TEDotProductAttention = te_core.TEDotProductAttention
    config.apply_rotary_pos_emb_in_fp32 = False
    spec = vision_sources.attending(spec, f"{QWEN3}.attention.Qwen3VLSelfAttention")
    return make(name, config, spec, **options)


def samples(num: int, images: bool) -> list[Any]:
    """Those of the harness; a token says that an image begins, and else is nowhere."""
    found = vision.samples(3, num, images=images)
    for tokens, _, _ in found:
        tokens[tokens == START] = 0
        begins = (tokens[1:] == vision.IMAGE) & (tokens[:-1] != vision.IMAGE)
        tokens[:-1][begins] = START
    return found


def batch_of(members: list[Any], width: int) -> Any:
    """Rollouts as NeMo-RL's data processor has them: ids are padded, pixels are not."""
    from nemo_rl.data.multimodal_utils import PackedTensor
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    found = BatchedDataDict(
        input_ids=torch.zeros(len(members), width, dtype=torch.long),
        input_lengths=torch.tensor([len(tokens) for tokens, _, _ in members]),
        sample_mask=torch.ones(len(members)), token_mask=torch.zeros(len(members), width),
    )  # fmt: skip
    for row, (tokens, trained, _) in enumerate(members):
        found["input_ids"][row, : len(tokens)] = torch.from_numpy(np.asarray(tokens))
        found["token_mask"][row, : len(tokens)] = torch.from_numpy(trained).float()
    found["mm_token_type_ids"] = (found["input_ids"] == vision.IMAGE).int()
    images = [seen for _, _, seen in members]
    if any(images):
        pixels = [torch.cat([patches for patches, _ in seen]) if seen else None for seen in images]
        grids = [torch.tensor([grid for _, grid in seen]) if seen else None for seen in images]
        found["pixel_values"] = PackedTensor(pixels, 0).enable_deduplication()
        found["image_grid_thw"] = PackedTensor(grids, 0).enable_deduplication()
    return found


def batches(name: str, layout: Any, config: Any, rows: int) -> list[Any]:
    """Processed microbatches of so many rollouts."""
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.models.megatron import data as nemo_data

    BatchedDataDict.to = lambda self, device: self
    nemo_data.get_ltor_masks_and_position_ids = _causal
    known = PackedSeqParams.__dataclass_fields__  # newer ones have more
    nemo_data.PackedSeqParams = lambda **given: PackedSeqParams(
        **{field: value for field, value in given.items() if field in known}
    )
    place, parts = parallel_state.get_data_parallel_rank(), layout.dp
    rollouts = samples(SAMPLES * parts, "text" not in name)[place::parts]
    multiple = layout.tp * (2 * layout.cp if layout.cp > 1 else 1)
    longest = max(len(tokens) for tokens, _, _ in rollouts)
    width = -(-longest // multiple) * multiple
    raw = [batch_of(rollouts[at : at + rows], width) for at in range(0, SAMPLES, rows)]
    return list(
        nemo_data.make_processed_microbatch_iterator(
            iter(raw), config, "input_lengths", multiple, 1, None,
            rows * width if layout.pp > 1 else None,
            delegate_pack_to_model="qwen2" not in words(name),
        )
    )  # fmt: skip


def _causal(data: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None, torch.Tensor]:
    """megatron.training's mask and positions; it imports more than there is on the CPU."""
    rows, width = data.shape
    mask = torch.ones(1, 1, width, width).tril() < 0.5
    return mask, None, torch.arange(width).expand(rows, width)


def steps(name: str) -> list[Step]:
    """A pass for log-probs and an update, on one rank."""
    from nemo_rl.models.megatron import train

    without_newer()
    layout = worker.layout_of(name)
    runtime.initialize(layout)
    chunk = model_of(name, layout)
    train.get_forward_backward_func = both = Both(
        config_of(name), samples=NEMO_RL.samples, masks_tokens=NEMO_RL.masks_tokens,
        dtype=torch.float64,
    )  # fmt: skip
    packed = "packed" in name
    config = {"sequence_packing": {"enabled": packed, "max_total_tokens": 200}}
    # What Qwen2.5-VL sends of several rows is not contiguous, which stock refuses.
    rows = 1 if layout.pp > 1 and "qwen2" in words(name) and not packed else ROWS
    with vision.Kept():
        given = batches(name, layout, config, rows)
        with torch.no_grad():
            train.megatron_forward_backward(
                chunk, iter(given), len(given), 64, rows,
                train.LogprobsPostProcessor(config), forward_only=True,
            )  # fmt: skip
        chunk.zero_grad_buffer()
        given = batches(name, layout, config, ROWS if packed else 1)
        trained = sum(float(each.data_dict["token_mask"].sum()) for each in given)
        train.megatron_forward_backward(
            chunk, iter(given), len(given), 64, 1, loss_of(name, config, len(given), {}),
            global_valid_seqs=torch.tensor(float(SAMPLES)), global_valid_toks=torch.tensor(trained),
        )  # fmt: skip
    return both.steps


if __name__ == "__main__":
    run_on_cpu()
    vision_sources.load()
    worker.StandIns(NEWER, *UNUSED)
    worker.main(["nemo_rl.models.megatron.train"], steps)
