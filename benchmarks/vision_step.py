"""A step of a vision-language model: images in prompts, both schedules, on packs.

    python -m benchmarks.vision_step --layers 24 --json step.json        # on a GPU
    python -m benchmarks.vision_step --layers 24 --tp 2 --sequence-parallel        # on two
    python -m benchmarks.vision_step --device cpu --dtype float64 --model tiny-qwen3 --tower tiny \\
        --prompt 160 --image-tokens 12 --answer 16 --rollouts 4 --pack-tokens 400

Qwen3-VL-8B's language model and tower (benchmarks/vision_model.py) with random weights. Prompts of
--prompt tokens have --images images of --image-tokens; every rollout brings pixels of its own, as
trainers give them. First both schedules are aligned by the numerics policy, tower included, on
small groups and a model with few layers and a small vocabulary, in 16 bit against fp32. Then both
are timed after the same calls, each with its own peak of memory, and the images are counted that go
through the tower in a step; of several ranks the first one's. The bound counts FLOPs as
`megatron-prefix bench` does, and the tower once for each image instead of once for each rollout's;
the schedule runs its forward twice.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.profiler import record_function

from benchmarks import step_profile
from benchmarks.vision_model import MERGE, SIZES, Sizes, model_of
from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab import runtime
from megatron_prefix.lab.bench import steps
from megatron_prefix.lab.bench.work import GroupShape, Setting, Work
from megatron_prefix.lab.cli import arguments
from megatron_prefix.lab.cli.modelling import overrides_of
from megatron_prefix.lab.data.pairs import pairs_of_groups
from megatron_prefix.lab.data.rollouts import Group
from megatron_prefix.lab.models import build
from megatron_prefix.lab.models.config import alignment
from megatron_prefix.lab.models.presets import ModelSpec
from megatron_prefix.lab.rl import flops, loss, packing, passes
from megatron_prefix.lab.rl.baseline import PACK_TOKENS, Baseline
from megatron_prefix.lab.rl.job import ModelOptions
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import align
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.run.execute import executor
from megatron_prefix.run.execute.memory_control import free_memory
from megatron_prefix.run.schedule import PrefixSchedule
from megatron_prefix.tree import build as build_forest

VOCABULARY = 32768
"""Of the aligned model, at most: five copies of its weights and gradients are there at once."""


@dataclass(frozen=True)
class Options(ModelOptions):
    """How the model is built.

    Attributes:
        tower: its sizes.
    """

    tower: Sizes = SIZES["tiny"]

    def build(self, spec: ModelSpec, layout: Layout, dtype: str | None = None) -> list[Any]:
        """See ModelOptions."""
        half = spec.kv_channels // 2
        sections = [half - 2 * (5 * half // 16), 5 * half // 16, 5 * half // 16]
        with mock.patch.object(build, "_gpt_model", functools.partial(model_of, self.tower)):
            return build.build_model(
                spec, layout=layout, dtype=dtype or self.dtype, device=self.device,
                layer_spec=self.layer_spec, seed=self.seed,
                config_overrides={"mrope_section": sections, "apply_rope_fusion": False},
            )  # fmt: skip


@dataclass(frozen=True)
class Prompts:
    """Where the images of all prompts are, and their pixels.

    Attributes:
        images: of a prompt.
        grid: rows and columns of patches of one, even.
        text: tokens in front of each.
        pixels: of a group's images, [images * patches, numbers of a patch], by its name.
        known: `positions` on the device, by length.
    """

    images: int
    grid: tuple[int, int]
    text: int
    pixels: dict[str, Tensor]
    known: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, given: argparse.Namespace, groups: Sequence[Group], tokens: int) -> Prompts:
        """Images of so many tokens, as near to a square as can be, with text between them."""
        rows = next(n for n in range(math.isqrt(tokens), 0, -1) if tokens % n == 0)
        prompt = groups[0].rollouts[0].prompt_len
        text = (prompt - given.images * tokens) // (given.images + 1)
        if text < 1:
            sys.exit(f"{given.images} images of {tokens} tokens leave no text in {prompt}")
        shape = given.images * tokens * MERGE, SIZES[given.tower].patch
        draw = torch.Generator(given.device).manual_seed(1)
        pixels = {}
        for group in groups:  # the same numbers in 16 and in 32 bit
            drawn = torch.randn(shape, generator=draw, device=given.device)
            pixels[group.name] = drawn.bfloat16().float()
        return cls(given.images, (2 * rows, 2 * tokens // rows), text, pixels)

    def positions(self, num: int) -> tuple[Tensor, Tensor]:
        """Of one rollout: three positions a token, [3, num], and which are images', [num]."""
        height, width = (size // 2 for size in self.grid)
        image = torch.cartesian_prod(*map(torch.arange, (1, height, width))).T
        text, start, parts = torch.arange(self.text).expand(3, -1), 0, list[Tensor]()
        for _ in range(self.images):
            parts += [start + text, start + self.text + image]
            start += self.text + max(height, width)
        own = torch.cat([torch.zeros(self.text), torch.ones(height * width)]).repeat(self.images)
        rest = num - len(own)
        parts.append(start + torch.arange(rest).expand(3, -1))
        return torch.cat(parts, 1).long(), torch.cat([own, torch.zeros(rest)]).bool()

    def output(self, model: Any, batch: dict[str, Tensor], item: dict[str, Any]) -> Tensor:
        """What the model makes of a microbatch; see `loss`."""
        whole, device = batch["tokens"], batch["tokens"].device
        ends = item.get("cu_seqlens", torch.tensor([0, whole.shape[1]]))
        names = item["group"] if isinstance(item["group"], tuple) else (item["group"],)
        lengths = ends.diff().tolist()
        for num in {*lengths} - {*self.known}:
            places, own = self.positions(num)
            self.known[num] = places.to(device), own.to(device)
        found = zip(*(self.known[num] for num in lengths), strict=True)
        positions, images = (torch.cat(parts, -1) for parts in found)
        pixels = torch.cat([self.pixels[name] for name in names])
        grids = torch.tensor([(1, *self.grid)]).expand(len(names) * self.images, -1)
        pack = packing.packed_seq_params(item, device)
        output: Tensor = model(
            whole, positions[:, None], images[None], pixels, grids, labels=batch["labels"],
            loss_mask=batch["loss_mask"], **({} if pack is None else {"packed_seq_params": pack}),
        )  # fmt: skip
        return output

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, microbatches of the lab's steps have these images."""
        with mock.patch.object(loss, "_output", self.output):
            yield


def aligned(
    options: Options, spec: ModelSpec, layout: Layout, given: argparse.Namespace
) -> align.Alignment:
    """Both schedules on small groups, the step's shape at most."""
    vocabulary = min(spec.vocab_size or 0, VOCABULARY)
    num = min(given.align_layers * layout.pp, spec.num_layers)
    small = replace(spec.first(num), vocab_size=vocabulary)
    most = zip((given.prompt, given.answer, given.rollouts), (512, 128, 4), strict=True)
    shape = GroupShape(*(min(one, other) for one, other in most))
    groups = shape.groups(2, vocabulary, options.seed)
    tokens = min(given.image_tokens, shape.prompt // (2 * given.images))
    chunks, exact = options.build(small, layout), None
    if options.dtype == "bfloat16":
        exact = functools.cache(options.reference(small, layout, chunks))
    try:
        with Prompts.of(given, groups, tokens).shown():
            return align.align(
                chunks, groups, config_of(given), seed=options.seed, reference=exact,
                multiple=alignment(small, layout),
                baseline=Baseline(pack_tokens=3 * (shape.prompt + shape.response)),
            )  # fmt: skip
    finally:
        del chunks, exact
        torch.compiler.reset()  # what was compiled for this model counts against a limit
        free_memory()


def images_of(chunks: list[Any], call: Callable[[], Any], patches: int) -> int:
    """Images that go through this rank's tower in a call."""
    seen = list[int]()
    tower = build.unwrap(chunks[0]).vision_model
    if tower is None:
        call()
        return 0
    embed = tower.embed
    handle = embed.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    call()
    handle.remove()
    return sum(seen) // patches


def profiled(chunks: list[Any], call: Callable[[], Any], given: argparse.Namespace) -> None:
    """Prints where one more call's time goes, as benchmarks/step_profile.py does; what the tower
    launches in its forward is by itself."""
    tower = build.unwrap(chunks[0]).vision_model
    forward = record_function(f"{step_profile.ACTION}tower")(tower.forward)
    on_gpu = given.device == "cuda"

    def step() -> None:
        call()
        if on_gpu:
            torch.cuda.synchronize()

    def action(one: Any) -> Any:
        return record_function(f"{step_profile.ACTION}{one}")

    named = mock.patch.object(executor, "_annotated", action)
    with named, mock.patch.object(tower, "forward", forward):
        before = [step_profile.timed(step) for _ in range(2)]
        step_profile.show("prefix", before, *step_profile.watched(step, on_gpu))


def bounds(
    options: Options, spec: ModelSpec, given: argparse.Namespace, groups: Sequence[Group]
) -> tuple[float, float]:
    """FLOPs of the stock schedule over those of one that shares all, the tower's included; the same
    where the tower's forward runs twice, as it does."""
    shared = replace(config_of(given).tree_options(1), min_gain=0, segment_gain=0)
    forest = build_forest(*pairs_of_groups(groups), shared).all_read()
    cost, num = flops.cost_model(spec), given.images * len(groups)
    image = options.tower.flops(MERGE * given.image_tokens, spec.hidden_size)
    stock = cost.stock(forest) + given.rollouts * num * image
    once, twice = (stock / (cost.prefix(forest) + n * num * image) for n in (1, 4 / 3))
    return once, twice


def config_of(given: argparse.Namespace) -> PrefixConfig:
    """Of the prefix schedule."""
    return PrefixConfig(memory_budget_gb=given.memory_budget_gb, chunk_tokens=given.chunk_tokens)


def timed(
    options: Options, spec: ModelSpec, layout: Layout, given: argparse.Namespace
) -> dict[str, Any]:
    """The row of `bench`, with the tower in its bound, and images through the tower."""
    shape, config = GroupShape(given.prompt, given.answer, given.rollouts), config_of(given)
    groups = shape.groups(given.groups, spec.vocab_size or 0, options.seed)
    setting = Setting(
        spec, layout, Baseline(pack_tokens=given.pack_tokens), options.seed, options.dtype,
        warm_up_calls=given.warm_up_calls,
    )  # fmt: skip
    chunks = options.build(spec, setting.layout)
    step, patches = loss.forward_step(loss.GrpoConfig()), MERGE * given.image_tokens
    with Prompts.of(given, groups, given.image_tokens).shown():
        work = Work(shape.name, config, [groups], [groups], given.repeats)
        items = steps.microbatches(work, setting, groups, options.seed)
        row = steps.time_work(work, setting, chunks, {})
        images = {
            name: images_of(chunks, lambda: passes.run(schedule, step, chunks, items), patches)  # noqa: B023
            for name, schedule in (("stock", stock_schedule()), ("prefix", PrefixSchedule(config)))
        }
        if given.profile:
            profiled(chunks, lambda: passes.run(PrefixSchedule(config), step, chunks, items), given)
    once, twice = bounds(options, spec, given, groups)
    whole = {"bound": once, "bound_twice": twice, "of_bound": row.speedup / once}
    return {**asdict(row), "bound_of_text": row.bound, **whole, "images": images}


def measured(given: argparse.Namespace, layout: Layout) -> dict[str, Any]:
    """Aligns and times, on process groups that exist; "row" is missing if the former fails."""
    changed = overrides_of(given.set)
    if given.layers:
        changed = (*changed, ("num_layers", given.layers))
    options = Options(
        given.model, given.dtype, given.device, overrides=changed, tower=SIZES[given.tower]
    )
    spec = options.spec()
    spec = spec if spec.vocab_size else spec.with_vocab(2048)
    least = len(options.tower.deep) * layout.pp
    if spec.num_layers <= least or given.align_layers <= len(options.tower.deep):
        sys.exit(f"give more layers a stage than deepstack has, {len(options.tower.deep)}")
    verdict = aligned(options, spec, layout, given)
    ratio = verdict.grad_error_ratio_max
    error = f"{verdict.grad_max_rel_diff:.2e}" if ratio is None else f"{ratio:.3f} of stock's"
    if runtime.first_rank():
        print(f"aligned: {verdict.passed}; largest error of a gradient: {error}", flush=True)
        print(*verdict.failures, sep="\n", end="\n" if verdict.failures else "", flush=True)
    on_gpu = given.device == "cuda"
    result = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "options": {name: str(value) for name, value in vars(given).items()},
        "layers": spec.num_layers,
        "alignment": asdict(verdict),
    }
    return {**result, "row": timed(options, spec, layout, given)} if verdict.passed else result


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="qwen3-8b", help="preset of the language model (default qwen3-8b)")
    add("--tower", choices=SIZES, default="qwen3-vl-8b", help="(default qwen3-vl-8b)")
    add("--layers", type=int, help="of the language model (default: its own)")
    add("--set", action="append", default=[], metavar="FIELD=VALUE", help="of the language model")
    add("--groups", type=int, default=2, help="of a step (default 2)")
    add("--prompt", type=int, default=4096, help="tokens, images included (default 4096)")
    add("--images", type=int, default=2, help="of a prompt (default 2)")
    add("--image-tokens", type=int, default=1000, help="of an image (default 1000)")
    add("--rollouts", type=int, default=8, help="of a group (default 8)")
    add("--answer", type=int, default=512, help="tokens (default 512)")
    add("--pack-tokens", type=int, default=PACK_TOKENS, help=f"(default {PACK_TOKENS})")
    add("--memory-budget-gb", type=float, default=0.0, help="of the prefix schedule")
    add("--align-layers", type=int, default=4, help="of a stage of the aligned model (default 4)")
    add("--dtype", choices=("float64", "float32", "bfloat16"), default="bfloat16")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--warm-up-calls", type=int, default=3, help="of each schedule (default 3)")
    add("--repeats", type=int, default=3, help="timed calls of each; the median (default 3)")
    add("--profile", action="store_true", help="then print where a step's time goes")
    add("--json", type=Path, help="the result goes there, too")
    arguments.add_layout(parser)
    arguments.add_config(parser, "chunk_tokens")
    return parser.parse_args(given)


