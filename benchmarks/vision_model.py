"""A vision-language model of the shape of Qwen3-VL, of parts of torch and Megatron-Core alone.

The tower ("Qwen3-VL Technical Report", section 2) is a plain one: patches see those of their image,
four neighbours become a row of the language model, and its earlier layers give rows that the
language model's first ones add (deepstack). The language model is called as by mbridge and
Megatron-Bridge: embeddings, three positions a token, the mask of images and their deepstack rows.
Classes have the names of mbridge's: megatron_prefix/features/vision/models.py knows models by them.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from megatron.core import tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from megatron_prefix.lab.models.build import block_spec, exact_loss

MERGE = 4
"""Patches that become one row."""


class Sizes(NamedTuple):
    """Of a tower. `deep`: the layers whose output becomes deepstack rows."""

    depth: int
    hidden: int
    heads: int
    intermediate: int
    patch: int
    deep: tuple[int, ...]

    def flops(self, patches: int, width: int) -> float:
        """Of one image's forward, its rows `width` wide: matrix products, attention included."""
        layer = 4 * self.hidden**2 + 2 * self.hidden * self.intermediate + 2 * patches * self.hidden
        merged = MERGE * self.hidden
        merger = (1 + len(self.deep)) * merged * (merged + width) / MERGE
        return 2.0 * patches * (self.depth * layer + self.patch * self.hidden + merger)


SIZES = {
    "qwen3-vl-8b": Sizes(27, 1152, 16, 4304, 3 * 2 * 16 * 16, (8, 16, 24)),
    "tiny": Sizes(4, 32, 2, 48, 12, (0, 1, 2)),
}


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions of a tower: [..., patches, width] by angles [patches, width / 2]."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    one, other = x.chunk(2, -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


