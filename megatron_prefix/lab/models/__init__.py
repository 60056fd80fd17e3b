"""Megatron-Core GPT models by name or by a Hugging Face config.json.

presets: ModelSpec and the named models. old_names: its fields as they were called before. hf:
config.json -> ModelSpec (hf_config: its fields; hf_deepseek, hf_nemotron, hf_gpt_oss: families of
their own). config: ModelSpec -> TransformerConfig. weights: the same random weights in every
layout. hf_weights: those of a Hugging Face checkpoint (hf_tensors: which tensors make up a
parameter). shards: slices of safetensors files. build: model chunks and optimizer. logprobs:
log-probabilities over a vocabulary split by tensor parallelism.
"""
