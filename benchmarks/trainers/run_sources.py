"""Trainers' own forward steps under both schedules, from sources that are there already.

    python -m benchmarks.trainers.run_sources [--verify] FOLDER [TRAINER[:WORD]...]

FOLDER holds one folder a trainer: Megatron-LM, slime, miles, RLinf, AReaL, ROLL, RL (NeMo-RL),
ms-swift, SkyRL, Megatron-Bridge (of it NeMo-RL takes heads and models of images), and verl (an
installation with `pip install --target`, which test_verl.py makes: other trainers take packages
from it, too), each a checkout, or an export with the commit in a file COMMIT; and megatron-core, an
installation of 0.19 for SkyRL and Megatron-Bridge. Nothing is fetched. Every layout runs in a
process of its own and may take five minutes. Prints a table for docs/results.md; what did not run
is in it with the reason, and the exit code is then 1.

With a WORD only layouts that have it in their name: `verl:value`. What else is in a layout's name,
such as an objective, is said by the module that runs it. With --verify layouts run with
`PrefixConfig.verify`, whose largest difference is in the table instead of those measured here.
A layout with "auto" in its name has a form that mode "auto" shares, or leaves to the stock schedule
for the reason in the table, bit for bit.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from megatron_prefix.errors import GAP, Refusal
from megatron_prefix.features.watch.around import WATCHED
from megatron_prefix.refusals.table import (
    NOT_CAUSAL,
    OTHER_SENT,
    RECORDS_ROUTES,
    SWITCHED,
    UNMARKED_BIAS,
)
from tests.core.trainers.both import Step

TIME_LIMIT_S = 300
STOCK = "stock schedule: "


class Trainer(NamedTuple):
    """Where a trainer's code is and what of it runs.

    Attributes:
        module: of this folder, or of tests/core/trainers.
        folders: in the folder of sources; the first one is the trainer's own.
        layouts: see worker.py.
        core: the folder with its Megatron-Core, if it is not this environment's.
        stock: layouts in mode "auto" with steps of the stock schedule, and why; no others have.
    """

    module: str
    folders: tuple[str, ...]
    layouts: tuple[str, ...]
    core: str = ""
    stock: Mapping[str, Refusal] = MappingProxyType({})


MTP = ("1-mtp", "tp2-sp-mtp", "pp2-mtp", "cp2-mtp", "pp2-mtp-recompute-auto", "dp2-across-mtp-auto")
DSA = ("1-dsa", "tp2-sp-dsa", "pp2-dsa", "cp2-dsa", "cp2-r3-dsa", "cp2-recompute-dsa-auto")
DEALT = ("dp2-whole", "dp2-whole-tokens", "dp2-whole-static", "dp2-pp2-whole")
IMAGES = (
    "1-qwen2-auto", "tp2-sp-qwen2", "pp2-qwen2", "1-qwen2-packed", "1-frozen-qwen2",
    "1-qwen3-packed", "cp2-qwen3-packed", "tp2-sp-cp2-qwen3-packed",
    "1-qwen35-auto", "tp2-sp-qwen35", "pp2-qwen35", "dp2-across-qwen35-auto", "1-frozen-qwen35",
    "1-omni2-sound-auto", "tp2-sp-omni2-sound", "pp2-omni2-sound", "1-omni2", "1-omni3-auto",
    "tp2-sp-omni3", "pp2-omni3", "dp2-across-omni3-sound-auto", "1-frozen-omni3",
)  # fmt: skip
IMAGES_NEWER = (
    "1-qwen35-packed", "tp2-sp-qwen35-packed", "pp2-qwen35-packed", "cp2-qwen35-packed",
    "cp2-qwen35-packed-text", "1-nemotron-auto", "tp2-sp-nemotron", "pp2-nemotron",
    "dp2-across-nemotron-auto", "1-frozen-nemotron", "1-nemotron-packed-auto",
    "tp2-sp-nemotron-packed", "pp2-nemotron-packed", "cp2-nemotron-packed",
    "tp2-sp-cp2-nemotron-packed", "dp2-ep2-nemotron-packed-auto", "1-qwen3-mtp", "1-qwen35-mtp",
    "tp2-sp-qwen35-mtp", "pp2-qwen35-mtp-auto", "1-nemotron-mtp", "pp2-nemotron-mtp",
    "1-nemotron-packed-mtp-auto",
)  # fmt: skip
"""GatedDeltaNet takes packs by a newer megatron-core, and Nemotron Omni wants one."""
REPLAYS = ("1-replay-auto", "tp2-sp-replay-auto", "pp2-replay-auto")
TRAINERS = {
    "verl, engine": Trainer(
        "verl_steps", ("verl",),
        ("1", "tp2", "tp2-sp", "pp2", "tp2-pp2", "cp2", "pp2-cp2", "1-fused", "tp2-fused",
         "pp2-fused", "cp2-fused", "tp2-sp-fused", "tp2-sp-pp2-fused", "tp2-sp-cp2-fused",
         "1-padded-auto", "tp2-sp-padded-auto", "pp2-padded-auto", "1-r2-auto",
         "pp2-r2-auto", "tp2-sp-r2-auto", "1-r3-auto", "pp2-r3-recompute-auto", "tp2-sp-r3-auto",
         "cp2-r3-auto", "dp2-ep2-r3-auto", "dp2-across-r3-auto", "tp2-sp-fused-auto",
         "1-value", "tp2-value", "tp2-sp-value", "pp2-value", "cp2-value", "1-value-auto"),
        stock=dict.fromkeys(("1-r2-auto", "pp2-r2-auto", "tp2-sp-r2-auto"), RECORDS_ROUTES),
    ),
    "Megatron-LM, pretrain_gpt": Trainer(
        "megatron_lm_steps", ("Megatron-LM",),
        ("1", "tp2", "pp2", "cp2", "dp2-sharded", "1-thd", "pp2-thd", "tp2-pp2"),
    ),
    "Megatron-RL, train_rl": Trainer(
        "megatron_rl_steps", ("Megatron-LM", "verl"), ("1", "tp2", "pp2", "tp2-pp2")
    ),
    "slime, model.py": Trainer(
        "slime_steps", ("slime", "Megatron-LM"),
        ("1", "tp2", "pp2", "cp2", "tp2-pp2", "1-auto", "1-replay-auto", "tp2-sp-replay-auto",
         "pp2-replay-auto", "1-r3-auto", "pp2-r3-recompute-auto", "tp2-sp-r3-auto", "cp2-r3-auto",
         "dp2-ep2-r3-auto", "dp2-across-r3-auto", "1-value", "tp2-sp-value", "pp2-value",
         "cp2-value", "1-value-auto", "1-sft", "tp2-sft", "pp2-sft", "cp2-sft", "1-sft-auto", *DSA),
        stock=dict.fromkeys(REPLAYS, RECORDS_ROUTES),
    ),
    "miles, model.py": Trainer(
        "miles_steps", ("miles", "Megatron-LM", "verl"),
        ("1", "tp2", "pp2", "cp2", "tp2-pp2", "1-auto", "1-replay-auto", "tp2-sp-replay-auto",
         "pp2-replay-auto", "1-r3-auto", "pp2-r3-recompute-auto", "tp2-sp-r3-auto", "cp2-r3-auto",
         "dp2-ep2-r3-auto", "dp2-across-r3-auto", "1-value", "tp2-value", "pp2-value", "cp2-value",
         "1-value-auto", "tp2-sp-value-auto", "tp2-sp-pp2-value-auto", "1-sft", "tp2-sft",
         "pp2-sft", "cp2-sft", "1-sft-auto", "1-gdn", "tp2-sp-gdn", "cp2-gdn", "tp2-sp-cp2-gdn",
         "cp2-gdn-recompute-auto", *DSA),
        stock=dict.fromkeys(REPLAYS, RECORDS_ROUTES)
        | dict.fromkeys(("tp2-sp-value-auto", "tp2-sp-pp2-value-auto"), UNMARKED_BIAS),
    ),
    "slime, model.py and its Megatron": Trainer(
        "slime_steps", ("slime", "Megatron-LM-slime"), MTP, "Megatron-LM-slime"
    ),
    "miles, model.py and its Megatron": Trainer(
        "miles_steps", ("miles", "Megatron-LM-miles", "verl"), MTP, "Megatron-LM-miles"
    ),
    "slime, whole groups": Trainer(
        "dealing_steps", ("slime", "Megatron-LM"), ("dp3-whole", *DEALT)
    ),
    # Gradients of its logits are bf16 (Megatron's fused_cross_entropy.py): with three ranks a third
    # of them rounds otherwise, so the stock schedule's differ by 2.5e-3 from those of two ranks.
    "miles, whole groups": Trainer("dealing_steps", ("miles", "Megatron-LM", "verl"), DEALT),
    "NeMo-RL, whole groups": Trainer(
        "nemo_dealing_steps", ("RL", "Megatron-LM", "verl", "Megatron-Bridge/src"),
        ("dp2-whole-tokens", "dp2-whole-sequences", "dp3-whole-tokens"),
    ),
    "RLinf, megatron_actor_worker": Trainer(
        "rlinf_steps", ("RLinf", "Megatron-LM", "verl"),
        ("1", "tp2", "cp2", "1-hot", "1-auto", "tp2-sp-auto", "pp2-auto", "pp2-hot-auto",
         "dp2-auto", "1-critic", "tp2-critic", "1-critic-auto"),
        stock=dict.fromkeys(("pp2-auto", "pp2-hot-auto"), OTHER_SENT),
    ),
    "AReaL, megatron_engine": Trainer(
        "areal_steps", ("AReaL", "verl"),
        ("1", "tp2-sp", "pp2", "tp2-sp-pp2", "cp2", "1-auto", "tp2-sp-auto", "pp2-auto",
         "pp2-vpp2-auto", "cp2-auto", "dp2-auto", "dp2-across-auto", "1-value", "tp2-sp-value",
         "1-value-auto", "1-sft", "tp2-sp-sft", "pp2-sft", "cp2-sft", "1-sft-auto", "1-dpo",
         "tp2-sp-dpo", "pp2-dpo", "1-dpo-auto"),
    ),
    "AReaL, whole groups": Trainer(
        "areal_dealing_steps", ("AReaL", "verl"),
        ("1-whole", "tp2-sp-whole", "pp2-whole", "dp2-whole", "1-value-whole"),
    ),
    "ROLL, megatron_strategy": Trainer(
        "roll_steps", ("ROLL", "ROLL/mcore_adapter/src", "verl"),
        ("1", "tp2", "tp2-sp", "pp2", "tp2-pp2", "cp2", "1-thd", "tp2-sp-thd", "pp2-thd",
         "cp2-thd", "1-auto", "tp2-sp-auto", "pp2-auto", "tp2-pp2-auto", "cp2-auto", "dp2-auto",
         "dp2-across-auto", "1-thd-auto", "1-r3-auto", "tp2-sp-r3-auto", "pp2-r3-auto",
         "dp2-r3-auto", "1-sft", "tp2-sft", "pp2-sft", "cp2-sft", "1-sft-auto"),
    ),
    "ROLL, whole groups": Trainer(
        "roll_dealing_steps", ("ROLL", "ROLL/mcore_adapter/src", "verl"),
        ("dp2-whole-tokens", "dp2-whole-sequences", "dp2-thd-whole-tokens", "dp2-pp2-whole-tokens"),
    ),
    "Megatron-Bridge, train_step": Trainer(
        "bridge_steps", ("Megatron-Bridge", "Megatron-Bridge/src", "verl"),
        ("1", "tp2", "tp2-sp", "pp2", "cp2", "tp2-pp2", "1-thd", "tp2-thd", "pp2-thd", "1-auto",
         "pp2-auto", "dp2-auto", "1-thd-auto"),
        "megatron-core",
    ),
    "NeMo-RL, train.py": Trainer(
        "nemo_rl_steps", ("RL", "Megatron-LM", "verl", "Megatron-Bridge/src"),
        ("1", "tp2", "pp2", "cp2", "tp2-pp2", "1-auto", "1-unpacked-auto", "1-unpacked-dpo-auto",
         "pp2-unpacked-dpo-auto", "1-fused-auto", "1-unpacked-fused-auto", "tp2-sp-fused-auto",
         "pp2-fused-auto", "1-unpacked-fused-dpo-auto", "1-r3-auto", "pp2-r3-recompute-auto",
         "tp2-sp-r3-auto", "cp2-r3-auto", "1-unpacked-r3-auto",
         "1-value", "1-unpacked-value",
         "tp2-sp-value", "pp2-value", "cp2-value", "1-value-auto", "1-topk", "1-unpacked-topk",
         "tp2-topk", "pp2-topk", "cp2-topk", "1-topk-auto"),
    ),
    "NeMo-RL, train.py by 0.19": Trainer(
        "nemo_rl_steps", ("RL", "Megatron-LM", "verl", "Megatron-Bridge/src"),
        ("1-mtp", "1-unpacked-mtp", "tp2-sp-mtp", "pp2-unpacked-mtp-recompute", "cp2-mtp",
         "1-unpacked-mtp-auto"),
        "megatron-core",
    ),
    "NeMo-RL, images": Trainer(
        "nemo_rl_images_steps", ("RL", "Megatron-LM", "verl", "Megatron-Bridge"), IMAGES
    ),
    "NeMo-RL, images by 0.19": Trainer(
        "nemo_rl_images_steps", ("RL", "Megatron-LM", "verl", "Megatron-Bridge"), IMAGES_NEWER,
        "megatron-core",
    ),
    "ms-swift, trainers": Trainer(
        "swift_steps", ("ms-swift",),
        ("1-dpo", "tp2-dpo", "1-dpo-full", "1-dpo-auto", "pp2-dpo-auto", "pp2-dpo-full-auto",
         "dp2-dpo-auto", "1-kto", "1-kto-kl", "tp2-kto-kl", "1-kto-kl-full", "1-kto-kl-auto",
         "1-rm", "tp2-rm", "pp2-rm", "1-rm-auto", "1-gkd", "tp2-gkd", "pp2-gkd", "1-gkd-auto",
         "1-sft", "tp2-sft", "pp2-sft", "1-sft-auto"),
        stock={"pp2-dpo-auto": SWITCHED, "pp2-dpo-full-auto": OTHER_SENT},
    ),
    "SkyRL, megatron_model_wrapper": Trainer(
        "skyrl_steps", ("SkyRL", "SkyRL/skyrl-gym", "verl"),
        ("1", "tp2", "pp2", "cp2", "tp2-pp2", "1-auto", "1-unpacked-auto", "tp2-unpacked-auto",
         "pp2-unpacked-auto", "1-fused-auto", "tp2-fused-auto", "pp2-fused-auto",
         "1-unpacked-fused-auto", "1-r3-auto", "pp2-r3-recompute-auto", "tp2-sp-r3-auto",
         "cp2-r3-auto"),
        "megatron-core",
        {"pp2-unpacked-auto": NOT_CAUSAL},
    ),
}  # fmt: skip


def commit_of(folder: Path) -> str:
    """The first characters of a source's commit, or the version of an installation."""
    for name in ("COMMIT", "verl/version/version"):
        if (folder / name).exists():
            return (folder / name).read_text(encoding="utf-8").split()[0][:9]
    command = ["git", "-C", str(folder), "rev-parse", "--short=9", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "?"


def module_of(trainer: Trainer) -> str:
    """Steps that tests run, too, stand with the tests; others beside this file."""
    here = Path(__file__).with_name(f"{trainer.module}.py").exists()
    return f"{'benchmarks' if here else 'tests.core'}.trainers.{trainer.module}"


def run(trainer: Trainer, sources: Path, layout: str) -> str:
    """What the table says of one layout: figures, or why there are none."""
    folders = os.pathsep.join(str(sources / name) for name in trainer.folders)
    environ = dict(os.environ, TRAINER_SOURCES=str(sources))
    if trainer.core:
        given = [str(sources / trainer.core), environ.get("PYTHONPATH", "")]
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, given))
    command = [sys.executable, "-W", "ignore", "-m", module_of(trainer), folders]
    try:
        done = subprocess.run(
            [*command, layout], capture_output=True, text=True, timeout=TIME_LIMIT_S, env=environ
        )
    except subprocess.TimeoutExpired:
        return f"failed: longer than {TIME_LIMIT_S} s"
    lines = re.findall(r'\{"layout".*', done.stdout)  # behind a progress bar, in slime
    seen = json.loads(lines[0]) if lines else {"error": done.stderr, "ranks": []}
    if seen["error"] or not seen["ranks"]:
        return f"failed: {(seen['error'].split() and seen['error'].strip().splitlines()[-1])[:200]}"
    return told([Step(**step) for rank in seen["ranks"] for step in rank])


