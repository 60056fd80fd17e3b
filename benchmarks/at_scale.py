"""What deep pipelines leave of a step's speedup, simulated: one row a rollout file and layout.

    python -m benchmarks.at_scale ../shared/data/{rag_musique,gsm8k}.jsonl.gz [--pp 1 8 16 32]

Nothing is measured but the host's time. A file is one step, dealt in whole groups to as many
data-parallel ranks as give each about `--rank-tokens` tokens; the rank with most work is planned as
`megatron-prefix plan` plans it, with the widths of a model and packs of 16,384 tokens beside it.
Prints a Markdown table: predicted speedup, the bubble of the prefix schedule, its segments and
their length, the processor seconds of reading, trees and plan, and what splitting backwards would
bring at most: input gradients at once, weight gradients, half of a backward, whenever a rank waits
("Zero Bubble Pipeline Parallelism", section 2), in pieces of any size and with memory for all.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_prefix.features.plan_files.table import from_csv
from megatron_prefix.lab.cli.main import main as run
from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.walk import token_cost

HEAD = ("step", "DP", "PP x VPP", "speedup", "bubble", "segments", "of at most", "host, s",
        "split backward")  # fmt: skip


def planned(*arguments: str) -> dict[str, Any]:
    """What `megatron-prefix plan --json` prints.

    Raises:
        SystemExit: it fails.
    """
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = run(["plan", *arguments, "--json"])
    if code:
        sys.exit(code)
    result: dict[str, Any] = json.loads(said.getvalue())
    return result


def split_backward(plan: Plan) -> float:
    """What a plan takes over what it would take with backwards that are split: 1 or more."""
    timeline = simulate(plan, cost=lambda segment, _: token_cost(segment, "F"))
    ends = [0.0] * plan.num_ranks
    owed = [0.0] * plan.num_ranks  # weight gradients whose input gradients have been sent
    for rank, action, start, end in timeline.events:
        owed[rank] = max(0.0, owed[rank] - (start - ends[rank]))
        owed[rank] += (end - start) * (action.kind == "B")
        ends[rank] = end
    split = max(end + late for end, late in zip(ends, owed, strict=True))
    return simulate(plan).makespan / split


def rows(options: argparse.Namespace) -> Iterator[Sequence[str]]:
    """One a file and layout."""
    for path in options.files:
        tokens = planned(path)["raw_tokens"]
        dp = max(1, round(tokens / options.rank_tokens))
        for pp in options.pp:
            for vpp in (1, *options.vpp) if pp > 1 else (1,):
                layout = "--dp", str(dp), "--pp", str(pp), "--vpp", str(vpp)
                begin = time.process_time()
                with tempfile.NamedTemporaryFile("r", encoding="utf-8", suffix=".csv") as file:
                    result = planned(path, *layout, "--model", options.model, "--csv", file.name)
                    seconds = time.process_time() - begin
                    plan = from_csv(Path(file.name).read_text(encoding="utf-8"))
                yield (
                    Path(path).name.partition(".")[0], str(dp), f"{pp} x {vpp}",
                    f"{result['predicted_speedup']:.2f}x", f"{result['bubble_fraction']:.1%}",
                    f"{result['segments']:,}", f"{result['segment_tokens']:,}", f"{seconds:.1f}",
                    f"{split_backward(plan) - 1:+.1%}",
                )  # fmt: skip


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", help="rollout files")
    parser.add_argument("--pp", nargs="+", type=int, default=[1, 8, 16, 32])
    parser.add_argument("--vpp", nargs="*", type=int, default=[])
    parser.add_argument("--rank-tokens", type=int, default=500_000, help="(default 500,000)")
    parser.add_argument("--model", default="llama3-8b", help="(default llama3-8b)")
    options = parser.parse_args()
    print("|", " | ".join(HEAD), "|")
    print("|---" * len(HEAD) + "|")
    for row in rows(options):
        print("|", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
