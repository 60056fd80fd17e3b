"""`megatron-prefix doctor`: whether the prefix schedule can run here, and what is in the way."""

from __future__ import annotations

import argparse
import functools
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_prefix import __version__, trainers
from megatron_prefix.errors import UserError, named
from megatron_prefix.lab.cli import arguments, packages
from megatron_prefix.lab.cli.report import print_json, print_table
from megatron_prefix.lab.models.presets import ModelSpec, resolve
from megatron_prefix.refusals.table import GROUPS, TABLE
from megatron_prefix.trainers import versions

if TYPE_CHECKING:
    import torch

HELP = """\
Shows versions, devices, the attention kernels that are used here, and whether the prefix schedule
can run. --refused also lists every kernel and all that the schedule refuses; --json always does.
FlashAttention-4's kernels and those of recurrent layers take long to compile: only --probe tries
them. Exit code 0 if the prefix schedule can run here, else 1."""
EPILOG = """\
examples:
  megatron-prefix doctor
  megatron-prefix doctor --model qwen3-8b
  megatron-prefix doctor --refused
  megatron-prefix doctor --model qwen3-8b --probe
  megatron-prefix doctor --model path/to/config.json --device cpu --json
"""

T = TypeVar("T")
DTYPES = ("float64", "float32", "bfloat16")
HEAD_DIM = 128  # of the kernels' probe when no model is named
GROUP = 2  # query heads per K/V head, likewise
RECURRENT = ("fla-core", "mamba-ssm", "causal-conv1d", "triton")  # kernels of recurrent layers
GIB = 1 << 30
REFUSAL = ("name", "where", "fix", "kind")  # what is told of one
UNTRIED = "not tried (--probe tries it)"
MODEL = ("config", "module", "wrapper")  # what a model is refused for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument(
        "--model",
        metavar="NAME|config.json",
        help="check this model too: a preset, or a Hugging Face config.json",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="what to check (default: cuda if there is one)"
    )
    arguments.add_switch(
        parser,
        "--probe",
        "also try kernels that have to be compiled, some for minutes; later runs reuse them",
    )
    text = "list all kernels, and all that the prefix schedule refuses, with what to do"
    arguments.add_switch(parser, "--refused", text)


def run(args: argparse.Namespace) -> int:
    """Examines and prints; returns 0 if the prefix schedule can run here, else 1."""
    report = examine(args.device, args.model, args.probe)
    if args.json:
        print_json(report)
    else:
        show(report, args.refused, args.probe)
    return 0 if report["ok"] else 1


def examine(
    device: str | None = None, model: str | None = None, probe: bool = False
) -> dict[str, Any]:
    """Everything that `doctor` reports; the keys of its --json.

    Keys: ok; problems, one line each; device, the one that was checked; versions, None if
    something is absent; trainers that are installed, by name their version, the versions that were
    tried, what turns the schedule on, and what keeps groups together; untested, which of these
    versions have not run with the prefix schedule; devices; kernels, by dtype
    and name None or why it does not work; chosen, the kernel that "auto" takes by dtype; why, the
    same with the reason; recurrent, by Megatron's recurrent module None or why its kernels do not
    work; untried, kernels and recurrent modules that are there but were not tried; stock_packs,
    what is wrong with transformer-engine's attention of packs, which stock steps run, or None;
    refused_features, what to do about each that a model can have; refusals, the whole table: name,
    where, fix and kind ("never supported" or "not supported yet") of each; extras, by name the
    missing packages and the command; model, its name and the features in its way, or None.

    Args:
        device: "cpu" or "cuda"; None: "cuda" if torch sees a GPU.
        model: a preset's name or the path of a config.json.
        probe: try what compiles first too.

    Raises:
        UserError: `model` is neither.
    """
    spec = resolve(model) if model else None
    problems: list[str] = []
    missing, extras = packages.missing(*packages.asked_for())
    problems += [f"{name} is missing; pip install '{name}'" for name in missing]
    # Versions and GPUs first: choosing the CPU hides the GPUs.
    report: dict[str, Any] = {
        "device": device or _attempt(problems, _best_device) or "cpu",
        "versions": _package_versions() | (_attempt(problems, _library_versions) or {}),
        "trainers": _trainers(),
        "untested": versions.untested(trainers.TRAINERS),
        "devices": [_host(), *(_attempt(problems, _gpus) or ())],
        "kernels": {},
        "chosen": {},
        "why": {},
        "recurrent": {},
        "untried": [],
        "stock_packs": None,
        "refused_features": {one.name: one.fix for one in TABLE if one.where in MODEL},
        "refusals": [{name: getattr(one, name) for name in REFUSAL} for one in TABLE],
        "extras": extras,
        "model": None,
    }
    if not problems:
        report |= _attempt(problems, _what_runs, report["device"], spec, probe) or {}
    in_the_way = report["model"]["refused"] if report["model"] else []
    problems += [f"{report['model']['name']} has {line}" for line in in_the_way]
    problems = list(dict.fromkeys(problems))  # a package that is missing is met more than once
    return {"ok": not problems, "problems": problems, **report}


