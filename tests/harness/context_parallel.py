"""Rollouts and a model for context parallelism on real ranks."""

from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.models.presets import resolve

VOCAB = 64


def groups(*shape, **options):
    return list(generate(2, *shape, vocab_size=VOCAB, uneven=True, **options))


# Groups of three uneven rollouts. Under the long prompt the second of two ranks, which holds the
# middle of every rollout, has no trained token; agents' turns are trained and shared.
DATA = {
    "flat": groups(30, 20, 3),
    "long prompt": groups(52, 9, 3),
    "tree": groups(15, 34, 3, tree="turns", depth=2),
}


def spec(model="tiny-llama"):
    return resolve(model, num_layers=2).with_vocab(VOCAB)
