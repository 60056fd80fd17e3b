"""The shape of a model, and the named ones of presets.toml. [pure]"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_prefix.errors import UserError, shown
from megatron_prefix.features.recurrent.kind import Recurrent
from megatron_prefix.layers.kind import Kind, Slot
from megatron_prefix.layers.model import behind_decoder, counts_tokens, layers_of
from megatron_prefix.layers.precision import BY_BLOCKS
from megatron_prefix.layers.table import SYMBOLS, kinds_of

if sys.version_info >= (3, 11):
    import tomllib as toml
else:
    import tomli as toml

_MOST_LAYERS, _MOST_SIZE = 10_000, 10**9
_POSITIVE = (
    *("rotary_base", "layernorm_epsilon", "rotary_scaling_factor", "beta_fast", "beta_slow"),
    *("moe_router_topk_scaling_factor", "activation_func_clamp_value"),
)
_FROM_ZERO = (
    *("init_method_std", "moe_aux_loss_coeff", "moe_z_loss_coeff", "mscale", "mscale_all_dim"),
    *("moe_router_bias_update_rate", "glu_linear_offset"),
)
_MAY_BE_NONE = (
    *("moe_z_loss_coeff", "moe_router_topk_scaling_factor", "activation_func_clamp_value"),
)
AHEAD = "mtp_use_repeated_layer", "mtp_detach_heads"
"""Fields of multi-token prediction that not every release of Megatron-Core has."""
LATENT = (
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("rope_type", "rotary_scaling_factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
)
"""Fields of Megatron's MLATransformerConfig alone, used with `multi_latent_attention`."""


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling of RoPE ("llama3" in a Hugging Face config).

    Megatron-Core takes only `factor` from outside; the rest is fixed there
    (models/common/embeddings/rotary_pos_embedding.py, `_apply_scaling`).
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        fixed = (self.low_freq_factor, self.high_freq_factor, self.original_max_position)
        if fixed != (1.0, 4.0, 8192):
            raise UserError(
                f"rope_scaling (low_freq_factor, high_freq_factor, original_max_position) {fixed} "
                "is not supported: Megatron-Core's are fixed at (1.0, 4.0, 8192)"
            )


@dataclass(frozen=True)
class YarnScaling:
    """YaRN of attention that is not latent (gpt-oss); its attention factor follows from `factor`.

    Megatron-Core takes it for position_embedding_type "yarn", from attributes of the config that
    are no fields of it (models/gpt/gpt_model.py).

    Attributes:
        rounds: where scaling begins and ends is rounded to whole dimensions.
    """

    factor: float
    original_max_position: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    rounds: bool = True

    def __post_init__(self) -> None:
        values = (self.factor, self.original_max_position, self.beta_fast, self.beta_slow)
        if not all(0 < value < math.inf for value in values):
            raise UserError(
                "rope_scaling (factor, original_max_position, beta_fast, beta_slow)"
                f" {values} must be finite numbers above 0"
            )


