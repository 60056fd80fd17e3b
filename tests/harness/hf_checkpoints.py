"""Tiny Hugging Face checkpoints made by transformers, and what that library computes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

LENGTH, VOCAB = 24, 200
# Widths, epsilon and base that are no defaults, so that a model which ignores one is seen.
COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-2,
    "rope_theta": 50.0,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MOE = {"head_dim": 24, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
TIED = {"tie_word_embeddings": True}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", TIED),
    "llama-scaled": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", TIED),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen3-tied": ("Qwen3", {"head_dim": 24, **TIED}),
    "moe": ("Qwen3Moe", {**MOE, "norm_topk_prob": True}),
    "moe-unscaled": ("Qwen3Moe", {**MOE, "norm_topk_prob": False, "mlp_only_layers": [1]}),
}


def make(
    folder: Path, family: str, *, shard_size: str = "60KB", dtype: str = "float32", seed: int = 5
) -> Any:
    """Saves a checkpoint of one of FAMILIES, in several files, and returns transformers' model.

    Every weight is random, norms and biases too; skips the test where transformers is missing.
    """
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    transformers.utils.logging.disable_progress_bar()  # it would be taken for output of ours
    kind, changes = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(**{**COMMON, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.normal_(mean, 0.1, generator=generator)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard_size)
    return model.eval()


def tokens() -> torch.Tensor:
    """Two sequences, [2, LENGTH]."""
    return torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(7))


def logits_of(model: Any) -> torch.Tensor:
    """By transformers, [2, LENGTH, VOCAB]."""
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=tokens()).logits
    return found
