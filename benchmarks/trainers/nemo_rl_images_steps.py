"""NeMo-RL's megatron_forward_backward on images, with models of the Megatron-Bridge that it pins:
log-probs of four rollouts a call, and an update with its NLL loss of one a call, in fp64.

"qwen2", "qwen3" and "qwen35" in a layout's name: Qwen2.5-VL, Qwen3-VL and Qwen3.5, which has
GatedDeltaNet and experts, in rows of padded samples with a causal model's mask, as its recipes have
them. "packed": with sequence packing, which the last two do themselves; "frozen": the tower is not
trained; "text": without images.

"omni2" and "omni3": Qwen2.5-Omni and Qwen3-Omni, whose samples have a clip of sound and images, or,
with "sound", the clip alone, as most of its recipes have them. "nemotron": Nemotron Omni by
megatron-core 0.19, whose images behind a sample's first one are videos of two frames; it has Mamba2
in rows, and none in packs. "mtp": with multi-token prediction, of Nemotron as in its recipe.
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

from benchmarks.trainers import te_core, vision_bridge, vision_models, vision_sources  # noqa: E402
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
PATCH, SOUND, FRAMES = vision_bridge.PATCH, vision_bridge.SOUND, 96
FRAMES_OF = {"omni2": 4, "omni3": 8}
"""Of a clip, for each of its tokens."""
EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 32}
NEMOTRON = tuple(
    {"num_moe_experts": 4, "moe_ffn_hidden_size": 32, "hybrid_override_pattern": pattern}
    for pattern in ("MEM*", "*E-E")
)
"""In rows, and in packs, in which Mamba2 needs a GPU."""
FURTHER = {
    "qwen3": {"mtp_num_layers": 2}, "qwen35": {"mtp_num_layers": 1},
    "nemotron": {"mtp_num_layers": 1, "mtp_hybrid_override_pattern": "*E"},
}  # fmt: skip
"""Fields of multi-token prediction."""
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
    fields = EXPERTS if word in ("qwen35", "omni3") else {}
    fields = NEMOTRON["packed" in name] if word == "nemotron" else fields
    options = {"num_layers": 3 * layout.pp, **made.build, "calculate_per_token_loss": True}
    if "mtp" in name:
        fields, more = fields | FURTHER[word], word == "nemotron"
        options |= {"mtp_loss_scaling_factor": 3.0, "mtp_detach_heads": more}
    make = made.make if word in ("qwen2", "nemotron") else functools.partial(_attending, made.make)
    (chunk,) = vision.build(
        made.kind, layout, make=make, spec=made.spec, fields=fields,
        freeze="frozen" in name, **options,
    )  # fmt: skip
    te_core.put_into(unwrap(chunk).language_model)
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


def with_clips(found: list[Any], frames: int, *, alone: bool) -> list[Any]:
    """Samples whose first image is a clip of so many frames a token, and these clips.

    Args:
        alone: their other images are text.
    """
    heard: list[Any] = []
    for tokens, trained, seen in found:
        tokens[(tokens == SOUND) | (tokens == SOUND - 1)] = 0
        begins = np.flatnonzero((tokens == vision.IMAGE) & (np.roll(tokens, 1) != vision.IMAGE))
        clips = [patches.repeat_interleave(frames // 4, 0) for patches, _ in seen[:1]]
        for at, (patches, _) in [*zip(begins, seen, strict=True)][: None if alone else 1]:
            tokens[at : at + len(patches) // 4] = SOUND if at == begins[0] else 0
            tokens[at - 1] = SOUND - 1 if at == begins[0] else 0
        heard.append((tokens, trained, [] if alone else seen[1:], clips))
    return heard


def add_clips(found: Any, clips: list[Any]) -> None:
    """Spectrograms of a batch's rollouts, padded as their feature extractors have them."""
    from nemo_rl.data.multimodal_utils import PackedTensor

    rows, masks = [], []
    for own in clips:
        features = torch.zeros(len(own), vision.WIDTH, FRAMES, dtype=torch.float64)
        mask = torch.zeros(len(own), FRAMES, dtype=torch.long)
        for number, clip in enumerate(own):
            features[number, :, : len(clip)], mask[number, : len(clip)] = clip.T, 1
        rows.append(features if own else None)
        masks.append(mask if own else None)
    if any(clips):
        found["input_features"] = PackedTensor(rows, 0)
        found["feature_attention_mask"] = PackedTensor(masks, 0)


