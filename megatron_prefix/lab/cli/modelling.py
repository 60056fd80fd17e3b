"""Arguments of the verbs that run a model."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import platform
from typing import Any

from megatron_prefix.errors import UserError
from megatron_prefix.lab import platforms
from megatron_prefix.lab.cli.arguments import (
    add_choice,
    add_config,
    add_number,
    add_switch,
    add_text,
    layout_of,
    seed,
)
from megatron_prefix.lab.cli.inputs import load_groups
from megatron_prefix.lab.data.rollouts import Group
from megatron_prefix.lab.models.old_names import new_name, new_value
from megatron_prefix.lab.models.presets import PRESETS, ModelSpec
from megatron_prefix.lab.runtime import Layout, env_world_size

logger = logging.getLogger(__name__)


CONFIG = (
    "memory",
    "memory_budget_gb",
    "cache_host_layers",
    "cp_reduce",
    "kernel",
    "across_ranks",
    "graph_tokens",
)
"""Fields of PrefixConfig that are about how a model runs."""


def add_model(parser: argparse.ArgumentParser, *, model: str, dtype: str) -> None:
    """Of the model, how it is built, and what its segments keep."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        metavar="NAME|config.json",
        help=f"preset ({', '.join(PRESETS)}) or a Hugging Face config.json (default: that of"
        f" --load-hf, else {model})",
    )
    parser.set_defaults(default_model=model)
    text = (
        "weights of a Hugging Face checkpoint (config.json and safetensors; Llama, Qwen2 to"
        " Qwen3.5, Nemotron-H, DeepSeek-V3, Moonlight, GLM-4.7-Flash, gpt-oss) instead of random"
        " ones, e.g. --load-hf Qwen3-8B; --set num_layers=N takes its first layers"
    )
    add_text(group, "--load-hf", text, metavar="FOLDER")
    text = (
        "change a field of the model, e.g. --set num_layers=2; none removes it: --set"
        " num_moe_experts=none (may be given again)"
    )
    add_text(group, "--set", text, metavar="FIELD=VALUE", action="append", default=[])
    add_device(group, dtype, f"data type of weights and activations (default {dtype})")
    text, choices = (
        "Megatron's activation recomputation (default {})",
        ("none", "full", "selective"),
    )
    add_choice(group, "--recompute", text, choices, "none")
    text = (
        "reduce gradients over data- and context-parallel ranks in buckets while the last backward"
        " runs, in both schedules: Megatron's option of that name"
    )
    add_switch(group, "--overlap-grad-reduce", text)
    add_config(group, *CONFIG)
    add_number(group, "--seed", "seed of weights and random draws (default {})", 1234, seed)


def add_device(group: Any, dtype: str | None, dtype_help: str) -> None:
    """`--dtype --device --layer-spec`."""
    dtypes = ("float64", "float32", "bfloat16")
    group.add_argument("--dtype", choices=dtypes, default=dtype, help=dtype_help)
    add_choice(group, "--device", "where to run (default {})", ("cpu", "cuda"), "cpu")
    text = (
        "te: transformer-engine's layers; local: Megatron's own; auto (default): te on a GPU in"
        " bfloat16, else local"
    )
    add_choice(group, "--layer-spec", text, ("auto", "local", "te"), "auto")


def model_options(args: argparse.Namespace) -> Any:
    """The `rl.job.ModelOptions` that `add_model` read; imports torch.

    Raises:
        UserError: --set names no field, or --load-hf gives no weights of this model.
    """
    if args.device == "cpu":
        platforms.select("cpu")  # first: Megatron's import then takes two seconds less
    from megatron_prefix.lab.rl.job import ModelOptions

    given, names = vars(args), {field.name for field in dataclasses.fields(ModelOptions)}
    same = {name: value for name, value in given.items() if name in names}
    model = {"model": model_name(args), "overrides": overrides_of(args.set)}
    options = ModelOptions(**{**same, **model})
    if args.load_hf is not None:
        _check_weights(args.load_hf, options)
    return options