LINE = (
    "{name}, {groups} groups: stock {stock_ms:.0f} ms, prefix {prefix_ms:.0f} ms,"
    " {speedup:.3f}x of {bound:.3f}x (tower counted; with its second forward {bound_twice:.3f}x,"
    " text alone {bound_of_text:.3f}x),"
    " {of_bound:.3f} of the bound; peaks {stock_gib:.1f} and {prefix_gib:.1f} GiB; tokens"
    " {raw_tokens} and {executed_tokens}; images through the tower {images}"
)


def rank_main(given: argparse.Namespace, layout: Layout) -> dict[str, Any]:
    """One rank's part."""
    with ModelOptions(given.model, device=given.device).joined(layout):
        return measured(given, layout)


def main(arguments_given: list[str] | None = None) -> int:
    """Starts the ranks, and prints; the exit code is 1 if the schedules differ."""
    given = parse_arguments(arguments_given)
    layout = arguments.layout_of(given, runtime.env_world_size())
    if layout.cp > 1 or layout.vpp > 1:
        sys.exit("the model has no context parallelism and no virtual stages")
    if given.profile and layout.world_size > 1:
        sys.exit("--profile is for one rank")
    result = runtime.launch(rank_main, layout.world_size, given, layout, device=given.device)
    if "row" in result:
        print(LINE.format(groups=given.groups, **result["row"]))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if "row" in result else 1


if __name__ == "__main__":
    raise SystemExit(main())