@dataclass(frozen=True)
class ModelSpec:
    """A decoder of the Llama, Qwen, Nemotron-H and DeepSeek families: RMSNorm, RoPE, SwiGLU.

    What is a field of Megatron's TransformerConfig has its name, meaning and default (0.16.1), so
    what reads a config by attribute reads a spec too. The other fields go to Megatron's models:

    name: for reports.
    vocab_size: None takes the vocabulary of the rollouts; see `with_vocab`.
    max_position: the longest sequence. rotary_base, rope_scaling: of RoPE.
    rope: whether attention turns queries and keys. rotary_percent: the share of a head that turns.
    quick_geglu: the gate of an MLP goes through x sigmoid(1.702 x) instead of SiLU (gpt-oss).
    tie_embeddings: the output layer is the input embedding.
    hybrid_override_pattern: of a HybridModel a symbol a layer: M (Mamba2), G (GatedDeltaNet),
    * (attention), - (MLP) or E (experts); "" for a GPTModel.

    Of Megatron's:
    kv_channels: the width of one attention head.
    ffn_hidden_size: the width of a dense layer's MLP.
    gated_linear_unit: the MLP is SwiGLU, else relu(x)^2 without a gate (Nemotron-H).
    glu_linear_offset: added to the up projection. activation_func_clamp_value: the largest number
    in the gate, and the largest and smallest in the up projection.
    qk_layernorm: RMSNorm over each query and key head before RoPE (Qwen3).
    add_qkv_bias: a bias on the query, key and value projections (Qwen2). add_bias_linear: on all
    projections, routers and experts included (gpt-oss); by default there is none, unlike there.
    softmax_type: "learnable": a learned score of no key, a head (sinks; gpt-oss).
    window_size: how many keys before and behind its own a query sees; None: all before it.
    window_attn_skip_freq: every n-th layer sees all keys before it, or a flag a layer.
    attention_output_gate: attention's output is gated (Qwen3-Next).
    multi_latent_attention: MLA (DeepSeek), of which qk_layernorm norms the latents. kv_channels and
    rope_scaling then mean nothing; every head has its own keys.
    q_lora_rank: the width of the queries' latent; None: they are projected at once.
    kv_lora_rank: of that of keys and values. v_head_dim: of a head's values.
    qk_head_dim, qk_pos_emb_head_dim: the widths of a head's keys without and with RoPE; the latter
    part is one for all heads.
    rope_type: of MLA, "rope" or "yarn", with rotary_scaling_factor,
    original_max_position_embeddings, beta_fast, beta_slow, mscale and mscale_all_dim.
    init_method_std: standard deviation of randomly initialised weights.
    layernorm_zero_centered_gamma: norms multiply by one plus their weight (Qwen3-Next).
    num_moe_experts: None if there are none; other fields of experts are then not used.
    moe_ffn_hidden_size: the width of one expert. moe_router_topk: experts a token is sent to.
    moe_router_pre_softmax: softmax over all experts, not over the chosen ones alone.
    moe_layer_freq: every n-th layer has experts, or a flag a layer.
    moe_shared_expert_intermediate_size: width of an expert that all tokens go through; None: there
    is none. moe_shared_expert_gate: its output is gated (Qwen3-Next).
    moe_router_score_function: "softmax" or "sigmoid" (DeepSeek-V3). moe_router_enable_expert_bias:
    with the latter, a bias on the scores that choose, moved after each step by
    moe_router_bias_update_rate.
    moe_router_num_groups, moe_router_group_topk: experts are chosen from so many of so many groups.
    moe_router_topk_scaling_factor: what weights of chosen experts are multiplied by.
    experimental_attention_variant: "gated_delta_net" puts GatedDeltaNet (linear_*) instead of
    attention in all layers but every `linear_attention_freq`-th.
    linear_num_key_heads, linear_num_value_heads: value heads share keys in groups.
    mamba_num_heads: None: as many as make twice the hidden size. mamba_num_groups: of B and C.
    mtp_num_layers: layers of multi-token prediction; None: there are none. In a hybrid model each
    is a stack of layers with symbols mtp_hybrid_override_pattern.
    mtp_use_repeated_layer: one such layer runs for every label (megatron-core 0.17).
    mtp_detach_heads: their loss trains nothing but them (megatron-core 0.19).
    fp8: "e4m3" or "hybrid": transformer-engine's linear layers compute in FP8, with scales by
    fp8_recipe, which must be "blockwise" or, on Blackwell, "mxfp8".
    """

    name: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    vocab_size: int | None = None
    max_position: int = 32768
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    rope: bool = True
    rope_scaling: RopeScaling | YarnScaling | None = None
    quick_geglu: bool = False
    tie_embeddings: bool = False
    hybrid_override_pattern: str = ""
    mtp_hybrid_override_pattern: str = ""
    layernorm_epsilon: float = 1e-6
    layernorm_zero_centered_gamma: bool = False
    init_method_std: float = 0.02
    qk_layernorm: bool = False
    add_qkv_bias: bool = False
    add_bias_linear: bool = False
    softmax_type: str = "vanilla"
    window_size: tuple[int, int] | None = None
    window_attn_skip_freq: int | tuple[int, ...] | None = None
    attention_output_gate: bool = False
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    rope_type: str = "yarn"
    rotary_scaling_factor: float = 40.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    gated_linear_unit: bool = True
    glu_linear_offset: float = 0.0
    activation_func_clamp_value: float | None = None
    num_moe_experts: int | None = None
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    moe_layer_freq: int | tuple[int, ...] = 1
    moe_router_topk: int = 2
    moe_router_pre_softmax: bool = False
    moe_router_score_function: str = "softmax"
    moe_router_enable_expert_bias: bool = False
    moe_router_bias_update_rate: float = 1e-3
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_topk_scaling_factor: float | None = None
    moe_router_load_balancing_type: str = "aux_loss"
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float | None = None
    experimental_attention_variant: str | None = None
    linear_attention_freq: int | None = None
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    mamba_state_dim: int = 128
    mamba_head_dim: int = 64
    mamba_num_groups: int = 8
    mamba_num_heads: int | None = None
    mtp_num_layers: int | None = None
    mtp_use_repeated_layer: bool = False
    mtp_detach_heads: bool = False
    fp8: str | None = None
    fp8_recipe: str = "delayed"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            given = getattr(self, field.name) is not None
            if field.type == "int" or (field.type == "int | None" and given):
                self._require_size(field.name)
        self._require(self.num_layers <= _MOST_LAYERS, f"num_layers {self.num_layers} is more than"
                      f" {_MOST_LAYERS}; give fewer")  # fmt: skip
        self._check_numbers()
        self._check_divisors("num_query_groups", "num_attention_heads")
        self._require(self.kv_channels % 2 == 0, f"kv_channels {self.kv_channels} must be even,"
                      " RoPE turns pairs")  # fmt: skip
        if self.num_moe_experts is not None:
            self._check_experts(self.num_moe_experts)
        self._require(0 < self.rotary_percent <= 1, f"rotary_percent {shown(self.rotary_percent)}"
                      " must be above 0 and at most 1")  # fmt: skip
        self._check_precision()
        self._check_windows()  # what the layers are depends on it
        self._check_recurrent()
        if self.multi_latent_attention:
            self._check_latent()

    def _require(self, fine: bool, problem: str) -> None:
        if not fine:
            raise UserError(f"model {shown(self.name)}: {problem}")

    def _require_size(self, name: str) -> None:
        value = getattr(self, name)
        self._require(
            type(value) is int and 1 <= value <= _MOST_SIZE,
            f"{name} {shown(value)} must be an integer from 1 to {_MOST_SIZE}",
        )

    def _check_divisors(self, divisor: str, number: str) -> None:
        few, many = getattr(self, divisor), getattr(self, number)
        self._require(many % few == 0, f"{divisor} {few} must divide {number} {many}")

    def _check_numbers(self) -> None:
        """Refuses NaN, infinities and signs that no weight, coefficient or base can have."""
        for name in (*_POSITIVE, *_FROM_ZERO):
            value = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            fine = number and 0 <= value < math.inf and (name not in _POSITIVE or value > 0)
            least = "above 0" if name in _POSITIVE else "from 0"
            self._require(fine, f"{name} {shown(value)} must be a finite number {least}")

    def _check_experts(self, num_experts: int) -> None:
        self._require_size("moe_ffn_hidden_size")
        self._require(
            1 <= self.moe_router_topk <= num_experts,
            f"moe_router_topk {self.moe_router_topk} must be from 1 to num_moe_experts"
            f" {num_experts}",
        )
        if isinstance(self.moe_layer_freq, int):
            self._require_size("moe_layer_freq")
        else:
            flags = len(self.moe_layer_freq)
            self._require(flags == self.num_layers, f"moe_layer_freq has {flags} flags for"
                          f" {self.num_layers} layers; give one a layer")  # fmt: skip

    def _check_precision(self) -> None:
        formats = (None, "e4m3", "hybrid")
        self._require(self.fp8 in formats, f"fp8 {shown(self.fp8)} is not supported; use 'e4m3' or"
                      " 'hybrid'")  # fmt: skip
        self._require(
            self.fp8 is None or self.fp8_recipe in BY_BLOCKS,
            f"fp8_recipe {shown(self.fp8_recipe)} is not supported; use one of"
            f" {', '.join(BY_BLOCKS)}",
        )

    def _check_windows(self) -> None:
        """Of attention, and its softmax."""
        kinds, every = ("vanilla", "learnable"), self.window_attn_skip_freq
        self._require(self.softmax_type in kinds, f"softmax_type {shown(self.softmax_type)} is not"
                      f" supported; use one of {', '.join(kinds)}")  # fmt: skip
        size = self.window_size
        fine = size is None or (
            len(size) == 2 and type(size[0]) is int and 0 <= size[0] <= _MOST_SIZE and size[1] == 0
        )
        self._require(fine, f"window_size {shown(size)} must be (N, 0), of N keys before a query's"
                      " own")  # fmt: skip
        if isinstance(every, tuple | list):
            self._require(len(every) == self.num_layers, f"window_attn_skip_freq has {len(every)}"
                          f" flags for {self.num_layers} layers; give one a layer")  # fmt: skip
            self._require(not self.mtp_num_layers, "window_attn_skip_freq has no flag for the layer"
                          " of multi-token prediction, and Megatron asks for one; give a number"
                          " instead, or mtp_num_layers=none")  # fmt: skip
        elif every is not None:
            self._require_size("window_attn_skip_freq")

    def _check_latent(self) -> None:
        """Refuses what Megatron's MLA would leave out without a word, or fail on."""
        self._require(self.rope_type in ("rope", "yarn"), f"rope_type {shown(self.rope_type)} is"
                      " not supported; use 'rope' or 'yarn'")  # fmt: skip
        self._require(self.qk_pos_emb_head_dim % 2 == 0, "qk_pos_emb_head_dim"
                      f" {self.qk_pos_emb_head_dim} must be even, RoPE turns pairs")  # fmt: skip
        self._require(
            self.num_query_groups == self.num_attention_heads,
            f"num_query_groups {self.num_query_groups} must be num_attention_heads"
            f" {self.num_attention_heads}, as in MLA every head has its own keys",
        )
        others = (
            *("add_qkv_bias", "add_bias_linear", "attention_output_gate", "rope_scaling"),
            "window_size",
            *("hybrid_override_pattern", "experimental_attention_variant"),
        )
        given = [name for name in others if getattr(self, name)]
        self._require(not given, f"multi_latent_attention has no {', '.join(given)}; leave one of"
                      " them out")  # fmt: skip
        self._require(
            self.rope, "multi_latent_attention has no form without RoPE; set rope to true"
        )

    def _check_recurrent(self) -> None:
        variant, pattern = self.experimental_attention_variant, self.hybrid_override_pattern
        self._require(
            variant in (None, "gated_delta_net"),
            f"experimental_attention_variant {shown(variant)} is not supported; use"
            " 'gated_delta_net'",
        )
        self._require(
            not (variant and pattern),
            "experimental_attention_variant and hybrid_override_pattern exclude each other; set the"
            " first to none and G in the pattern",
        )
        self._require(
            bool(pattern and self.mtp_num_layers) == bool(self.mtp_hybrid_override_pattern),
            "mtp_hybrid_override_pattern goes with hybrid_override_pattern and mtp_num_layers; set"
            " all three or leave it out",
        )
        for name in AHEAD:
            self._require(
                bool(self.mtp_num_layers) or not getattr(self, name),
                f"{name} goes with mtp_num_layers; set both or leave it out",
            )
        if variant:
            self._require_size("linear_attention_freq")
        if pattern:
            self._check_pattern(pattern)
            self._check_symbols("mtp_hybrid_override_pattern", self.mtp_hybrid_override_pattern)
        for kind in self.recurrent:
            if getattr(self, kind.divides[1]) is not None:
                self._check_divisors(*kind.divides)
            self._require(kind.shape(self).conv_width > 1, "linear_conv_kernel_dim 1 sees no other"
                          " position; use 2 or more")  # fmt: skip

    def _check_symbols(self, name: str, pattern: str) -> None:
        wrong = sorted(set(pattern) - SYMBOLS)
        kinds = kinds_of(self, "".join(SYMBOLS))
        # The last of a symbol is the plain one.
        names = {kind.symbol: kind.name for kind in kinds if kind.symbol}
        known = ", ".join(f"{symbol} {name}" for symbol, name in names.items())
        self._require(not wrong, f"{name} {shown(pattern)} has {', '.join(wrong)}: use {known}")

    def _check_pattern(self, pattern: str) -> None:
        self._check_symbols("hybrid_override_pattern", pattern)
        kinds = kinds_of(self, "".join(SYMBOLS))
        mixers = {kind.symbol for kind in kinds if kind.slot is Slot.MIXER}
        self._require(bool(set(pattern) & mixers), f"hybrid_override_pattern {shown(pattern)}"
                      " has no layer that mixes positions: add one of M G *")  # fmt: skip
        self._require(
            len(pattern) == self.num_layers,
            f"hybrid_override_pattern {shown(pattern)} has {len(pattern)} symbols for"
            f" {self.num_layers} layers; give one a layer",
        )

    @property
    def is_moe(self) -> bool:
        """Whether any layer has experts."""
        return self.num_moe_experts is not None

    @property
    def is_hybrid_model(self) -> bool:
        """Whether it is a HybridModel, whose layers are a mixer, an MLP or experts alone."""
        return self.hybrid_override_pattern != ""

    @functools.cached_property
    def layers(self) -> list[tuple[Kind, ...]]:
        """What fills the slots of every layer."""
        return layers_of(self)

    @property
    def needs_tails(self) -> bool:
        """Whether what is behind a rollout's last loss has an effect on a training step, as a run
        decides it (run/read/read_calls.py, `ReadCalls.up_to_loss`)."""
        return counts_tokens(self) or bool(self.mtp_num_layers)

    @property
    def recurrent(self) -> tuple[Recurrent, ...]:
        """The recurrent kinds that the layers have."""
        kinds = (kind for layer in self.layers for kind in layer)
        return tuple(dict.fromkeys(kind for kind in kinds if isinstance(kind, Recurrent)))

    def with_vocab(self, smallest: int) -> ModelSpec:
        """This model for token ids below `smallest`; fills the vocabulary if it is open.

        Raises:
            UserError: the model's own vocabulary is smaller.
        """
        if self.vocab_size is None:
            return dataclasses.replace(self, vocab_size=smallest)
        if self.vocab_size < smallest:
            raise UserError(
                f"model {self.name} has {self.vocab_size} tokens in its vocabulary, but the "
                f"rollouts hold token {smallest - 1}; use the model that made the rollouts, or a "
                "tiny preset, which takes any vocabulary"
            )
        return self

    def first(self, num_layers: int) -> ModelSpec:
        """The model with its first layers only, at most all of them."""
        num, frequency = min(num_layers, self.num_layers), self.moe_layer_freq
        windows = self.window_attn_skip_freq
        return dataclasses.replace(
            self,
            num_layers=num,
            moe_layer_freq=frequency if isinstance(frequency, int) else frequency[:num],
            window_attn_skip_freq=windows[:num] if isinstance(windows, tuple) else windows,
            hybrid_override_pattern=self.hybrid_override_pattern[:num],
        )

    @property
    def num_different(self) -> int:
        """The fewest first layers among which is one of every kind that the model has."""
        return 1 + max(map(self.layers.index, self.layers))

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's MLP is a mixture of experts."""
        return self.layers[layer][-1].symbol == "E"

    def layer_parameters(self, layer: int = 0) -> int:
        """Parameters of one decoder layer with all its experts, without norms and biases."""
        return sum(kind.parameters(self) for kind in self.layers[layer])

    def parameters(self) -> int:
        """Parameters of the whole model, without norms and biases; an open vocabulary counts 0."""
        tables = (1 if self.tie_embeddings else 2) * (self.vocab_size or 0) * self.hidden_size
        layers = sum(self.layer_parameters(layer) for layer in range(self.num_layers))
        behind = behind_decoder(self)[: 1 if self.mtp_use_repeated_layer else None]
        ahead = sum(kind.parameters(self) for layer in behind for kind in layer)
        return tables + layers + ahead