def add_pixels(found: Any, images: list[Any]) -> None:
    """Nemotron's of a batch's rollouts: every frame [3, height, width], padded; behind the first,
    images are videos of two frames."""
    from nemo_rl.data.multimodal_utils import PackedTensor

    columns: list[list[Any]] = [[], [], []]
    for seen in images:
        frames = [1 + bool(number) for number in range(len(seen))]
        sizes = [(h * PATCH, w * PATCH) for _, (_, h, w) in seen]
        sizes = [size for size, num in zip(sizes, frames, strict=True) for _ in range(num)]
        whole = [
            _pixels(patches * (1 + frame), h, w)
            for (patches, (_, h, w)), num in zip(seen, frames, strict=True)
            for frame in range(num)
        ]
        tensors = (torch.stack(whole), *map(torch.tensor, (sizes, frames))) if seen else [None] * 3
        for column, tensor in zip(columns, tensors, strict=True):
            column.append(tensor)
    for name, column in zip(("pixel_values", "imgs_sizes", "num_frames"), columns, strict=True):
        found[name] = PackedTensor(column, 0)


def _pixels(patches: torch.Tensor, h: int, w: int) -> torch.Tensor:
    flat = torch.nn.functional.pad(patches, (0, 3 * PATCH**2 - vision.WIDTH))
    whole = flat.view(h, w, 3, PATCH, PATCH).permute(2, 0, 3, 1, 4)
    padding = (0, (8 - w) * PATCH, 0, (8 - h) * PATCH)
    return torch.nn.functional.pad(whole.reshape(3, h * PATCH, w * PATCH), padding)


def batch_of(members: list[Any], width: int, nemotron: bool) -> Any:
    """Rollouts as NeMo-RL's data processor has them: ids are padded, pixels are not.

    Args:
        nemotron: images are pixels, with the sizes that they have of these.
    """
    from nemo_rl.data.multimodal_utils import PackedTensor
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    found = BatchedDataDict(
        input_ids=torch.zeros(len(members), width, dtype=torch.long),
        input_lengths=torch.tensor([len(tokens) for tokens, *_ in members]),
        sample_mask=torch.ones(len(members)), token_mask=torch.zeros(len(members), width),
    )  # fmt: skip
    for row, (tokens, trained, *_) in enumerate(members):
        found["input_ids"][row, : len(tokens)] = torch.from_numpy(np.asarray(tokens))
        found["token_mask"][row, : len(tokens)] = torch.from_numpy(trained).float()
    found["mm_token_type_ids"] = (found["input_ids"] == vision.IMAGE).int()
    add_clips(found, [one[3] if len(one) > 3 else [] for one in members])
    images = [one[2] for one in members]
    if any(images) and nemotron:
        add_pixels(found, images)
    elif any(images):
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
    frames = next((FRAMES_OF[word] for word in words(name) & FRAMES_OF.keys()), 0)
    rollouts = with_clips(rollouts, frames, alone="sound" in name) if frames else rollouts
    multiple = layout.tp * (2 * layout.cp if layout.cp > 1 else 1)
    longest = max(len(tokens) for tokens, *_ in rollouts)
    width = -(-longest // multiple) * multiple
    nemotron = "nemotron" in words(name)
    raw = [batch_of(rollouts[at : at + rows], width, nemotron) for at in range(0, SAMPLES, rows)]
    for each in raw if "mtp" in name else ():  # as its worker
        each["mtp_loss_mask"] = each["token_mask"] * each["sample_mask"].unsqueeze(-1)
    return list(
        nemo_data.make_processed_microbatch_iterator(
            iter(raw), config, "input_lengths", multiple, 1, None,
            rows * width if layout.pp > 1 else None,
            delegate_pack_to_model=not words(name) & {"qwen2", "nemotron"},
            model_slices_context_parallel_inputs=nemotron,
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
    if FRAMES_OF.keys() & words(name) and not ("sound" in name and "omni2" in words(name)):
        rows = 1  # positions are looked up in a mask that is the same for all rows
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
        for function in ("moe_grad_scale_func", "mtp_grad_scale_func") if "mtp" in name else ():
            setattr(unwrap(chunk).config, function, lambda: torch.tensor(1 / trained))
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
