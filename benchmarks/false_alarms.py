"""How often `align` calls right schedules different: python -m benchmarks.false_alarms [--cases N].

Random small models and rollouts in fp64 on one CPU rank, of odd shapes on purpose; case n has seed
FIRST + n.  In every `--break-every`-th case each gradient in turn, down to a millionth of the
largest, is multiplied by 1 + 1e-6, which the same judge must notice.
Exit code 1 for a false alarm or a break that is not noticed.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.data.rollouts import Group, Rollout
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import ModelSpec, resolve
from megatron_prefix.lab.numerics import compare
from megatron_prefix.lab.numerics.compare import Verdict
from megatron_prefix.lab.runtime.groups import forget_logged_losses
from megatron_prefix.lab.verify import align
from tests.harness.one_rank import one_rank

WRONG = 1 + 1e-6
VOCAB = 48


class Compared(NamedTuple):
    """The verdict of `align`, and what it was about."""

    verdict: align.Alignment
    expected: compare.Trace
    found: compare.Trace
    conditions: compare.Conditions

    def unnoticed(self, factor: float, least: float = 1e-6) -> list[str]:
        """Gradients of which the judge does not see that they are `factor` times what they should
        be; those below `least` of the largest are left out."""
        largest = {name: float(g.abs().max()) for name, g in self.expected.gradients.items()}
        found = []
        for name, size in largest.items():
            if size > least * max(largest.values()):
                wrong = {**self.found.gradients, name: factor * self.found.gradients[name]}
                broken = replace(self.found, gradients=wrong)
                if compare.compare(self.expected, broken, self.conditions).passed:
                    found.append(name)
        return found


@dataclass(frozen=True)
class SmallCase:
    """What one comparison runs."""

    spec: ModelSpec
    recompute: str
    groups: tuple[Group, ...]
    config: PrefixConfig
    seed: int

    def run(self) -> Compared:
        """Runs `align`; needs a world of one rank."""
        forget_logged_losses()  # it has the layers of the case before
        chunks = build_model(self.spec, dtype="float64", recompute=self.recompute, seed=self.seed)
        with mock.patch.object(compare, "compare", wraps=compare.compare) as judge:
            verdict = align.align(chunks, self.groups, self.config, seed=self.seed)
        return Compared(verdict, *judge.call_args.args)


def small_case(seed: int) -> SmallCase:
    """The case of a seed: width, depth, weights, trees, trained tokens and lengths all vary."""
    draw = random.Random(seed)
    config = PrefixConfig(
        chunk_tokens=draw.choice((0, 0, 3, 8)), segment_tokens=draw.choice((0, 1, 16, 4096)),
        min_gain=draw.choice((0, 0, 4)), loss_in_leaves=draw.random() < 0.2, kernel="math",
        memory=draw.choice(("retain", "retain", "recompute")),
    )  # fmt: skip
    recompute = draw.choice(("none", "none", "full"))
    return SmallCase(_spec(draw), recompute, _groups(draw), config, seed)


def _spec(draw: random.Random) -> ModelSpec:
    name = draw.choice(("tiny-llama", "tiny-qwen3", "tiny-moe"))
    heads = draw.choice((1, 2, 4))
    hidden = draw.choice((16, 32, 64, 128))
    gain = draw.choice((0.2, 0.8, 1.5))  # of a layer's products; the tiny presets have 0.8
    changes: dict[str, Any] = dict(
        num_layers=draw.randint(1, 6), hidden_size=hidden, num_attention_heads=heads,
        num_query_groups=draw.choice([n for n in (1, 2, 4) if heads % n == 0]),
        kv_channels=draw.choice((8, 16, 32)), ffn_hidden_size=draw.choice((16, 64, 256)),
        init_method_std=gain / hidden**0.5, add_qkv_bias=draw.random() < 0.2,
        qk_layernorm=draw.random() < 0.5,
    )  # fmt: skip
    return resolve(name, **changes).with_vocab(VOCAB)


def _groups(draw: random.Random) -> tuple[Group, ...]:
    return tuple(_group(draw, f"g{number}") for number in range(draw.randint(1, 3)))


def _group(draw: random.Random, name: str) -> Group:
    """Rollouts that branch anywhere after one token, copies of each other, or single tokens."""
    letters = draw.choice((2, 4, VOCAB))
    prompt = [draw.randrange(letters) for _ in range(draw.choice((1, 1, 2, 5, 12, 40)))]
    stem = [draw.randrange(letters) for _ in range(draw.choice((0, 2, 8)))]
    rollouts: list[Rollout] = []
    for uid in range(draw.choice((1, 2, 3, 6))):
        tail = [draw.randrange(letters) for _ in range(draw.randint(1, draw.choice((1, 3, 16))))]
        tokens = [*prompt, *stem[: draw.randint(0, len(stem))], *tail]
        if rollouts and draw.random() < 0.15:
            tokens = rollouts[0].tokens.tolist()
        begin = draw.choice((len(prompt), draw.randint(len(prompt), len(tokens) - 1)))
        ids = np.array(tokens, dtype=np.int32)
        rollouts.append(Rollout(name, str(uid), ids, len(prompt), ((begin, len(ids)),), 0.0))
    return Group(name, tuple(rollouts))


def used(verdict: Verdict) -> tuple[float, ...]:
    """Losses, log-probs, gradients: the largest difference over its limit."""
    return (
        verdict.loss_max_abs_diff / (verdict.loss_limit or math.inf),
        verdict.logprob_max_abs_diff / (verdict.logprob_limit or math.inf),
        verdict.grad_max_rel_diff / (verdict.tolerance or math.inf),
    )


def main() -> int:
    """Runs the cases and prints what was found; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=1500, metavar="N", help="(default 1500)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="(default 0)")
    parser.add_argument("--break-every", type=int, default=10, metavar="N", help="(default 10)")
    args = parser.parse_args()
    begin, alarms, unnoticed, broken, closest = time.perf_counter(), 0, 0, 0, 0.0
    with one_rank():
        for seed in range(args.first, args.first + args.cases):
            compared = small_case(seed).run()
            verdict = compared.verdict
            closest = max(closest, *used(verdict))
            if not verdict.passed:
                alarms += 1
                print(f"seed {seed}: {verdict.failures[0]}", flush=True)
            if seed % args.break_every == 0:
                broken += 1
                missed = compared.unnoticed(WRONG)
                unnoticed += bool(missed)
                if missed:
                    print(f"seed {seed}: {WRONG} times the gradient of {missed[0]} is not noticed")
    print(
        f"{args.cases} cases, {time.perf_counter() - begin:.0f} s: {alarms} false alarms, largest "
        f"difference {closest:.2f} of its limit; breaks not noticed in {unnoticed} "
        f"of {broken} cases"
    )
    return int(bool(alarms or unnoticed))


if __name__ == "__main__":
    sys.exit(main())