def _presets() -> dict[str, ModelSpec]:
    text = Path(__file__).with_name("presets.toml").read_text(encoding="utf-8")
    models = toml.loads(text)
    for fields in models.values():
        fields |= {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        if "rope_scaling" in fields:
            fields["rope_scaling"] = YarnScaling(**fields["rope_scaling"])
    return {name: ModelSpec(name, **fields) for name, fields in models.items()}


PRESETS = _presets()
"""The models of presets.toml, by name."""


def _exists(path: str) -> bool:
    """Whether there is such a file or folder; no name that a file cannot have is one."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # too long, or with a zero byte
        return False


def resolve(name_or_path: str, **overrides: Any) -> ModelSpec:
    """A preset by name, or a Hugging Face config.json (or the folder that holds it) by path.

    Args:
        overrides: fields of `ModelSpec` to change, e.g. `num_layers=2` or, to make the tiny
            Llama's computation dominate on a CPU, `hidden_size=512, num_attention_heads=8,
            kv_channels=64, ffn_hidden_size=1536, init_std=0.03`.

    Raises:
        UserError: neither a preset nor a path, an unknown field, or values that contradict.
    """
    if name_or_path in PRESETS:
        spec = PRESETS[name_or_path]
    elif _exists(name_or_path):
        from megatron_prefix.lab.models import hf

        spec = hf.load(name_or_path)
    else:
        raise UserError(
            f"model {shown(name_or_path)} is neither a preset ({', '.join(PRESETS)}) nor the path"
            " of a Hugging Face config.json"
        )
    fields = [field.name for field in dataclasses.fields(ModelSpec)]
    for name in overrides:
        if name not in fields:
            raise UserError(f"model field {name!r} does not exist; fields: {', '.join(fields)}")
    num_layers = overrides.get("num_layers")
    if type(num_layers) is int and 0 < num_layers < spec.num_layers:
        spec = spec.first(num_layers)
    return dataclasses.replace(spec, **overrides)