def told(steps: list[Step]) -> str:
    """What the table says of steps that ran; the watched ones only have to be stock's."""
    if problem := next((step.problem for step in steps if step.problem), ""):
        return f"failed: {problem}"
    steps = [step for step in steps if step.reason != WATCHED]
    if not steps:
        return "failed: nothing ran but watched steps"
    if reasons := dict.fromkeys(step.reason for step in steps if step.reason):
        return f"0 | 0 | 0 | {STOCK}{'; '.join(reasons)}"
    worst = max(steps, key=lambda step: step.gradient)
    results = max(step.results for step in steps)
    if worst.verified is not None:
        units = max(step.verified or 0.0 for step in steps)
        return f"{units:.2g} of the limit | | {worst.limit:.1e} | {worst.executed} of {worst.raw}"
    return (
        f"{worst.gradient:.1e} | {results:.1e} | {worst.limit:.1e} | {worst.executed} of"
        f" {worst.raw}"
    )


def as_listed(said: str, refusal: Refusal | None) -> str:
    """What the table says of a layout; failed, if it does not fall back as `Trainer.stock` has it.

    Args:
        said: by `run`.
        refusal: why steps of the layout are stock's; None if all are shared.
    """
    wanted = "" if refusal is None else max(refusal.name.split(GAP), key=len)
    if said.startswith("failed") or (wanted in said if wanted else STOCK not in said):
        return said
    return f"failed: not as listed ({wanted or 'shared'}): {said}"


def main() -> int:
    """Runs the trainers of the command line, all by default."""
    suffix, arguments = "", sys.argv[1:]
    if arguments[0] == "--verify":
        suffix, arguments = "-verify", arguments[1:]
    sources = Path(arguments[0]).resolve()
    wanted = arguments[1:] or list(TRAINERS)
    print("| trainer | commit | layout | gradients | results | allowed | tokens executed |")
    print("|---|---|---|---|---|---|---|", flush=True)
    failed = False
    for name, trainer in TRAINERS.items():
        words = [word for one, _, word in (w.partition(":") for w in wanted) if one in name]
        layouts = [one for one in trainer.layouts if any(word in one for word in words)]
        if not layouts:
            continue
        folders = filter(None, (*trainer.folders, trainer.core))
        missing = [one for one in folders if not (sources / one).is_dir()]
        for layout in layouts:
            if missing:
                said = f"failed: no folder {missing[0]}"
            else:
                said = run(trainer, sources, layout + suffix)
                said = as_listed(said, trainer.stock.get(layout))
            failed |= said.startswith("failed")
            commit = "" if missing else commit_of(sources / trainer.folders[0])
            print(f"| {name} | {commit} | {layout} | {said} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