def _attempt(problems: list[str], look: Callable[..., T], *args: Any) -> T | None:
    """What `look` finds, or None with one more line in `problems`."""
    try:
        return look(*args)
    except UserError as error:
        problems.append(str(error).partition("\n")[0])
    except Exception as error:  # noqa: BLE001  (a broken installation raises anything)
        problems.append(named(error))
    return None


# What is here -------------------------------------------------------------------------------------


def _package_versions() -> dict[str, str | None]:
    own = {"megatron_prefix": __version__, "python": platform.python_version()}
    others = ("torch", "megatron-core", "transformer-engine", "apex", "flash-attn-4", *RECURRENT)
    return own | {name: packages.version(name) for name in others}


def _trainers() -> dict[str, dict[str, Any]]:
    """Of those that are packages; Megatron-LM is a checkout."""
    versions = {one: packages.version(one.package) for one in trainers.TRAINERS if one.package}
    return {
        one.name: {
            "version": version, "tried": list(one.tried), "on": one.on, "together": one.together
        }
        for one, version in versions.items()
        if version
    }  # fmt: skip


def _library_versions() -> dict[str, str | None]:
    """Of what torch was built with."""
    import torch

    if torch.version.cuda is None:
        return {"CUDA": None, "cuDNN": None, "NCCL": None}
    # Private, because torch.backends.cudnn.version() loads cuDNN, and transformer-engine cannot be
    # imported afterwards if it finds another cuDNN than torch's (seen with 2.11).
    library = getattr(torch._C, "_cudnn", None)
    cudnn = library and ".".join(map(str, library.getCompileVersion()))
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
    return {
        "CUDA": torch.version.cuda,
        "cuDNN": cudnn,
        "NCCL": None if nccl is None else ".".join(map(str, nccl)),
    }


def _host() -> dict[str, Any]:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"name": "CPU", "cores": cores, "memory_gib": round(memory / GIB, 1)}


def _best_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _gpus() -> list[dict[str, Any]]:
    import torch

    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [
        {
            "name": gpu.name,
            "memory_gib": round(gpu.total_memory / GIB, 1),
            "capability": f"{gpu.major}.{gpu.minor}",
        }
        for gpu in gpus
    ]


# What runs ----------------------------------------------------------------------------------------