def model_name(args: argparse.Namespace) -> str:
    """The preset or path that gives the model's shape."""
    given = [name for name in (args.model, args.load_hf) if name is not None]
    return str([*given, args.default_model][0])


def _check_weights(folder: str, options: Any) -> None:
    """Refuses, before ranks start, weights of another model; only --set may leave layers out."""
    from megatron_prefix.lab.models import presets
    from megatron_prefix.lab.models.hf_weights import HFWeights, check_folder

    check_folder(folder)
    weights = HFWeights(folder, options.spec())
    layers = presets.resolve(options.model).num_layers
    if layers != weights.whole.num_layers and "num_layers" not in dict(options.overrides):
        raise UserError(
            f"--model {options.model} has {layers} layers and --load-hf {folder}"
            f" {weights.whole.num_layers}; leave --model out, or give --set num_layers={layers}"
        )


@dataclasses.dataclass(frozen=True)
class Job:
    """What the ranks of a verb are started with.

    Attributes:
        options: how the model is built, a `rl.job.ModelOptions`.
        spec: the model's shape.
        layout: of the ranks.
        groups: the rollouts, in the model's vocabulary.
        dropped: rollouts that `--max-tokens` has left without a trained token.
    """

    options: Any
    spec: ModelSpec
    layout: Layout
    groups: tuple[Group, ...]
    dropped: int = 0


def job_of(args: argparse.Namespace) -> Job:
    """The job that a verb's arguments describe; imports torch, and reads the rollouts.

    Raises:
        UserError: what a user can get wrong of model, layout and rollouts.
    """
    options = model_options(args)
    from megatron_prefix.lab.rl.job import fit_vocabulary

    layout = layout_of(args, env_world_size())
    groups, dropped = load_groups(args, options.spec().vocab_size)
    spec, groups = fit_vocabulary(options, groups)
    return Job(options, spec, layout, tuple(groups), dropped)


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """The machine and versions, for a benchmark's result; imports torch."""
    import megatron.core
    import torch

    from megatron_prefix.lab.models.build import has_transformer_engine

    cuda = args.device == "cuda"
    te = cuda and args.layer_spec != "local" and has_transformer_engine()
    return {
        "model": model_name(args),
        "weights": "random" if args.load_hf is None else args.load_hf,
        "set": list(args.set),
        "dtype": args.dtype,
        "device": torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU",
        "layer_spec": "transformer-engine" if te else "local",
        "torch": torch.__version__,
        "megatron_core": megatron.core.__version__,
        "python": platform.python_version(),
    }


def overrides_of(settings: list[str]) -> tuple[tuple[str, Any], ...]:
    """`FIELD=VALUE` texts as values of the fields' types, numbers of a tuple with commas between
    them; a field's old name is taken and logged.

    Raises:
        UserError: no such field, or a value of another type.
    """
    types = {field.name: str(field.type) for field in dataclasses.fields(ModelSpec)}
    overrides = []
    for setting in settings:
        name, _, text = setting.partition("=")
        field = new_name(name)
        kind = types.get(field)
        if kind is None:
            raise UserError(f"--set {setting}: no such field; fields: {', '.join(types)}")
        try:
            value = new_value(name, _value(kind, text))
        except ValueError:
            text = f"--set {setting}: {field} is {kind}; give a value of that type"
            raise UserError(text) from None
        if name != field:
            logger.warning("--set %s is now --set %s=%s", setting, field, value)
        overrides.append((field, value))
    return tuple(overrides)


def _value(kind: str, text: str) -> Any:
    if text.lower() == "none" and kind.endswith("None"):
        return None
    if kind.startswith("bool"):
        if text.lower() not in ("true", "false"):
            raise ValueError(text)
        return text.lower() == "true"
    if "tuple[int" in kind and "," in text:
        return tuple(int(part) for part in text.split(","))
    if kind.startswith("int"):
        return int(text)
    if kind.startswith("float"):
        return float(text)
    if kind.startswith("str"):
        return text
    raise ValueError(kind)
