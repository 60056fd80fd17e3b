"""Do both schedules agree on my rollouts? In float64, where a mistake cannot hide in rounding.

    python examples/prove_parity.py [ROLLOUTS.jsonl.gz]

Does from Python what `megatron-prefix align` does: one AdamW step with each schedule, from the same
weights on the same packed microbatches; compares every loss, log-prob, gradient and parameter. To
test your own model, hand `align` your own chunks, wrapped in Megatron's DDP, instead of
`build_model`'s.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from importlib.resources import files

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.lab import runtime
from megatron_prefix.lab.data.rollouts import dense_vocabulary, read_groups
from megatron_prefix.lab.data.shorten import shorten
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.rl.baseline import Baseline
from megatron_prefix.lab.runtime import Layout

BUNDLED = str(files("megatron_prefix.lab.data") / "bundled" / "agents.jsonl.gz")
NUM_GROUPS, MAX_TOKENS = 2, 128


def main() -> None:
    """Compares both schedules; the exit code is 1 if they differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rollouts", nargs="?", default=BUNDLED, help="file (default: bundled)")
    try:
        first = [*itertools.islice(read_groups(parser.parse_args().rollouts), NUM_GROUPS)]
    except UserError as error:
        parser.error(str(error))
    groups = [kept for group in first if (kept := shorten(group, MAX_TOKENS)[0]) is not None]
    groups, vocabulary, _ = dense_vocabulary(groups)  # a tiny model takes the tokens that occur

    runtime.initialize(Layout(), device="cpu")  # selects the CPU before Megatron is imported
    from megatron_prefix.lab.models.build import build_model
    from megatron_prefix.lab.verify.align import align

    chunks = build_model(resolve("tiny-llama").with_vocab(vocabulary), dtype="float64")
    config = PrefixConfig(min_gain=8)  # shares prefixes from 8 tokens on
    verdict = align(chunks, groups, config, baseline=Baseline("packed", pack_tokens=512))
    runtime.shutdown()

    print(f"{verdict.microbatches} microbatches against {verdict.compared_with}")
    print(f"tokens {verdict.raw_tokens}, executed {verdict.executed_tokens}")
    for what, found, limit in (
        ("loss", verdict.loss_max_abs_diff, verdict.loss_limit),
        ("log-prob", verdict.logprob_max_abs_diff, verdict.logprob_limit),
        ("gradient, relative", verdict.grad_max_rel_diff, verdict.tolerance),
        ("parameter after AdamW", verdict.param_max_abs_diff, verdict.param_limit),
    ):
        print(f"largest difference of a {what}: {found:.1e} (at most {limit:.1e})")
    print("aligned" if verdict.passed else "NOT aligned", *verdict.failures, sep="\n")
    sys.exit(0 if verdict.passed else 1)


if __name__ == "__main__":
    main()
