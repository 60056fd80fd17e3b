"""A tiny model as Hugging Face stores one, and rollouts that answer in an engine's place.

Nothing is fetched: weights are drawn, rollouts are those of the bundled file, and their log-probs
are what transformers says of the model.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_prefix.lab.data.generate import bundled_groups
from megatron_prefix.lab.data.rollouts import Group, Rollout

VOCAB, LAYERS, HIDDEN, HEADS, QUERY_GROUPS, FEED = 2048, 2, 64, 4, 2, 128
SIZE = 4
"""Rollouts of a group."""


def groups(num: int) -> list[Group]:
    """The first groups of the bundled file, with `SIZE` rollouts each."""
    found = itertools.islice(bundled_groups(), num)
    return [Group(one.name, one.rollouts[:SIZE]) for one in found]


def word(token: int) -> str:
    """What the tokenizer writes for a token; no word is the beginning of another."""
    return f"t{token:04}"


def write_model(folder: Path, experts: int = 0) -> None:
    """A Qwen3 in fp32, its weights drawn from seed 0, and a tokenizer with a word for every id.

    No id pads: the row of one that does would be zero, and its gradient a thousand times others'.

    Args:
        experts: of a layer, two of which a token goes to; 0: a dense model.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    torch.manual_seed(0)
    routed = {
        "num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": FEED // 2,
        "norm_topk_prob": True, "router_aux_loss_coef": 0.0,
    }  # fmt: skip
    config = (Qwen3MoeConfig if experts else Qwen3Config)(
        vocab_size=VOCAB, num_hidden_layers=LAYERS, hidden_size=HIDDEN, intermediate_size=FEED,
        num_attention_heads=HEADS, num_key_value_heads=QUERY_GROUPS, head_dim=HIDDEN // HEADS,
        max_position_embeddings=1024, rope_theta=1e6, rms_norm_eps=1e-6,
        tie_word_embeddings=False, pad_token_id=None, **(routed if experts else {}),
    )  # fmt: skip
    (Qwen3MoeForCausalLM if experts else Qwen3ForCausalLM)(config).save_pretrained(folder)
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    stored["rope_theta"] = 1e6  # as in Qwen's own files, for mbridge
    (folder / "config.json").write_text(json.dumps(stored), encoding="utf-8")
    words = Tokenizer(models.WordLevel({word(n): n for n in range(VOCAB)}, unk_token=word(0)))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=word(1), pad_token=word(1), unk_token=word(0),
        chat_template="{% for one in messages %}{{ one['content'] }}{% endfor %}",
    )  # fmt: skip
    tokenizer.add_tokens(["\n", "<|im_end|>"])  # verl asks for them; no text has them
    tokenizer.save_pretrained(folder)


def log_probs(folder: Path, rollouts: Sequence[Rollout]) -> Iterator[list[float]]:
    """What an engine says of each rollout's tokens after the prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    for one in rollouts:
        tokens = torch.from_numpy(one.tokens).long()
        with torch.no_grad():
            scores = model(tokens[None]).logits[0, one.prompt_len - 1 : -1].log_softmax(-1)
        yield scores.gather(1, tokens[one.prompt_len :, None])[:, 0].tolist()
