"""The shape of a model, and the named ones. [pure]"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_prefix.errors import UserError, shown
from megatron_prefix.plan.recurrent_spec import GatedDelta, Mamba, Recurrent

_SIZES = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "ffn_hidden_size",
    "max_position",
)
_MOST_LAYERS, _MOST_SIZE = 10_000, 10**9
_POSITIVE = ("rotary_base", "norm_eps")
_FROM_ZERO = ("init_std", "moe_aux_loss_coeff", "moe_z_loss_coeff")


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
                "is not supported: Megatron-Core has (1.0, 4.0, 8192) built in"
            )


@dataclass(frozen=True)
class ModelSpec:
    """A decoder of the Llama, Qwen and Nemotron-H families: RMSNorm, RoPE, GQA, SwiGLU.

    name: for reports.
    vocab_size: None takes the vocabulary of the rollouts; see `with_vocab`.
    kv_channels: the width of one attention head.
    ffn_hidden_size: the width of a dense layer's MLP.
    qk_layernorm: RMSNorm over each query and key head before RoPE (Qwen3).
    tie_embeddings: the output layer is the input embedding.
    add_qkv_bias: a bias on the query, key and value projections (Qwen2).
    init_std: standard deviation of randomly initialised weights.
    rope: whether attention turns queries and keys. rotary_percent: the share of a head that turns.
    output_gate: attention's output is gated (Qwen3-Next).
    squared_relu: the MLP is relu(x)^2 without a gate, not SwiGLU (Nemotron-H).
    recurrent: layers without attention; None where every layer has attention and an MLP.

    Mixture of experts, unused while num_experts is None:
    moe_ffn_hidden_size: the width of one expert. moe_top_k: experts a token is sent to.
    moe_normalize_top_k: the chosen experts' probabilities are scaled to sum to 1.
    moe_load_balancing: Megatron's moe_router_load_balancing_type. moe_aux_loss_coeff,
    moe_z_loss_coeff: weights of the auxiliary losses.
    moe_layers: one flag a layer, True where it has experts; None means all of them.
    moe_shared_width: width of an expert that all tokens go through, behind a gate; None: there is
    none.
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
    rope_scaling: RopeScaling | None = None
    qk_layernorm: bool = False
    tie_embeddings: bool = False
    norm_eps: float = 1e-6
    add_qkv_bias: bool = False
    init_std: float = 0.02
    num_experts: int | None = None
    moe_ffn_hidden_size: int | None = None
    moe_top_k: int = 2
    moe_normalize_top_k: bool = True
    moe_load_balancing: str = "aux_loss"
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float | None = None
    moe_layers: tuple[bool, ...] | None = None
    moe_shared_width: int | None = None
    rope: bool = True
    rotary_percent: float = 1.0
    output_gate: bool = False
    squared_relu: bool = False
    recurrent: Recurrent | None = None

    def __post_init__(self) -> None:
        for name in _SIZES:
            self._require_size(name, getattr(self, name))
        if self.num_layers > _MOST_LAYERS:
            raise UserError(
                f"model {shown(self.name)}: num_layers {self.num_layers} is more than"
                f" {_MOST_LAYERS}; give fewer"
            )
        if self.vocab_size is not None:
            self._require_size("vocab_size", self.vocab_size)
        self._check_numbers()
        if self.num_attention_heads % self.num_query_groups:
            raise UserError(
                f"model {self.name}: num_query_groups {self.num_query_groups} must divide "
                f"num_attention_heads {self.num_attention_heads}"
            )
        if self.kv_channels % 2:
            raise UserError(
                f"model {self.name}: kv_channels {self.kv_channels} must be even, RoPE turns pairs"
            )
        if self.num_experts is not None:
            self._check_experts(self.num_experts)
        if not 0 < self.rotary_percent <= 1:
            raise UserError(
                f"model {shown(self.name)}: rotary_percent {shown(self.rotary_percent)} must be"
                " above 0 and at most 1"
            )
        if self.pattern and len(self.pattern) != self.num_layers:
            raise UserError(
                f"model {shown(self.name)}: the hybrid pattern {self.pattern} has"
                f" {len(self.pattern)} symbols for {self.num_layers} layers; give one a layer"
            )

    def _require_size(self, name: str, value: Any) -> None:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not 1 <= value <= _MOST_SIZE:
            raise UserError(
                f"model {shown(self.name)}: {name} {shown(value)} must be a whole number from 1 to"
                f" {_MOST_SIZE}"
            )

    def _check_numbers(self) -> None:
        """Refuses NaN, infinities and signs that no weight, coefficient or base can have."""
        for name in (*_POSITIVE, *_FROM_ZERO):
            value = getattr(self, name)
            if value is None and name == "moe_z_loss_coeff":
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value < math.inf or (name in _POSITIVE and not value):
                least = "above 0" if name in _POSITIVE else "from 0"
                raise UserError(
                    f"model {shown(self.name)}: {name} {shown(value)} must be a finite number"
                    f" {least}"
                )

    def _check_experts(self, num_experts: int) -> None:
        self._require_size("num_experts", num_experts)
        self._require_size("moe_ffn_hidden_size", self.moe_ffn_hidden_size)
        if not 1 <= self.moe_top_k <= num_experts:
            raise UserError(
                f"model {self.name}: moe_top_k {self.moe_top_k} must be from 1 to num_experts "
                f"{num_experts}"
            )
        if self.moe_layers is not None and len(self.moe_layers) != self.num_layers:
            raise UserError(
                f"model {self.name}: moe_layers has {len(self.moe_layers)} flags for "
                f"{self.num_layers} layers; give one a layer"
            )

    @property
    def pattern(self) -> str:
        """Symbols of a HybridModel's layers; "" for a GPTModel."""
        return self.recurrent.pattern if self.recurrent is not None else ""

    @property
    def is_moe(self) -> bool:
        """Whether any layer has experts."""
        return self.num_experts is not None

    def with_vocab(self, smallest: int) -> ModelSpec:
        """This model for token ids below `smallest`; fills the vocabulary where it is open.

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
        num, changes = min(num_layers, self.num_layers), dict[str, Any]()
        if self.moe_layers is not None:
            changes["moe_layers"] = self.moe_layers[:num]
        if self.recurrent is not None:
            changes["recurrent"] = dataclasses.replace(self.recurrent, pattern=self.pattern[:num])
        return dataclasses.replace(self, num_layers=num, **changes)

    @property
    def num_different(self) -> int:
        """The fewest first layers among which is one of every kind that the model has."""
        kinds = [
            (self.kind(layer), self.has_mlp(layer), self.has_experts(layer))
            for layer in range(self.num_layers)
        ]
        return 1 + max(kinds.index(kind) for kind in kinds)

    def kind(self, layer: int) -> str:
        """What a layer (from 0) mixes positions with: "attention", "recurrent" or "" (nothing)."""
        if self.recurrent is None:
            return "attention"
        if self.recurrent.is_recurrent(layer):
            return "recurrent"
        return "" if self.pattern and self.pattern[layer] in "-E" else "attention"

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP or experts."""
        return not self.pattern or self.kind(layer) == ""

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's MLP is a mixture of experts."""
        if self.pattern:
            return self.pattern[layer] == "E"
        return self.is_moe and (self.moe_layers is None or self.moe_layers[layer])

    def mixer_parameters(self, layer: int) -> int:
        """Parameters of a layer's attention or recurrence, without norms and biases."""
        kind = self.kind(layer)
        if kind == "recurrent" and self.recurrent is not None:
            inner = self.recurrent.projected[0 if isinstance(self.recurrent, Mamba) else 2]
            wide = sum(self.recurrent.projected) + inner
            return wide * self.hidden_size + self.recurrent.conv_width * sum(
                self.recurrent.convolved
            )
        heads = (2 if self.output_gate else 1) * self.num_attention_heads
        both = heads + self.num_attention_heads + 2 * self.num_query_groups
        return self.hidden_size * self.kv_channels * both if kind else 0

    def layer_parameters(self, layer: int = 0) -> int:
        """Parameters of one decoder layer with all its experts, without norms and biases."""
        mixer = self.mixer_parameters(layer)
        if not self.has_mlp(layer):
            return mixer
        matrices = 2 if self.squared_relu else 3
        if not self.has_experts(layer):
            return mixer + matrices * self.hidden_size * self.ffn_hidden_size
        experts, width = self.num_experts or 0, self.moe_ffn_hidden_size or 0
        shared = matrices * self.moe_shared_width + 1 if self.moe_shared_width else 0
        return mixer + (experts * (matrices * width + 1) + shared) * self.hidden_size

    def parameters(self) -> int:
        """Parameters of the whole model, without norms and biases; an open vocabulary counts 0."""
        tables = (1 if self.tie_embeddings else 2) * (self.vocab_size or 0) * self.hidden_size
        return tables + sum(self.layer_parameters(layer) for layer in range(self.num_layers))


