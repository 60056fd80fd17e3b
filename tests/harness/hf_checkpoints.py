"""Tiny Hugging Face checkpoints made by transformers, and what that library computes with them."""

import pytest
import torch

LENGTH, VOCAB = 24, 200
# Widths, epsilon and base that are no defaults, so that a model which ignores one is seen.
COMMON = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": VOCAB, "rms_norm_eps": 1e-2, "rope_theta": 50.0,
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
MOE = {"head_dim": 24, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "moe_intermediate_size": 32, "n_routed_experts": 8,
    "num_experts_per_tok": 4,
}  # fmt: skip
DEEPSEEK = {**LATENT, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
YARN = {
    "rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 1.5, "beta_slow": 0.2, "mscale": 0.7, "mscale_all_dim": 1.3,
}  # fmt: skip
HALF_YARN = {name: value for name, value in YARN.items() if not name.startswith("mscale")}
MOONLIGHT = {
    "q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "rms_norm_eps": 1e-6,
}  # fmt: skip
DELTA = {
    "head_dim": 24, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 3,
}  # fmt: skip
CENTERED = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe")
"""Whose norms multiply by one plus their weight, but for those of linear attention."""
DELTA_MOE = {**DELTA, **MOE, "shared_expert_intermediate_size": 40}
MAMBA = {
    "hybrid_override_pattern": "M-M*-M", "head_dim": 24, "ssm_state_size": 8, "mamba_num_heads": 8,
    "mamba_head_dim": 16, "n_groups": 2,
}  # fmt: skip
MAMBA_MOE = {
    **MAMBA, "hybrid_override_pattern": "MEM*-E", "n_routed_experts": 8, "num_experts_per_tok": 4,
    "n_group": 4, "topk_group": 2, "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 40, "routed_scaling_factor": 2.5,
}  # fmt: skip
GPT_OSS = {
    "head_dim": 24, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6,
    "swiglu_limit": 0.5, "rope_parameters": {**HALF_YARN, "truncate": False},
}  # fmt: skip
TIED = {"tie_word_embeddings": True}
FAMILIES = {
    "llama": ("Llama", {}), "llama-tied": ("Llama", TIED),
    "llama-scaled": ("Llama", {"rope_parameters": LLAMA3_ROPE}), "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", TIED), "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen3-tied": ("Qwen3", {"head_dim": 24, **TIED}),
    "moe": ("Qwen3Moe", {**MOE, "norm_topk_prob": True}),
    "moe-unscaled": ("Qwen3Moe", {**MOE, "norm_topk_prob": False, "mlp_only_layers": [1]}),
    "deepseek": ("DeepseekV3", {**DEEPSEEK, "rope_parameters": YARN}),
    "deepseek-half-yarn": ("DeepseekV3", {**DEEPSEEK, "rope_parameters": HALF_YARN}),
    "moonlight": ("DeepseekV3", {**DEEPSEEK, **MOONLIGHT}),
    "glm-lite": ("Glm4MoeLite", {**LATENT, "v_head_dim": 28}),
    "qwen3-next": ("Qwen3Next", DELTA_MOE), "qwen3.5": ("Qwen3_5", DELTA),
    "qwen3.5-moe": ("Qwen3_5Moe", DELTA_MOE), "gpt-oss": ("GptOss", GPT_OSS),
    "nemotron-h": ("NemotronH", MAMBA), "nemotron-h-moe": ("NemotronH", MAMBA_MOE),
}  # fmt: skip


def make(folder, family, *, shard_size="60KB", dtype="float32", seed=5):
    """Saves a checkpoint of one of FAMILIES, in several files, and returns transformers' model.

    Every weight is random, norms and biases too; skips the test where transformers is missing.
    """
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    transformers.utils.logging.disable_progress_bar()  # it would be taken for output of ours
    kind, changes = FAMILIES[family]
    config = _config(transformers, kind, changes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = name.endswith(("norm.weight", "norm_f.weight"))
            mean = float(norm and (kind not in CENTERED or "linear_attn" in name))
            parameter.normal_(mean, 0.1, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1, generator=generator)
    for name, module in model.named_modules():
        if name.endswith("_a_layernorm"):  # here 1e-6 whatever the config says
            module.variance_epsilon = config.rms_norm_eps
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard_size)
    return model.eval()


def _config(transformers, kind, changes):
    names = f"{kind}TextConfig", f"{kind}Config"
    made = next(getattr(transformers, name) for name in names if hasattr(transformers, name))
    values = {**COMMON, **changes}
    if kind == "NemotronH":  # it has layers as its pattern says, no RoPE and one epsilon
        for name in ("num_hidden_layers", "rope_theta", "rms_norm_eps"):
            del values[name]
    return made(**values)


def tokens():
    return torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(7))


def logits_of(model):
    """By transformers, [2, LENGTH, VOCAB]."""
    with torch.no_grad():
        return model(input_ids=tokens()).logits
