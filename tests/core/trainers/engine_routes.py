"""Routes of rollouts as an inference engine with prefix caching records them, and what they leave.

The engine computes whole blocks of a prompt once for all of its rollouts, and hands out what it
has recorded then. What is behind the last whole block is computed again for every rollout, next to
others, where a nearly undecided token may go elsewhere. For a rollout's last token it has no
routes: nobody has asked for what follows.
"""

import torch

BLOCK = 16
TOPK = 2
UNDECIDED = 0.25
"""Share of tokens behind the last whole block of a prompt that go elsewhere in a rollout."""


def drawn(tokens, prompts, layers, experts):
    """Routes of rollouts, int64 [tokens - 1, layers, TOPK] each."""
    of_prompt = {}
    draw, found = torch.Generator().manual_seed(5), []

    def chosen(num):
        return torch.rand(num, layers, experts, generator=draw).topk(TOPK).indices

    for row, prompt in zip(tokens, prompts, strict=True):
        first = of_prompt.setdefault(tuple(row[:prompt].tolist()), chosen(prompt))
        own = chosen(len(row) - 1)
        own[:prompt] = first
        behind = torch.arange(prompt) >= (prompt - 1) // BLOCK * BLOCK
        away = behind & (torch.rand(prompt, generator=draw) < UNDECIDED)
        own[:prompt][away] = chosen(prompt)[away]
        found.append(own)
    return found


def num_alike(tokens, routes):
    """Positions that rollouts need not compute, as one before them has them: with the same tokens
    up to the one after it, and the same routes so far.
    """
    known, num = set(), 0
    for row, experts in zip(tokens, routes, strict=True):
        path = ()
        for place in range(len(row) - 1):
            pair = (int(row[place]), int(row[place + 1]), tuple(experts[place].flatten().tolist()))
            path = (hash((path, pair)),)
            num += path in known
            known.add(path)
    return num
