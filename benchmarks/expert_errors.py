"""What of a bf16 error with experts comes from routers' ties.

    python -m benchmarks.expert_errors [--model NAME] [--set FIELD=VALUE] [--device cuda] ...

A router that is nearly undecided sends a token to another expert after a rounding, and both results
are as right.  Errors against fp32, over those of the stock schedule in bf16 on packs, pooled over
draws as `align` pools them, of the prefix schedule, and of the stock schedule on one rollout a
microbatch, which shows what other shapes of the same products do: each with routers of their own,
and with the routes of one run in all.  Prints a line for each: the median of all parameters, and
the largest ratio with its parameter.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.cli.modelling import overrides_of
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.models.build import build_model, unwrap
from megatron_prefix.lab.models.presets import ModelSpec
from megatron_prefix.lab.models.weights import global_parameters
from megatron_prefix.lab.numerics.compare import Trace
from megatron_prefix.lab.numerics.pooled import Errors
from megatron_prefix.lab.platforms.exact import by_definition
from megatron_prefix.lab.rl import packing, routes
from megatron_prefix.lab.rl.baseline import Baseline
from megatron_prefix.lab.rl.job import ModelOptions
from megatron_prefix.lab.rl.recorded_routes import recorded
from megatron_prefix.lab.runtime.layout import Layout
from megatron_prefix.lab.verify import align
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.schedule import PrefixSchedule

PACK_TOKENS = 1024
OVERRIDES = {**routes.CONFIG, "calculate_per_token_loss": True, "moe_aux_loss_coeff": 0.0}
"""The loss is then the same in packs and without."""


def main() -> None:
    """Prints the four lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-moe")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shape", default="64:32:8", help="prompt, answer, answers of a group")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--draws", type=int, default=8)
    args = parser.parse_args()
    options = ModelOptions(args.model, device=args.device, overrides=overrides_of(args.set))
    spec = options.spec()
    spec = spec if spec.vocab_size else spec.with_vocab(512)
    with options.joined(Layout()):
        chunks = built(spec, args.device, "bfloat16")
        exact = built(spec, args.device, "float32")
        weights = dict(global_parameters(unwrap(chunks[0])))
        with torch.no_grad():
            for name, parameter in global_parameters(unwrap(exact[0])):
                parameter.copy_(weights[name])
        for same in (False, True):
            errors = {"stock, a rollout a microbatch": Errors(), "prefix": Errors()}
            for draw in range(args.draws):
                items = drawn(args, spec, draw, chunks if same else None)
                add(errors, chunks, exact, items)
            for name, of in errors.items():
                print(f"{'equal routes' if same else 'own routes'}, {name}: {ratios(of)}")


def built(spec: ModelSpec, device: str, dtype: str) -> list[Any]:
    """The model, whose routers can follow routes; in fp32 by its definition."""
    kind = "local" if dtype == "float32" else "auto"
    chunks = build_model(
        spec, dtype=dtype, device=device, layer_spec=kind, config_overrides=OVERRIDES
    )
    if dtype == "float32":
        by_definition(chunks[0])
    return chunks


def drawn(args: argparse.Namespace, spec: ModelSpec, draw: int, recording: Any) -> list[Any]:
    """Microbatches of a draw, with the routes of one pass if that is given."""
    prompt, answer, num = map(int, args.shape.split(":"))
    groups: Sequence[Any] = [
        *generate(args.groups, prompt, answer, num, vocab_size=spec.vocab_size or 0, seed=draw)
    ]
    items = align.microbatches(groups, draw)
    if recording is None:
        return items
    table = recorded(recording, items, spec)
    return align.microbatches(routes.with_routes(groups, table, routes.shape_of(spec)), draw)


def add(errors: dict[str, Errors], chunks: Any, exact: Any, items: Sequence[Any]) -> None:
    """A draw's errors."""
    ours = PrefixSchedule(PrefixConfig(mode="on", graph_tokens=0), Callbacks(routes=routes.of_call))
    stock = stock_schedule()
    packs = packing.microbatches(items, Baseline("packed", PACK_TOKENS))

    def gradients(schedule: align.Schedule, model: Any, microbatches: Sequence[Any]) -> Trace:
        return Trace(
            torch.zeros(0), align.run_step(schedule, model, microbatches, optimize=False).gradients
        )

    expected, truth = gradients(stock, chunks, packs), gradients(stock, exact, packs)
    errors["stock, a rollout a microbatch"].add(expected, gradients(stock, chunks, items), truth)
    errors["prefix"].add(expected, gradients(ours, chunks, packs), truth)


def ratios(errors: Errors) -> str:
    """In words."""
    each = errors.ratios
    worst = max(each, key=lambda name: each[name])
    return f"median {np.median([*each.values()]):.3f}, largest {each[worst]:.3f} ({worst})"


if __name__ == "__main__":
    main()
