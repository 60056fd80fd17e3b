"""GRPO from end to end: rollouts sampled by the model that is trained, with both schedules.

    python examples/rl_run/run.py --output runs/records                  # a CPU: minutes
    python examples/rl_run/run.py --output runs/records --device cuda    # a GPU: 100 updates, prompts of 2,048 tokens

First a model learns from demonstrations until it answers some questions. From these weights GRPO
runs three times, each run with rollouts of its own: with Megatron's stock schedule, with the same
in another order of sums (what rounding alone does), and with the prefix schedule. OUTPUT gets
demonstrated.npz, updates.jsonl, summary.json and, if matplotlib is installed, curves.svg. See
README.md there.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # for its neighbours

import curves
import numpy as np
import torch
from records import END, VALUE, VOCABULARY, Task, reward, rollout
from sampler import sample

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.lab.data.rollouts import Group
from megatron_prefix.lab.rl.baseline import Baseline
from megatron_prefix.lab.rl.dataset import RolloutSet
from megatron_prefix.lab.rl.job import ModelOptions
from megatron_prefix.lab.rl.settings import GrpoConfig, TrainSettings
from megatron_prefix.lab.runtime.folders import check_folder_writable
from megatron_prefix.lab.runtime.groups import World
from megatron_prefix.lab.runtime.layout import Layout

MOST = 2 * VALUE + 2
"""Tokens of an answer."""


@dataclass(frozen=True)
class Scale:
    """What a device has time for.

    Attributes:
        model: fields of the model's shape.
        prompt_tokens, pack_tokens: of a prompt, and of a packed microbatch.
        most_records: in a prompt.
        demonstrated: updates from demonstrations at most, each of `records` prompts with
            `questions` answers.
        updates: of GRPO, each of `groups` prompts with `answers` answers.
        growth: of demonstrations' prompts, whenever most questions are answered.
    """

    model: dict[str, float]
    prompt_tokens: int
    pack_tokens: int
    most_records: int
    demonstrated: int
    records: int
    questions: int
    updates: int
    groups: int
    answers: int
    dtype: str = "float32"
    learning_rate: float = 1e-3
    policy_rate: float = 1e-4
    growth: float = 1.1


SCALES = {
    "cpu": Scale(
        dict(num_layers=2, hidden_size=128, num_attention_heads=8, num_query_groups=8,
             kv_channels=16, ffn_hidden_size=256, init_method_std=0.06),
        prompt_tokens=33, pack_tokens=1024, most_records=5, demonstrated=1000, records=32,
        questions=5, updates=80, groups=64, answers=8, learning_rate=2e-3, policy_rate=3e-4,
    ),
    "cuda": Scale(
        dict(num_layers=8, hidden_size=768, num_attention_heads=12, num_query_groups=4,
             kv_channels=64, ffn_hidden_size=2048, init_method_std=0.03, rotary_percent=0.25),
        prompt_tokens=2048, pack_tokens=16384, most_records=16, demonstrated=1500,
        records=64, questions=16,
        updates=100, groups=32, answers=16, dtype="bfloat16", learning_rate=1e-3,
        policy_rate=1e-4, growth=1.2,
    ),
}  # fmt: skip
SHAPE = {"tie_embeddings": True, "rotary_base": 1000.0}
"""With which small models learn to look something up in a few hundred updates, not in thousands.
What is found by its content alone, in parts of heads without rope (rotary_percent), is found in
prompts of any length: of all that was tried only these grew from a hundred tokens to thousands."""
SHORTEST = 27
"""Tokens of the first demonstrations' prompts: four records are found sooner."""
KNOWN = -0.65
"""Log-prob of a demonstrated token, at which prompts grow, and end when they are long enough."""
RUNS = {"stock": ("off", False), "reordered": ("off", True), "prefix": ("auto", False)}
"""Mode of the schedule, and whether microbatches run backwards."""
MODES = {**RUNS, "demonstrations": ("on", False)}