def _what_runs(device: str, spec: ModelSpec | None, probes: bool) -> dict[str, Any]:
    """Kernels and the model, after the platform has been selected.

    Raises:
        UserError: the device, the version of Megatron-Core, or every kernel is in the way.
    """
    from megatron_prefix.lab import platforms

    platforms.select(device)
    import torch

    from megatron_prefix.features.recurrent import probe
    from megatron_prefix.lab.numerics import working_kernels
    from megatron_prefix.lab.platforms import stock_packs
    from megatron_prefix.layers import table
    from megatron_prefix.layers.blocks import kernels
    from megatron_prefix.layers.kind import Heads
    from megatron_prefix.megatron import features

    features.check_version()
    heads = table.heads(spec) if spec else Heads(GROUP, GROUP, HEAD_DIM, HEAD_DIM)
    probed: Any = dict(group=heads.group, compiles=probes, head_dim_v=heads.value_width)
    reasons, chosen, why = {}, {}, {}
    for name in DTYPES:
        heads_of = device, getattr(torch, name), heads.width
        reasons[name] = working_kernels.available(*heads_of, **probed)
        chosen[name] = kernels.choose_kernel("auto", *heads_of, **probed).name
        why[name] = working_kernels.why(*heads_of, **probed)
    recurrent = _recurrent(functools.partial(probe.refusals, compiles=probes), device, spec)
    untried = [] if probes or device == "cpu" else [*kernels.COMPILED, *probe.COMPILED]
    return {
        "kernels": reasons,
        "chosen": chosen,
        "why": why,
        "recurrent": recurrent,
        "untried": untried,
        "stock_packs": stock_packs.refusal(heads.num, heads.num // heads.group, heads.width)
        if device == "cuda"
        else None,
        "model": _check_model(spec, torch.device(device)) if spec else None,
    }


def _recurrent(
    refusals: Callable[..., dict[str, str | None]], device: str, spec: ModelSpec | None
) -> dict[str, str | None]:
    """Why the kernels of recurrent layers do not work, by Megatron's module.

    Raises:
        UserError: the model needs one of these.
    """
    sizes: tuple[int, ...] = ()
    if spec:
        sizes = spec.linear_key_head_dim, spec.linear_value_head_dim, spec.linear_num_value_heads
    reasons = refusals(device, *sizes)
    for kind in spec.recurrent if spec else ():
        if why := reasons[kind.module]:
            raise UserError(f"the kernels of {kind.module} do not work here: {why}")
    return reasons


def _check_model(spec: ModelSpec, device: torch.device) -> dict[str, Any]:
    import torch

    from megatron_prefix.lab.models.config import transformer_config
    from megatron_prefix.lab.runtime.layout import Layout
    from megatron_prefix.megatron import features

    config = transformer_config(spec, Layout(), torch.float32, device, transformer_engine=False)
    refused = [reason.text for reason in features.refusals(config)]
    return {"name": spec.name, "parameters": spec.parameters(), "refused": refused}


# For people ---------------------------------------------------------------------------------------


def show(report: Mapping[str, Any], refused: bool = False, probe: bool = False) -> None:
    """What decides first, then the rest.

    Args:
        report: of `examine`.
        refused: add every kernel, and the table of refusals.
        probe: add every kernel.
    """
    device, untried = report["device"], report["untried"]
    same = Counter((one["name"], _sizes(one)) for one in report["devices"])
    rows = {
        "versions": _listed(version and f"{name} {version}" for name, version in _versions(report)),
        "not here": _listed(name for name, version in _versions(report) if not version),
        "devices": _listed(f"{n} x {name} ({size})" for (name, size), n in same.items()),
    }
    if report["untested"]:
        rows["not tested"] = f"{_listed(report['untested'])}; run with verify=2"
    for dtype, why in report["why"].items():
        is_untried = not set(untried).isdisjoint(report["chosen"][dtype].split())
        rows[f"kernel, {dtype}"] = f"{why}; {UNTRIED}" if is_untried else why
    _print_rows("doctor", rows)
    model = f"model {report['model']['name']} " if report["model"] else ""
    print(f"{model}on {device}: {'ready' if report['ok'] else 'not possible'}")
    for line in report["problems"]:
        print(f"  {line}")
    rows = {
        f"{name} {one['version']}": f"tried: {_listed(one['tried']) or 'never'}; on by"
        f" {one['on'].replace('`', '')}"  # it is a part of a page, too
        for name, one in report["trainers"].items()
    }
    for name, why in report["recurrent"].items():
        works = "works, in plain torch" if report["device"] == "cpu" else "works"
        rows[f"kernel of {name}"] = why or (UNTRIED if name in untried else works)
    if report["stock_packs"]:
        fix = "use another attention in stock steps, such as flash-attn"
        rows["packs of transformer-engine"] = f"{report['stock_packs']}; {fix}"
    if report["extras"]:
        commands = (f"{name}: {one['command']}" for name, one in report["extras"].items())
        rows["optional packages"] = "; ".join(commands)
    if not refused:
        rows["refused"] = f"{len(report['refusals'])} features, with what to do: doctor --refused"
    _print_rows("also", rows)
    if refused or probe:
        show_kernels(report)
    if refused:
        _print_refusals(report)


def _print_rows(title: str, rows: Mapping[str, str]) -> None:
    """A table of names and texts, without rows that have none."""
    print_table(title, None, ((name, text) for name, text in rows.items() if text), left=2)


def show_kernels(report: Mapping[str, Any]) -> None:
    """Prints every kernel on the device."""
    dtypes = ["", *report["kernels"]]
    title = f"attention kernels on {report['device']}"
    print_table(title, dtypes, _kernel_rows(report), left=len(dtypes))


def _print_refusals(report: Mapping[str, Any]) -> None:
    """The whole table, and what extras lack."""
    lacking = {name: _listed(extra["missing"]) for name, extra in report["extras"].items()}
    print_table("missing, and optional", ["extra", "packages"], lacking.items(), left=2)
    for where, title in GROUPS.items():
        refused = (x for x in report["refusals"] if x["where"] == where)
        rows = ((x["name"], x["fix"], x["kind"]) for x in refused)
        print_table(f"refused: {title}", ["", "what to do", ""], rows, left=3)


def _versions(report: Mapping[str, Any]) -> Iterable[tuple[str, str | None]]:
    return report["versions"].items()


def _listed(names: Iterable[str | None]) -> str:
    """Names on one line; None is left out."""
    return ", ".join(name for name in names if name)


def _sizes(device: Mapping[str, Any]) -> str:
    """Of a row of `devices`."""
    detail = f"{device['cores']} cores" if "cores" in device else f"sm {device['capability']}"
    return f"{detail}, {device['memory_gib']} GiB"


def _kernel_rows(report: Mapping[str, Any]) -> list[list[str]]:
    """Kernels by dtype: taken by "auto", working, or why not."""
    by_name: dict[str, list[str]] = {}
    for dtype, reasons in report["kernels"].items():
        for name, reason in reasons.items():
            # "cudnn or flash by shape" are two.
            works = "chosen" if name in report["chosen"][dtype].split() else "works"
            if name in report["untried"]:
                works = f"{works}, {UNTRIED}" if works == "chosen" else UNTRIED
            by_name.setdefault(name, []).append(reason or works)
    return [[name, *cells] for name, cells in by_name.items()]
