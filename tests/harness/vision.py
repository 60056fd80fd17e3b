"""Small vision-language models that call their language model as those of trainers do.

`KINDS` has a line for each form of call: what is given with the embeddings, in which shape, and who
slices the rotary table for context parallelism (Megatron-Bridge's Qwen3-VL and Qwen3.5, mbridge's
Qwen2.5-VL and GLM-4V, ms-swift's mcore-bridge).  The classes have the names of the real ones where
these have a forward of their own, since that is how models are told.
"""

import types
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.enums import ModelType
from megatron.core.models.common.embeddings.rotary_pos_embedding import (
    MultimodalRotaryEmbedding,
    get_pos_emb_on_this_cp_rank,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor, nn

from benchmarks.vision_model import LanguageModel
from megatron_prefix.lab.models.build import block_spec, exact_loss, mtp_spec, weights
from megatron_prefix.lab.models.config import transformer_config
from megatron_prefix.lab.models.local import Float64Kept, keep_float64
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.platforms import cpu
from megatron_prefix.layers.releases import transformer_layers
from megatron_prefix.tree import cp_layout
from tests.harness import calls, hybrid

DDP = ("overlap_grad_reduce", "bucket_size")
"""Options of DistributedDataParallel."""
VOCAB, IMAGE, MERGE, WIDTH = 64, 63, 2, 5


class Kind(NamedTuple):
    """How a vision-language model calls its language model.

    Attributes:
        depth: deepstack layers.
        gives_tokens: input_ids go along, which nobody reads.
        positions_first: the mask of images is [positions, samples], and deepstack rows one tensor.
        in_block: both are in extra_block_kwargs.
        slices: positions are whole, and the rotary embedding slices its table; else they are cut.
        shows_decoder: the model has the decoder as a property.
        rope: rotary positions are those of text.
    """

    depth: int = 0
    gives_tokens: bool = False
    positions_first: bool = False
    in_block: bool = False
    slices: bool = True
    shows_decoder: bool = False
    rope: bool = False


KINDS = {
    "Megatron-Bridge, Qwen3-VL": Kind(2, gives_tokens=True, slices=False, shows_decoder=True),
    "Megatron-Bridge, Qwen2.5-VL": Kind(),
    "mbridge, Qwen3-VL": Kind(2),
    "mbridge, by extra_block_kwargs": Kind(2, in_block=True),
    "mbridge, GLM-4V": Kind(shows_decoder=True),
    "mcore-bridge, Qwen3-VL": Kind(2, gives_tokens=True, positions_first=True),
    "mbridge, InternVL3": Kind(rope=True),
}
_MODULES = {
    "Megatron-Bridge": ("megatron.bridge.models.qwen_vl.modelling_qwen3_vl.text_model", "rope"),
    "mbridge": ("mbridge.models.qwen3_vl.gpt_model", "rope_utils"),
    "mcore-bridge": ("mcore_bridge.model.gpt_model", ""),
}


class Kept(Float64Kept):
    """And casts of transformers' towers, which name the dtype."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.to and kwargs.get("dtype") == torch.float32:
            kwargs["dtype"] = args[0].dtype if args[0].dtype == torch.float64 else torch.float32
        if func is torch.nn.functional.grid_sample:
            args = (args[0], args[1].to(args[0].dtype), *args[2:])
        return super().__torch_function__(func, types, args, kwargs)


class Tower(nn.Module):
    """Patches [n, WIDTH] of images [1, h, w] -> embeddings of their h*w/4 tokens, and deepstack
    rows; patches of one image see one another."""

    def __init__(self, hidden: int, depth: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH * MERGE**2, 16, dtype=dtype)
        self.second = nn.Linear(16, hidden, dtype=dtype)
        self.mergers = nn.ModuleList(nn.Linear(16, hidden, dtype=dtype) for _ in range(depth))

    def forward(self, hidden_states: Tensor, grid_thw: Tensor) -> tuple[Tensor, list[Tensor]]:
        lengths = (grid_thw.prod(-1) // MERGE**2).tolist()
        x = self.first(hidden_states.unflatten(0, (-1, MERGE**2)).flatten(1))
        x = torch.cat([torch.tanh(part + part.mean(0)) for part in x.split(lengths)])
        return self.second(x), [merger(x) for merger in self.mergers]


Tower.__module__ = "transformers.models.qwen3_vl.modeling_qwen3_vl"
Tower.__qualname__ = "Qwen3VLVisionModel"


class Block(TransformerBlock):
    """Adds images' rows behind its first layers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.deep: Any = (None, None)
        for number, layer in enumerate(self.layers):
            layer.register_forward_hook(lambda _, __, out, n=number: self._added(out, n))

    def _added(self, out: Any, number: int) -> Any:
        mask, rows = self.deep
        if mask is None or rows is None or number >= len(rows):
            return out
        hidden = out[0].clone()
        mask = mask if mask.shape == hidden.shape[:2] else mask.T
        # Rows count along samples, as all of these models' do for one sample.
        flat = hidden.transpose(0, 1).clone()
        flat[mask.T] = flat[mask.T] + rows[number]
        return flat.transpose(0, 1).contiguous(), *out[1:]

    def forward(self, *args, visual_pos_masks=None, deepstack_visual_embeds=None, **named):
        self.deep = visual_pos_masks, deepstack_visual_embeds
        return super().forward(*args, **named)


class Interleaved(MultimodalRotaryEmbedding):
    """The three positions take turns along the width; a table of a pack is not sliced."""

    is_thd_format = False

    def forward(self, position_ids: Tensor, mrope_section: list[int], **_: Any) -> Tensor:
        angles = position_ids.float()[..., None] * self.inv_freq.to(position_ids.device)
        place = torch.arange(angles.shape[-1]) % 3
        mixed = torch.where(place == 1, angles[1], torch.where(place == 2, angles[2], angles[0]))
        table = torch.cat([mixed, mixed], -1)[..., None, :].transpose(0, 1).contiguous()
        if self.cp_group.size() > 1 and not self.is_thd_format:
            return get_pos_emb_on_this_cp_rank(table, 0, self.cp_group)
        return table


class Qwen3VLGPTModel(LanguageModel):
    """Its decoder adds deepstack rows, and its rotary positions are interleaved."""

    block, rotary = Block, Interleaved


def language_model_class(name: str) -> type:
    """GPTModel itself, or a class with the name that a kind's real one has."""
    if not KINDS[name].depth:
        return GPTModel
    module, rope = _MODULES[name.partition(",")[0]]
    title = "GPTModel" if module.startswith("mcore") else "Qwen3VLGPTModel"
    called = {"__module__": module, "__qualname__": title, "forward": Qwen3VLGPTModel.forward}
    found = types.new_class(title, (Qwen3VLGPTModel,), {}, lambda space: space.update(called))
    turned = "Qwen3VLMultimodalRotaryEmbedding" if rope else ""
    if rope:
        Interleaved.__module__ = f"{module.rpartition('.')[0]}.{rope}"
        Interleaved.__qualname__ = turned
    else:  # mcore-bridge puts a forward into Megatron's class
        Interleaved.__module__ = MultimodalRotaryEmbedding.__module__
        Interleaved.__qualname__ = MultimodalRotaryEmbedding.__qualname__
        Interleaved.forward.__module__ = "mcore_bridge.patcher"
    return found


class VisionLanguage(MegatronModule):
    """A tower and a language model."""

    def __init__(self, name, config, spec, inside=None, **options):
        super().__init__(config=config)
        self.kind = KINDS[name]
        self.pre_process, self.post_process = options["pre_process"], options["post_process"]
        self.model_type = ModelType.encoder_or_decoder
        self.vision_model = None
        if self.pre_process:
            self.vision_model = Tower(config.hidden_size, self.kind.depth, config.params_dtype)
            for parameter in self.vision_model.parameters():
                parameter.average_gradients_across_tp_domain = True
        self.language_model = (inside or language_model_class(name))(
            config, spec, position_embedding_type="rope" if self.kind.rope else "mrope",
            scatter_embedding_sequence_parallel=False, **options,
        )  # fmt: skip
        self.share_embeddings_and_output_weights = options["share_embeddings_and_output_weights"]
        vars(self)["embedding"] = own = self.language_model._modules.get("embedding")
        scatter = tensor_parallel.scatter_to_sequence_parallel_region
        if config.mtp_num_layers and config.sequence_parallel:  # as mbridge's Qwen3.5
            vars(self.language_model)["embedding"] = lambda **given: scatter(own(**given))

    def shared_embedding_or_output_weight(self) -> Any:
        return self.language_model.shared_embedding_or_output_weight()

    def set_input_tensor(self, tensor: Any) -> None:
        """The language model's, where it has no embedding; of a list, as Megatron's schedules
        give it."""
        if not self.pre_process:
            self.language_model.set_input_tensor(tensor[0])

    def forward(self, input_ids, position_ids, pixel_values=None, image_grid_thw=None, **named):
        """Whole samples in; embeddings of this rank's rows to the language model."""
        kind, given = self.kind, dict[str, Any]()
        if self.pre_process:
            given = self._embedded(input_ids, pixel_values, image_grid_thw)
        cp = parallel_state.get_context_parallel_group()
        held = torch.from_numpy(cp_layout.rank_positions(input_ids.shape[1], cp.rank(), cp.size()))
        if not kind.slices:
            position_ids = position_ids[..., held]
            self.language_model.rotary_pos_emb.is_thd_format = True
        if kind.rope:
            position_ids = position_ids[0, ..., held]  # nobody reads them
        gives = kind.gives_tokens or self.config.mtp_num_layers
        tokens = input_ids[:, held] if gives else None
        return self.language_model(
            input_ids=tokens, position_ids=position_ids, attention_mask=None, **given, **named
        )

    def _embedded(self, tokens: Tensor, pixels: Tensor | None, grids: Any) -> dict[str, Any]:
        rows = self.embedding(input_ids=tokens, position_ids=None).clone()
        rows, mask, deep = rows.transpose(0, 1).contiguous(), tokens == IMAGE, []
        if pixels is not None:
            seen, deep = self.vision_model(hidden_states=pixels, grid_thw=grids)  # type: ignore[misc]
            rows[mask] = seen
        dense = [torch.zeros_like(rows).masked_scatter(mask[..., None], one) for one in deep]
        cp, tp = (
            parallel_state.get_context_parallel_group(),
            parallel_state.get_tensor_model_parallel_group(),
        )
        held = torch.from_numpy(cp_layout.rank_positions(tokens.shape[1], cp.rank(), cp.size()))
        rows, mask = rows[:, held].transpose(0, 1).contiguous(), mask[:, held]
        dense = [one[:, held] for one in dense]
        if self.config.sequence_parallel:
            rows = tensor_parallel.scatter_to_sequence_parallel_region(rows)
            mask = mask.chunk(tp.size(), 1)[tp.rank()]
            dense = [one.chunk(tp.size(), 1)[tp.rank()] for one in dense]
        given: dict[str, Any] = {"decoder_input": rows}
        if not dense:
            return given
        found = [one[mask] for one in dense]
        if self.kind.positions_first:
            more = {"visual_pos_masks": mask.T, "deepstack_visual_embeds": torch.stack(found)}
        else:
            more = {"visual_pos_masks": mask, "deepstack_visual_embeds": found}
        return given | ({"extra_block_kwargs": more} if self.kind.in_block else more)


def around(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters of a model that are not of its language model, or of its tower."""
    inner = model.language_model
    inside = {*map(id, inner.parameters())} if inner is not model else set()
    for name, parameter in model.named_parameters():
        if name.startswith("vision_model.") or (inside and id(parameter) not in inside):
            yield name, parameter


def tower_of(model: Any) -> nn.Module | None:
    """A model's vision tower, under the names that it has."""
    names = "vision_model", "visual", "vision_tower"
    found = next((one for name in names if (one := getattr(model, name, None)) is not None), None)
    return getattr(found, "visual", found)  # mcore-bridge has it in a module of its own


class Showing(VisionLanguage):
    """It shows the decoder of the model inside."""

    decoder = property(lambda model: model.language_model.decoder)


def build(
    name, layout, *, freeze=False, num_layers=None, make=None, spec="tiny-qwen3",
    fields=MappingProxyType({}), **overrides,
):  # fmt: skip
    """This rank's chunk of a model in fp64, in Megatron's DistributedDataParallel.

    Args:
        name: of `KINDS`.
        layout: of the job.
        freeze: the tower is not trained.
        num_layers: of the language model; None: as few as read all rows that are added to layers.
        make: another class's constructor, called as that of `VisionLanguage`.
        spec: name of the language model's; of `hybrid.GDN` every second layer is a GatedDeltaNet,
            and attention has gates, as in Qwen3.5.
        fields: of the spec, besides its layers.
        overrides: of the config, of `DDP`, and `tied`: embedding and output layer are one.
    """
    depth = KINDS[name].depth
    num_layers = num_layers or (2 * max(1, depth) if layout.pp > 1 else max(2, depth + 1))
    delta = spec == hybrid.GDN
    layers = hybrid.gated_delta(num_layers) if delta else {"num_layers": num_layers}
    inner = resolve(spec, **layers, **fields).with_vocab(VOCAB)
    if delta or inner.is_hybrid_model:
        cpu.load_recurrent_layers()
    half = int(inner.kv_channels * inner.rotary_percent) // 2
    sections = {"mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    ddp = {name: overrides.pop(name) for name in DDP if name in overrides}
    tied = overrides.pop("tied", False)
    config = transformer_config(
        inner, layout, torch.float64, torch.device("cpu"), transformer_engine=False,
        recompute=overrides.pop("recompute", "none"),
        overrides={"variable_seq_lengths": True, **sections, **overrides},
    )  # fmt: skip
    config.model_spec = inner
    pipeline = parallel_state.get_pipeline_model_parallel_rank()
    block = block_spec(config, False, None)
    further = None if inner.is_hybrid_model else mtp_spec(config, block, False, None)
    model = (make or (Showing if KINDS[name].shows_decoder else VisionLanguage))(
        name, config, block, mtp_block_spec=further, vocab_size=VOCAB, max_sequence_length=512,
        pre_process=pipeline == 0, post_process=pipeline == layout.pp - 1,
        rotary_percent=inner.rotary_percent, rotary_base=1000,
        share_embeddings_and_output_weights=tied,
    )  # fmt: skip
    _fill(model, inner, freeze=freeze)
    model.to(torch.float64)
    chunk = DistributedDataParallel(config, DistributedDataParallelConfig(**ddp), model)
    chunk.train()
    config.finalize_model_grads_func = finalize_model_grads
    return [chunk]


def _fill(model: Any, inner: Any, *, freeze: bool) -> None:
    """Weights of a model whose language model has this spec, and arithmetic in fp64."""
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    weights.fill(model.language_model, inner, 1234)
    inside = model.language_model
    recurrent = inner.name == hybrid.GDN or inner.is_hybrid_model
    for layer in transformer_layers(inside):
        if recurrent or hasattr(layer.mlp, "router"):
            keep_float64(layer if recurrent else layer.mlp.router)
    inside.compute_language_model_loss = types.MethodType(exact_loss, inside)
    draw = torch.Generator().manual_seed(5)
    for _, parameter in around(model):
        parameter.data.copy_(0.5 * torch.randn(parameter.shape, generator=draw))
        parameter.requires_grad = not freeze


class Counted:
    """Counts rows that go into the first layer of a tower; of None it counts nothing."""

    def __init__(self, tower: nn.Module | None) -> None:
        self.rows = 0
        if tower is not None:
            next(iter(tower.children())).register_forward_pre_hook(self._count)

    def _count(self, _: Any, args: Any) -> None:
        self.rows += len(args[0])


def samples(seed: int, num: int, images: bool = True) -> list[Any]:
    """Tokens, trained flags and images of rollouts of four groups, in a random order.

    The first two groups have the same tokens and other pixels, the last has no image, and a turn of
    some has one more image. Pixels are other tensors of equal values in every rollout.
    """
    draw, source = np.random.default_rng(seed), torch.Generator().manual_seed(seed)

    def image(h: int, w: int) -> tuple[Tensor, tuple[int, int, int]]:
        return torch.randn(h * w, WIDTH, generator=source, dtype=torch.float64), (1, h, w)

    def text(num: int) -> np.ndarray:
        return draw.integers(0, IMAGE, num)

    def seen(num: int) -> np.ndarray:
        return np.full(num, IMAGE) if images else text(num)

    shown = np.concatenate([text(5), seen(6), text(6)])
    prompts = [
        (shown, [image(4, 6)]),
        (shown, [image(4, 6)]),
        (np.concatenate([text(2), seen(4), text(3), seen(8), text(2)]), [image(4, 4), image(8, 4)]),
        (text(12), []),
    ]
    turn, extra = np.concatenate([text(2), seen(4), text(3)]), image(4, 4)
    found = []
    for number in range(num):
        prompt, mine = prompts[number % 4]
        more, mine = (turn, [*mine, extra]) if number % 8 >= 4 else (turn[:0], mine)
        tokens = np.concatenate([prompt, more, text(int(draw.integers(2, 9)))])
        trained = np.arange(len(tokens)) >= len(prompt) + len(more)
        found.append((tokens, trained, [(p.clone(), g) for p, g in mine] if images else []))
    return [found[i] for i in draw.permutation(num)]


def positions(tokens: np.ndarray, grids: Sequence[tuple[int, int, int]], num: int) -> np.ndarray:
    """Positions [3, num]: text counts on, an image has rows and columns; padding is 1."""
    found, at, start, left = [], 0, 0, iter(grids)
    while at < len(tokens):
        if tokens[at] == IMAGE:
            _, h, w = next(left)
            h, w = h // MERGE, w // MERGE
            rows, columns = np.divmod(np.arange(h * w), w)
            found.append(np.stack([rows * 0, rows, columns]) + start)
            at, start = at + h * w, start + max(h, w)
        else:
            found.append(np.full((3, 1), start))
            at, start = at + 1, start + 1
    whole = np.concatenate(found, 1)
    return np.pad(whole, ((0, 0), (0, num - whole.shape[1])), constant_values=1)


class Trainer(calls.Trainer):
    """Gives its model whole samples and their images on every stage.

    Args:
        form: how the model is called.
        seed: of the samples.
        layout: of the job.
        images: whether there are any.
        dealt: which part of how many of the samples this rank has.
        cuts_labels: labels and masks are given whole, and the model cuts them for context-parallel
            ranks and returns the mask, too.
    """

    def __init__(self, form, seed, layout, images=True, dealt=(0, 1), *, cuts_labels=False):
        self._has_images, self._dealt = images, dealt
        self._cuts_labels = cuts_labels
        self._patches: list[Tensor] = []
        super().__init__(form, seed, layout)

    def samples(self, seed: int, num: int) -> list[Any]:
        place, parts = self._dealt
        return samples(seed, parts * num, self._has_images)[place::parts]

    @property
    def num_patches(self) -> tuple[int, int]:
        """Patches of all images of the step, and of the different ones."""
        different = {one.numpy().tobytes(): len(one) for one in self._patches}
        return sum(map(len, self._patches)), sum(different.values())

    def batch_of(self, members: Any, number: int, multiple: int) -> dict[str, Any]:
        batch = super().batch_of(members, number, multiple)
        images = [one for _, _, seen in members for one in seen]
        self._patches += [patches for patches, _ in images]
        batch["pixels"] = torch.cat([p for p, _ in images]) if images else None
        batch["grids"] = torch.tensor([g for _, g in images]) if images else None
        num = batch["lengths"]
        columns = [
            positions(tokens[:-1], [g for _, g in seen], n)
            for (tokens, _, seen), n in zip(members, num, strict=True)
        ]
        packed = self.form.packed
        for name, rows in {
            "whole": [tokens[:-1] for tokens, _, _ in members],
            "whole_labels": [tokens[1:] for tokens, _, _ in members],
            "whole_mask": [trained[1:].astype(np.float64) for _, trained, _ in members],
        }.items():
            padded = [np.pad(one, (0, n - len(one))) for one, n in zip(rows, num, strict=True)]
            joined = np.concatenate(padded)[None] if packed else np.stack(padded)
            batch[name] = torch.from_numpy(joined)
        batch["positions"] = torch.from_numpy(
            np.concatenate(columns, 1)[:, None] if packed else np.stack(columns, 1)
        )
        return batch

    def step(self, iterator: Any, model: Any) -> Any:
        batch = next(iterator)
        given = {
            "input_ids": batch["whole"], "position_ids": batch["positions"],
            "pixel_values": batch["pixels"], "image_grid_thw": batch["grids"],
        }  # fmt: skip
        whole = self._cuts_labels
        if not self.form.logits:
            given["labels"] = batch["whole_labels" if whole else "labels"]
        if self.form.mask:
            given["loss_mask"] = batch["whole_mask" if whole else "loss_mask"]
        if self.form.packed:
            given["packed_seq_params"] = self._packing(batch)
        try:
            found = model(**given)
            if whole and self.layout.cp > 1:  # the mask is returned, cut
                found, _ = found
            return found, self.loss_of(batch)
        finally:
            self.ended.append(batch["number"])
