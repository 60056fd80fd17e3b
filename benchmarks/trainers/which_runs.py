"""The table in docs/validation.md of what ran in which trainer, made of what the tests run.

Forms are those of run_sources.py, and those that fall back. Families of models, for
docs/support.md, are those that test_own_delta.py and test_vision_models.py build from trainers'
sources.

python -m benchmarks.trainers.which_runs    # writes it
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from benchmarks.trainers import run_sources, test_own_delta, vision_models
from megatron_prefix import trainers
from megatron_prefix.trainers.trainer import Trainer
from tests.harness.data import REPOSITORY

PAGE = REPOSITORY / "docs" / "validation.md"
BEGIN = "<!-- trainers: python -m benchmarks.trainers.which_runs -->\n"
END = "<!-- end of trainers -->\n"
WORDS = {
    "fused": "its fused head", "padded": "padded rows", "unpacked": "padded rows",
    "thd": "packed rows", "r2": "routes that it records", "replay": "routes that it records",
    "r3": "routes of rollouts", "recompute": "full recomputation", "value": "critic",
    "critic": "critic", "sft": "SFT", "dpo": "DPO", "kto": "KTO", "rm": "rewards",
    "gkd": "distillation", "topk": "distillation", "full": "a reference model",
    "kl": "several calls a step", "sharded": "distributed optimizer", "hot": "a temperature",
    "across": "prompts across ranks", "mtp": "multi-token prediction", "whole": "whole groups",
    "gdn": "its GatedDeltaNet", "dsa": "its sparse attention",
    "tokens": "means over tokens", "sequences": "means over sequences",
    "static": "fixed microbatches", "packed": "packed rows",
    "frozen": "a frozen tower", "text": "text without images",
    "sound": "sound without images",
    **vision_models.BY_WORD,
}  # fmt: skip
"""What a word in a layout's name means, beside its ranks and its mode."""
EXPERTS = {"r2", "r3", "replay"}
BUILT_BY = {"mbridge": "verl", "mcore-bridge": "ms-swift"}
"""Packages with models of their own, and the trainer that builds models with them."""


def sources_of(trainer: Trainer) -> Iterator[run_sources.Trainer]:
    """What run_sources.py runs of a trainer."""
    for name, one in run_sources.TRAINERS.items():
        if name.partition(", ")[0] == trainer.name:
            yield one


def parts(layout: str) -> tuple[str, list[str]]:
    """The ranks that a layout's name means, as docs write them, and its other words."""
    words = [one for one in layout.split("-") if one not in ("1", "auto")]
    ranks = [one for one in words if one == "sp" or re.fullmatch(r"v?[a-z]p\d", one)]
    return " ".join(ranks).upper(), [one for one in words if one not in ranks]


def models_of(trainer: Trainer) -> Iterator[str]:
    """Families of models whose modules ran, of the trainer or of Megatron."""
    layouts = shared_layouts(trainer)
    if layouts:
        yield "dense"
    if any(EXPERTS & {*parts(one)[1]} for one in layouts):
        yield "experts"
    if trainer.name in {one for one, _, _ in test_own_delta.MODULES.values()}:
        yield "its GatedDeltaNet"
    if any("dsa" in parts(one)[1] for one in layouts):
        yield "its sparse attention"
    models = (vision_models.BY_WORD.get(word) for one in layouts for word in parts(one)[1])
    yield from dict.fromkeys(filter(None, models))
    for name in [name for name, model in vision_models.MODELS.items() if not model.heard]:
        package, _, model = name.partition(", ")
        if BUILT_BY.get(package, package) == trainer.name:
            yield model


def shared_layouts(trainer: Trainer) -> list[str]:
    """Names of layouts whose steps share."""
    known = [*sources_of(trainer)]
    stock = {name for one in known for name in one.stock}
    return [name for one in known for name in one.layouts if name not in stock]


def row(trainer: Trainer) -> str:
    """A trainer's line of the table."""
    known = [*sources_of(trainer)]
    stock = {name: refusal for one in known for name, refusal in one.stock.items()}
    words = dict.fromkeys(WORDS[word] for one in shared_layouts(trainer) for word in parts(one)[1])
    fallen: dict[str, list[str]] = {}
    for name, refusal in stock.items():
        where, forms = parts(name)
        told = [where, ", ".join(WORDS[word] for word in forms)]
        names = fallen.setdefault(refusal.name, [])
        if not {*told} & {*names}:  # not what falls back in one rank, or in any form, too
            names.append(", ".join(filter(None, told)))
    reasons = "; ".join(f"{' / '.join(names)}: {reason}" for reason, names in fallen.items())
    cells = [trainer.name, ", ".join(words), reasons]
    return "| " + " | ".join(cells if known else [*cells[:1], "read only", ""]) + " |"


def documented() -> str:
    """The table as docs/validation.md has it."""
    head = "| trainer | forms and objectives | stock schedule in mode `auto` |"
    lines = [head, "|---|---|---|"]
    return "\n".join([*lines, *map(row, trainers.TRAINERS)]) + "\n"


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    text = before + BEGIN + documented() + END + rest.partition(END)[2]
    PAGE.write_text(text, encoding="utf-8")
