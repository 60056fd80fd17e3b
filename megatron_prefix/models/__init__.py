"""Megatron-Core GPT models by name or by a Hugging Face config.json.

presets: ModelSpec and the named models. hf: config.json -> ModelSpec. config: ModelSpec ->
TransformerConfig. weights: the same weights in every layout. build: model chunks and optimizer.
logprobs: log-probabilities over a vocabulary split by tensor parallelism.
"""
