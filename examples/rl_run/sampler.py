"""Samples answers from the model that is trained, with Megatron's own K/V cache.

Every prompt runs forward once; its K/V are then copied for all of its answers, which grow one
token at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from torch import Tensor


@dataclass(frozen=True)
class Answers:
    """Of a batch of prompts; `most` tokens are room for each.

    Attributes:
        tokens: int64 [answers, most]; those of a prompt are neighbours.
        lengths: int64 [answers], the last token included.
        entropy: mean over all sampled tokens, in nats.
    """

    tokens: Tensor
    lengths: Tensor
    entropy: float

    def lists(self) -> list[list[int]]:
        """Every answer as it ended."""
        rows = zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)
        return [tokens[:length] for tokens, length in rows]


@torch.no_grad()
def sample(
    model: Any, prompts: Tensor, copies: int, most: int, end: int, draw: torch.Generator
) -> Answers:
    """Samples several answers to every prompt, at temperature 1.

    Args:
        model: a GPTModel on one rank.
        prompts: int64 [prompts, length], all of one length.
        copies: answers to each.
        most: tokens of an answer.
        end: the token that ends one.
        draw: on the model's device.
    """
    length, total = prompts.shape[1], prompts.shape[1] + most
    tokens, entropies = [], []
    with _answering(model):
        cache = StaticInferenceContext(len(prompts), total)
        logits = _next(model, prompts, cache).repeat_interleave(copies, 0)
        cache = _repeated(cache, copies, length)
        alive = torch.ones(len(logits), dtype=torch.bool, device=prompts.device)
        lived = []
        for number in range(most):
            logs = logits.float().log_softmax(-1)
            drawn = torch.multinomial(logs.exp(), 1, generator=draw)
            tokens.append(torch.where(alive, drawn[:, 0], end))
            entropies.append(-(logs.exp() * logs).sum(-1) * alive)
            lived.append(alive)
            alive = alive & (drawn[:, 0] != end)
            if number + 1 < most:
                logits = _next(model, tokens[-1][:, None], cache)
                cache.sequence_len_offset += 1
    lengths = torch.stack(lived, 1).sum(1)
    entropy = torch.stack(entropies, 1).sum() / lengths.sum()
    return Answers(torch.stack(tokens, 1), lengths, float(entropy))


def _next(model: Any, tokens: Tensor, cache: StaticInferenceContext) -> Tensor:
    """Logits [batch, vocabulary] behind the last of tokens [batch, length]."""
    first = cache.sequence_len_offset
    positions = torch.arange(first, first + tokens.shape[1], device=tokens.device)
    logits = model(
        tokens, positions.expand_as(tokens), None, inference_context=cache,
        runtime_gather_output=True,
    )  # fmt: skip
    return logits[:, -1]


def _repeated(cache: StaticInferenceContext, copies: int, length: int) -> StaticInferenceContext:
    """A cache of so many positions in which every row stands several times, one after another."""
    wide = StaticInferenceContext(cache.max_batch_size * copies, cache.max_sequence_length)
    wide.sequence_len_offset = length
    for layer, memory in cache.key_value_memory_dict.items():
        wide.key_value_memory_dict[layer] = tuple(
            rows.repeat_interleave(copies, dim=1) for rows in memory
        )
    wide.enable_decode_mode()
    return wide


class _CachedAttention(torch.nn.Module):
    """Attention over all keys that are cached; a prompt's own is causal."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """[queries, batch, heads, width] and keys, of fewer heads -> [queries, batch, all]."""
        turned = (states.permute(1, 2, 0, 3) for states in (query, key, value))
        attended = torch.nn.functional.scaled_dot_product_attention(
            *turned, is_causal=len(query) > 1, enable_gqa=True
        )
        return attended.permute(2, 0, 1, 3).flatten(2)


@contextmanager
def _answering(model: Any) -> Iterator[None]:
    """A model in evaluation mode, whose attention takes a cache of any length."""
    places = [module for module in model.modules() if hasattr(module, "core_attention")]
    kept = [module.core_attention for module in places]
    was_training = model.training
    try:
        model.eval()
        for module in places:
            module.core_attention = _CachedAttention()
        yield
    finally:
        for module, attention in zip(places, kept, strict=True):
            module.core_attention = attention
        model.train(was_training)