def main() -> None:
    """Demonstrations, then GRPO by every schedule that was asked for."""
    args = arguments()
    given = {name: value for name in GIVEN if (value := getattr(args, name)) is not None}
    output = Path(args.output)
    try:
        check_folder_writable(args.output)
        if "none" in args.runs and len(args.runs) > 1:
            raise UserError("--runs none: leave the others out")
        if output.exists() and any(output.iterdir()):
            raise UserError(f"--output {output}: has files already; name another folder")
        train(output, replace(SCALES[args.device], **given), args)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    if (output / curves.UPDATES).exists():
        curves.summarise([output])


def train(output: Path, scale: Scale, args: argparse.Namespace) -> None:
    """Writes updates.jsonl."""
    shape = {"vocab_size": VOCABULARY, **SHAPE, **scale.model}
    options = ModelOptions(
        "tiny-llama", dtype=scale.dtype, device=args.device, overrides=tuple(shape.items())
    )
    given = read(args.start_from) if args.start_from else None
    with options.joined(Layout()) as world:
        output.mkdir(parents=True, exist_ok=True)
        taught = demonstrated(scale, options, world) if given is None else given
        np.savez(output / "demonstrated.npz", **taught)
        if args.runs == ["none"]:
            return
        with (output / curves.UPDATES).open("w", encoding="utf-8") as file:
            for name in args.runs:
                for row in policy_updates(name, scale, args.kl, options, world, taught):
                    print(json.dumps(row), file=file, flush=True)
                    show(row)


def read(path: str) -> dict[str, Any]:
    """Weights by name, float32, from a demonstrated.npz; without pickles."""
    try:
        file = np.load(path, allow_pickle=False)
        if isinstance(file, np.lib.npyio.NpzFile):
            with file:
                return dict(file)
        raise ValueError("holds one array: give a demonstrated.npz")
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"--start-from {path}: {error}") from None


GIVEN = (
    *("updates", "groups", "answers", "prompt_tokens"),
    *("demonstrated", "records", "questions", "policy_rate"),
)


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", required=True, help="a folder that is new or empty")
    parser.add_argument("--device", choices=[*SCALES], default="cpu", help="and what fits it")
    parser.add_argument(
        "--runs", nargs="+", choices=[*RUNS, "none"], default=[*RUNS],
        help="default: all; none: demonstrations alone",
    )  # fmt: skip
    parser.add_argument(
        "--start-from", metavar="FILE", help="an earlier run's demonstrated.npz, for the same model"
    )
    parser.add_argument(
        "--kl", type=float, default=0.0, help="weight of the KL to the first policy"
    )
    for name in GIVEN:
        values = [getattr(scale, name) for scale in SCALES.values()]
        is_rate = isinstance(values[0], float)
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=rate if is_rate else whole_number,
            metavar="X" if is_rate else "N", help=f"default: {values[0]} or {values[1]}",
        )  # fmt: skip
    return parser.parse_args()


def whole_number(text: str) -> int:
    """Of the command line, from 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def rate(text: str) -> float:
    """Of the command line, above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate between 0 and 1")
    return value


def settings_of(
    scale: Scale, groups: int, learning_rate: float, run: str = "prefix", kl: float = 0.0
) -> TrainSettings:
    """Of updates with so many groups."""
    mode, backwards = MODES[run]
    return TrainSettings(
        groups, lr=learning_rate, warmup_steps=20, weight_decay=0.0, grpo=GrpoConfig(kl_coeff=kl),
        prefix=PrefixConfig(mode=mode, min_gain=16),
        baseline=Baseline("packed", scale.pack_tokens, backwards=backwards), looks_first=True,
    )  # fmt: skip


def demonstrated(scale: Scale, options: ModelOptions, world: World) -> dict[str, Any]:
    """Weights after the demonstrations, by name; float32."""
    from megatron_prefix.lab.rl.trainer import Trainer

    def groups(number: int, length: int) -> RolloutSet:
        task = Task(length, scale.most_records)
        numbers = range(number * scale.records, (number + 1) * scale.records)
        return RolloutSet(tuple(task.demonstrations(n, scale.questions) for n in numbers))

    length = min(SHORTEST, scale.prompt_tokens)
    settings = settings_of(scale, scale.records, scale.learning_rate, "demonstrations")
    trainer = Trainer(settings, groups(0, length), options, options.spec(), world)
    for number in range(scale.demonstrated):
        trainer.rollouts = groups(number, length)
        logprob = trainer.step().metrics["train/weighted_logprob"]
        ends = logprob > KNOWN and length == scale.prompt_tokens
        if number % 20 == 0 or ends:
            print(f"demonstrations, update {number + 1}, prompts of {length} tokens:"
                  f" {logprob:.3f} nats a token", flush=True)  # fmt: skip
        if ends:
            break
        if logprob > KNOWN:
            length = min(scale.prompt_tokens, math.ceil(length * scale.growth))
    return {name: weight.float().cpu().numpy() for name, weight in trainer.weights().items()}