# The tiny ones have larger initial weights than real models, so that a wrong term in attention or
# gradients is visible. Real shapes: config.json of Meta-Llama-3-8B, Qwen3-0.6B, Qwen3-8B,
# Qwen3-30B-A3B, Qwen3.5-27B and Qwen3-Next-80B-A3B-Instruct. Of Qwen3.5-9B widths and number of
# layers are the defaults of transformers' Qwen3_5TextConfig (5.17), positions and rotary base those
# of Qwen3-Next.
PRESETS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        ModelSpec(
            name="tiny-llama",
            num_layers=4,
            hidden_size=64,
            num_attention_heads=4,
            num_query_groups=2,
            kv_channels=16,
            ffn_hidden_size=128,
            init_std=0.1,
        ),
        ModelSpec(
            name="tiny-qwen3",
            num_layers=4,
            hidden_size=64,
            num_attention_heads=4,
            num_query_groups=2,
            kv_channels=24,
            ffn_hidden_size=96,
            rotary_base=1e6,
            qk_layernorm=True,
            tie_embeddings=True,
            init_std=0.1,
        ),
        ModelSpec(
            name="tiny-moe",
            num_layers=4,
            hidden_size=64,
            num_attention_heads=4,
            num_query_groups=2,
            kv_channels=16,
            ffn_hidden_size=128,
            qk_layernorm=True,
            init_std=0.1,
            num_experts=8,
            moe_ffn_hidden_size=32,
            moe_top_k=2,
            moe_aux_loss_coeff=1e-2,
        ),
        ModelSpec(
            name="tiny-qwen3-next",
            num_layers=4,
            hidden_size=64,
            num_attention_heads=4,
            num_query_groups=2,
            kv_channels=16,
            ffn_hidden_size=96,
            rotary_percent=0.25,
            qk_layernorm=True,
            output_gate=True,
            init_std=0.1,
            recurrent=GatedDelta(key_heads=2, value_heads=4, key_dim=8, value_dim=8),
        ),
        ModelSpec(
            name="tiny-nemotron-h",
            num_layers=6,
            hidden_size=64,
            num_attention_heads=4,
            num_query_groups=2,
            kv_channels=16,
            ffn_hidden_size=128,
            rope=False,
            squared_relu=True,
            init_std=0.1,
            recurrent=Mamba("M-M*-M", heads=8, head_dim=16, state_dim=8, groups=2),
        ),
        ModelSpec(
            name="llama3-8b",
            num_layers=32,
            hidden_size=4096,
            num_attention_heads=32,
            num_query_groups=8,
            kv_channels=128,
            ffn_hidden_size=14336,
            vocab_size=128256,
            max_position=8192,
            rotary_base=500000.0,
            norm_eps=1e-5,
        ),
        ModelSpec(
            name="qwen3-0.6b",
            num_layers=28,
            hidden_size=1024,
            num_attention_heads=16,
            num_query_groups=8,
            kv_channels=128,
            ffn_hidden_size=3072,
            vocab_size=151936,
            max_position=40960,
            rotary_base=1e6,
            qk_layernorm=True,
            tie_embeddings=True,
        ),
        ModelSpec(
            name="qwen3-8b",
            num_layers=36,
            hidden_size=4096,
            num_attention_heads=32,
            num_query_groups=8,
            kv_channels=128,
            ffn_hidden_size=12288,
            vocab_size=151936,
            max_position=40960,
            rotary_base=1e6,
            qk_layernorm=True,
        ),
        ModelSpec(
            name="qwen3-30b-a3b",
            num_layers=48,
            hidden_size=2048,
            num_attention_heads=32,
            num_query_groups=4,
            kv_channels=128,
            ffn_hidden_size=6144,
            vocab_size=151936,
            max_position=40960,
            rotary_base=1e6,
            qk_layernorm=True,
            num_experts=128,
            moe_ffn_hidden_size=768,
            moe_top_k=8,
            moe_aux_loss_coeff=1e-3,
        ),
        ModelSpec(
            name="qwen3.5-9b",
            num_layers=32,
            hidden_size=4096,
            num_attention_heads=16,
            num_query_groups=4,
            kv_channels=256,
            ffn_hidden_size=12288,
            vocab_size=248320,
            max_position=262144,
            rotary_base=1e7,
            rotary_percent=0.25,
            qk_layernorm=True,
            output_gate=True,
            recurrent=GatedDelta(key_heads=16, value_heads=32, key_dim=128, value_dim=128),
        ),
        ModelSpec(
            name="qwen3.5-27b",
            num_layers=64,
            hidden_size=5120,
            num_attention_heads=24,
            num_query_groups=4,
            kv_channels=256,
            ffn_hidden_size=17408,
            vocab_size=248320,
            max_position=262144,
            rotary_base=1e7,
            rotary_percent=0.25,
            qk_layernorm=True,
            output_gate=True,
            recurrent=GatedDelta(key_heads=16, value_heads=48, key_dim=128, value_dim=128),
        ),
        ModelSpec(
            name="qwen3-next-80b-a3b",
            num_layers=48,
            hidden_size=2048,
            num_attention_heads=16,
            num_query_groups=2,
            kv_channels=256,
            ffn_hidden_size=5120,
            vocab_size=151936,
            max_position=262144,
            rotary_base=1e7,
            rotary_percent=0.25,
            qk_layernorm=True,
            output_gate=True,
            num_experts=512,
            moe_ffn_hidden_size=512,
            moe_top_k=10,
            moe_aux_loss_coeff=1e-3,
            moe_shared_width=512,
            recurrent=GatedDelta(key_heads=16, value_heads=32, key_dim=128, value_dim=128),
        ),
    )
}


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