class Layer(nn.Module):
    """Of the tower: [images, patches, hidden]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, width = sizes.heads, sizes.hidden
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1 = nn.Linear(width, sizes.intermediate)
        self.fc2 = nn.Linear(sizes.intermediate, width)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """See the class."""
        parts = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        found = scaled_dot_product_attention(turned(query, angles), turned(key, angles), value)
        x = x + self.proj(found.transpose(1, 2).flatten(2))
        return x + self.fc2(gelu(self.fc1(self.mlp_norm(x)), approximate="tanh"))


class Merger(nn.Module):
    """Neighbouring patches to rows of the language model: [images, patches, hidden] -> [rows,
    width]."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(MERGE * hidden)
        self.fc1 = nn.Linear(MERGE * hidden, MERGE * hidden)
        self.fc2 = nn.Linear(MERGE * hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        rows = x.reshape(-1, self.fc1.in_features)
        return self.fc2(gelu(self.fc1(self.norm(rows))))


class Tower(nn.Module):
    """Patches [n, patch] of images [1, h, w] of one size -> rows [n / 4, width], and as many of
    each deepstack layer. Four patches of a row lie one behind the other."""

    def __init__(self, sizes: Sizes, width: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed = nn.Linear(sizes.patch, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.depth))
        self.merger = Merger(sizes.hidden, width)
        self.deep = nn.ModuleList(Merger(sizes.hidden, width) for _ in sizes.deep)

    def forward(self, hidden_states: Tensor, grid_thw: Tensor) -> tuple[Tensor, list[Tensor]]:
        """See the class."""
        x = self.embed(hidden_states.to(self.embed.weight.dtype))
        x = x.unflatten(0, (len(grid_thw), -1))
        angles, rows = self._angles(grid_thw[0].tolist(), x.device), {}
        for number, layer in enumerate(self.layers):
            x = layer(x, angles)
            if number in self.sizes.deep:
                rows[number] = x
        deep = zip(self.deep, rows.values(), strict=True)
        return self.merger(x), [merger(one) for merger, one in deep]

    def _angles(self, grid: list[int], device: torch.device) -> Tensor:
        """[patches, width of a head / 2]: one half by the row, one by the column."""
        num = self.sizes.hidden // self.sizes.heads // 4
        speeds = 1e4 ** (-torch.arange(num, device=device) / num)
        place = torch.cartesian_prod(*(torch.arange(n, device=device) for n in grid[1:]))
        blocks = place.unflatten(0, (grid[1] // 2, 2, grid[2] // 2, 2)).transpose(1, 2)
        return (blocks.reshape(-1, 2, 1) * speeds).flatten(1)


class Rotary(MultimodalRotaryEmbedding):
    """The three positions [3, 1, positions] take turns along the width."""

    def forward(self, position_ids: Tensor, mrope_section: list[int], **_: Any) -> Tensor:
        """A row a position, of the whole call: [positions, 1, 1, width]."""
        angles = position_ids.float()[..., None] * self.inv_freq.to(position_ids.device)
        table = angles[0].clone()
        for axis in (1, 2):
            turns = slice(axis, 3 * mrope_section[axis], 3)
            table[..., turns] = angles[axis][..., turns]
        return torch.cat([table, table], -1)[..., None, :].transpose(0, 1).contiguous()


class Attention(SelfAttention):
    """Megatron's, whose rotary table has a row for every position of the call."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: Any = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Any:
        """Hidden states [positions, 1, hidden size]."""
        query, key, value = self.get_query_key_value_tensors(hidden_states, None)
        query, key = (
            apply_rotary_pos_emb(x, rotary_pos_emb, self.config, cp_group=self.pg_collection.cp)
            for x in (query, key)
        )
        if packed_seq_params is not None:
            query, key, value = (x.squeeze(1) for x in (query, key, value))
        found = self.core_attention(
            query, key, value, attention_mask, attn_mask_type=self.attn_mask_type,
            packed_seq_params=packed_seq_params,
        )  # fmt: skip
        if packed_seq_params is not None:
            found = found.reshape(len(found), 1, -1)
        return self.linear_proj(found)


class Block(TransformerBlock):
    """Its first layers' outputs get deepstack rows."""

    def forward(
        self,
        *args: Any,
        visual_pos_masks: Tensor | None = None,
        deepstack_visual_embeds: Any = None,
        **named: Any,
    ) -> Any:
        """Megatron's; the mask of images is [1, positions]."""
        handles = []
        if visual_pos_masks is not None:
            places = visual_pos_masks[0].nonzero()[:, 0]
            for layer, rows in zip(self.layers, deepstack_visual_embeds):  # noqa: B905
                added = functools.partial(_added, places, rows)
                handles.append(layer.register_forward_hook(added))
        try:
            return super().forward(*args, **named)
        finally:
            for handle in handles:
                handle.remove()


def _added(places: Tensor, rows: Tensor, _: Any, __: Any, out: Any) -> Any:
    return out[0].index_add(0, places, rows.unsqueeze(1)), *out[1:]


class LanguageModel(GPTModel):
    """GPTModel with that block and that table."""

    block: type = Block
    rotary: type = Rotary

    def __init__(self, config: Any, spec: Any, **options: Any) -> None:
        super().__init__(config, spec, **options)
        self.decoder = self.block(
            config, spec, pre_process=self.pre_process, post_process=self.post_process,
            pg_collection=self.pg_collection,
        )  # fmt: skip
        self.rotary_pos_emb = self.rotary(
            config.kv_channels, options["rotary_percent"], rotary_base=options["rotary_base"],
            cp_group=self.pg_collection.cp,
        )  # fmt: skip

    def forward(
        self,
        *args: Any,
        visual_pos_masks: Any = None,
        deepstack_visual_embeds: Any = None,
        **named: Any,
    ) -> Any:
        """Megatron's; what the decoder adds goes along to it."""
        more = {
            "visual_pos_masks": visual_pos_masks,
            "deepstack_visual_embeds": deepstack_visual_embeds,
        }
        given = {name: value for name, value in more.items() if value is not None}
        block = {**given, **(named.pop("extra_block_kwargs", None) or {})}
        return super().forward(*args, extra_block_kwargs=block, **named)


_NAMES = {
    Tower: "vision_model.Qwen3VLVisionModel",
    Rotary: "rope_utils.Qwen3VLMultimodalRotaryEmbedding",
    Attention: "attention.Qwen3VLSelfAttention",
    LanguageModel: "gpt_model.Qwen3VLGPTModel",
}
for _class, _name in _NAMES.items():
    _file, _class.__qualname__ = _name.split(".")
    _class.__module__ = f"mbridge.models.qwen3_vl.{_file}"


class VisionLanguage(MegatronModule):
    """A tower and a language model, whose parameters have the names of a GPTModel's.

    Args:
        recipe: of the language model (lab/models/build.py).
        sizes: of the tower.
        options: of GPTModel.
    """

    def __init__(self, recipe: Any, sizes: Sizes, options: dict[str, Any]) -> None:
        config = recipe.config
        super().__init__(config=config)
        self.pre_process, self.post_process = options["pre_process"], options["post_process"]
        self.vision_model = None
        if self.pre_process:
            with recipe.device:
                self.vision_model = Tower(sizes, config.hidden_size).to(config.params_dtype)
        spec = block_spec(config, recipe.engine, None)
        for layer in spec.layer_specs:
            layer.submodules.self_attention.module = Attention
        inner = LanguageModel(
            config, spec, scatter_embedding_sequence_parallel=False,
            **{**options, "position_embedding_type": "mrope"},
        )  # fmt: skip
        if recipe.exact:
            inner.compute_language_model_loss = types.MethodType(exact_loss, inner)
        self.language_model, self.pg_collection = inner, inner.pg_collection
        self.vocab_size, self.model_type = inner.vocab_size, ModelType.encoder_or_decoder
        self.share_embeddings_and_output_weights = inner.share_embeddings_and_output_weights

    @property
    def decoder(self) -> Any:
        """The language model's."""
        return self.language_model.decoder

    def shared_embedding_or_output_weight(self) -> Any:
        """The language model's."""
        return self.language_model.shared_embedding_or_output_weight()

    def set_input_tensor(self, tensor: Any) -> None:
        """The language model's."""
        self.language_model.set_input_tensor(tensor)

    def named_parameters(self, *args: Any, **named: Any) -> Iterator[tuple[str, Any]]:
        """See the class."""
        for name, parameter in super().named_parameters(*args, **named):
            yield name.removeprefix("language_model."), parameter

    def forward(
        self, tokens: Tensor, position_ids: Tensor, images: Tensor, pixels: Tensor, grids: Tensor,
        **named: Any,
    ) -> Any:  # fmt: skip
        """Tokens [1, positions], of which `images` [1, positions] are taken from `pixels`."""
        given = dict[str, Any]()
        if self.vision_model is not None:
            given = self._embedded(tokens, images, pixels, grids)
        return self.language_model(
            input_ids=None, position_ids=position_ids, attention_mask=None, **given, **named
        )

    def _embedded(
        self, tokens: Tensor, images: Tensor, pixels: Tensor, grids: Tensor
    ) -> dict[str, Any]:
        """What the first stage's language model is given: rows of this rank.

        Each sequence-parallel rank runs the whole tower, and gets the whole gradient of what it
        scatters.
        """
        seen, deep = self.vision_model(hidden_states=pixels, grid_thw=grids)  # type: ignore[misc]
        rows = self.language_model.embedding(input_ids=tokens, position_ids=None)
        places = images[0].nonzero()[:, 0]
        rows = rows.index_copy(0, places, seen.unsqueeze(1))
        if self.config.sequence_parallel:
            scattered = tensor_parallel.scatter_to_sequence_parallel_region
            empty, tp = torch.zeros_like(rows), self.pg_collection.tp
            images = images.chunk(tp.size(), 1)[tp.rank()]
            deep = [
                scattered(empty.index_copy(0, places, one.unsqueeze(1)))[images[0], 0]
                for one in deep
            ]
            rows = scattered(rows)
        return {
            "decoder_input": rows, "visual_pos_masks": images, "deepstack_visual_embeds": deep,
        }  # fmt: skip


def model_of(sizes: Sizes, recipe: Any, _: int | None, options: dict[str, Any]) -> VisionLanguage:
    """In the place of `_gpt_model` of lab/models/build.py."""
    return VisionLanguage(recipe, sizes, options)