def policy_updates(
    run: str, scale: Scale, kl: float, options: ModelOptions, world: World,
    weights: dict[str, Any],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """One run of GRPO; a row of figures an update."""
    from megatron_prefix.lab.models.build import unwrap
    from megatron_prefix.lab.rl.trainer import Trainer
    from megatron_prefix.run.execute.memory_control import free_memory

    free_memory()  # a trainer and its model refer to each other: the last run's would be in peaks
    task = Task(scale.prompt_tokens, scale.most_records)
    settings = settings_of(scale, scale.groups, scale.policy_rate, run, kl)
    begin = RolloutSet(tuple(task.demonstrations(n, 1) for n in range(scale.groups)))
    trainer = Trainer(settings, begin, options, options.spec(), world)
    wanted = {name: tuple(weight.shape) for name, weight in trainer.weights().items()}
    if wanted != {name: weight.shape for name, weight in weights.items()}:
        raise UserError("--start-from: the weights are those of another model")
    trainer.start_from({name: torch.from_numpy(weight) for name, weight in weights.items()})
    draw = torch.Generator(world.device).manual_seed(1)
    for number in range(scale.updates):
        started = time.perf_counter()
        model = unwrap(trainer.chunks[0])
        groups, sampled = rollouts(model, task, number, scale, draw, world.device)
        sampling = time.perf_counter() - started
        trainer.rollouts = RolloutSet(groups)
        if world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(world.device)  # sampling apart
        done = figures(trainer.step().metrics)
        yield {"run": run, "update": number + 1, **sampled, **done, "sampling_s": sampling}


def rollouts(
    model: Any, task: Task, number: int, scale: Scale, draw: torch.Generator, device: torch.device
) -> tuple[tuple[Group, ...], dict[str, float]]:
    """Groups of answers of the model's own to new questions, and figures about them."""
    asked = []
    for place in range(scale.groups):
        records, order = task.records(1, number, place)
        asked.append((records.prompt(order[0]), records.answer(order[0])))
    prompts = torch.from_numpy(np.stack([prompt for prompt, _ in asked])).long().to(device)
    answers = sample(model, prompts, scale.answers, MOST, END, draw)
    lists, groups = answers.lists(), []
    for place, (prompt, right) in enumerate(asked):
        name = f"update-{number}-{place}"
        several = lists[place * scale.answers : (place + 1) * scale.answers]
        groups.append(Group(name, tuple(
            rollout(name, str(uid), prompt, np.array(answer, np.int32), reward(answer, right))
            for uid, answer in enumerate(several)
        )))  # fmt: skip
    rewards = [r.reward for group in groups for r in group.rollouts]
    return tuple(groups), {
        "reward": sum(rewards) / len(rewards),
        "length": sum(map(len, lists)) / len(lists),
        "entropy": answers.entropy,
    }


def figures(metrics: Any) -> dict[str, float]:
    """What of a step's metrics is compared."""
    names = {
        "loss": "train/loss",
        "grad_norm": "train/grad_norm",
        "update_s": "train/updates_s",
        "step_s": "train/step_s",
        "raw_tokens": "prefix_sharing/raw_tokens",
        "executed_tokens": "prefix_sharing/executed_tokens",
        "peak_gib": "perf/max_memory_allocated_gb",
    }
    return {name: metrics[key] for name, key in names.items() if key in metrics}


def show(row: dict[str, Any]) -> None:
    """One line now and then."""
    if row["update"] % 5 == 1:
        print(
            f"{row['run']}, update {row['update']}: reward {row['reward']:.3f},"
            f" {row['update_s']:.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
