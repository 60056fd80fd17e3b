"""What ran where, for docs/support.md and docs/families/models.md: from the tables of trainers and
versions, the rows of benchmarks/results, and for the CPU also from the rows that tests compare.

python -m benchmarks.support            # writes the tables anew, and prints them
"""

from __future__ import annotations

import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from packaging.version import Version

from benchmarks.figures import ROOT, Row, read, table
from benchmarks.trainers import which_runs
from megatron_prefix.lab.runtime.layout import Layout
from megatron_prefix.trainers.table import TRAINERS
from megatron_prefix.trainers.trainer import Trainer
from megatron_prefix.trainers.versions import TESTED as PACKAGES
from tests.cases import LAYOUTS
from tests.core.alignment import test_quantised, test_vision
from tests.test_cases import ROWS
from tests.test_cases_across_ranks import ACROSS
from tests.test_cases_on_ranks import ON_RANKS

PAGE = ROOT / "docs" / "support.md"
MODELS_PAGE = ROOT / "docs" / "families" / "models.md"
COMMAND = "python -m benchmarks.support"
PART = re.compile(rf"(<!-- (\w+): {COMMAND} -->\n)(.*?)(<!-- end of \2 -->)", re.S)
FAMILIES = {
    "vision-language": r"-VL-",
    "hybrid (Mamba2)": r"Nemotron-H",
    "multi-token prediction": r"MTP",
    "hybrid (GatedDeltaNet)": r"Qwen3\.5|Qwen3-Next",
    "MLA, with and without experts": r"Moonlight|DeepSeek",
    "windows and sinks, with and without experts": r"gpt-oss",
    "experts": r"A3B|tiny-moe",
    "dense": r"Llama|Qwen3|tiny-llama",
}
"""Families, and what names of models of each have; the first that fits counts."""
TESTED = {
    "sparse attention (DSA)": "dsa|own sparse",
    "Kimi K3's layers": "kimi",
    "hyper-connections": "streams",
    "multi-token prediction": "mtp",
    "trainers' own GatedDeltaNet": "own delta",
    "hybrid (Mamba2)": "mamba",
    "hybrid (GatedDeltaNet)": "gdn",
    "MLA, with and without experts": "mla",
    "windows and sinks, with and without experts": "gpt-oss|gemma|mistral|window|sinks",
    "adapters (LoRA)": "adapted|switched",
    "experts": "expert|aux_loss|replay",
    "dense": "",
}
"""Families, and how names of models in tests/cases.py begin; the first that fits counts."""
DENSE, EXPERTS, MTP = "dense", "experts", "multi-token prediction"
MLA, DSA = "MLA, with and without experts", "sparse attention (DSA)"
GDN, MAMBA = "hybrid (GatedDeltaNet)", "hybrid (Mamba2)"
WINDOWS = "windows and sinks, with and without experts"
OF_MODELS = {
    "Llama 3, Qwen2, Qwen3": ("Llama3|Qwen3-(8B|0)", [DENSE]),
    "Qwen3-30B-A3B": ("Qwen3-30B", [EXPERTS]),
    "Qwen3-Next, Qwen3.5": (r"Qwen3-Next|Qwen3\.5", [GDN, EXPERTS, MTP]),
    "Nemotron-H, Nemotron 3": ("Nemotron", [MAMBA, EXPERTS]),
    "DeepSeek-V3, Moonlight": ("DeepSeek-V3 |Moonlight", [MLA, EXPERTS, MTP]),
    "GLM-4.5, GLM-4.6, GLM-4.7 (`glm4_moe`)": (r"GLM-4\.[567](?!-)", [EXPERTS, MTP]),
    "GLM-4.7-Flash": ("GLM-4.7-Flash", [MLA, EXPERTS, MTP]),
    "DeepSeek-V3.2, GLM-5": (r"DeepSeek-V3\.2|GLM-5", [DSA, EXPERTS]),
    "Kimi K3": ("Kimi K3", ["Kimi K3's layers"]),
    "gpt-oss": ("gpt-oss", [WINDOWS, EXPERTS]),
    "Gemma 3, Mistral": ("Gemma|Mistral", [WINDOWS]),
    "Qwen2-VL to Qwen3.5, GLM-4V, Kimi-K2.5": ("-VL-", ["vision-language"]),
    "any, with adapters": ("LoRA", ["adapters (LoRA)"]),
    "any, in FP8": ("FP8", ["FP8, blockwise scales"]),
}
"""Models of docs/families/models.md: what names and options of their rows have, and the families of
its kinds of layers."""
ONE, ACROSS_RANKS = "one rank", "CPU, prompts across ranks"
VISION, QUANTISED = "vision-language", "ModelOpt's quantisers (QAT)"
PLACES = {"CPU": 0, "one GPU": 1, "two GPUs": 2, "four GPUs": 4}
"""Columns, and how many GPUs each means."""
ON_GPUS = (
    "fp8", "hybrid", "hybrid_packed", "images", "latents", "layouts_gpus", "packed", "replay_gpu"
)  # fmt: skip
STEPS = ("trainer_gradients", "trainer_auto", "trainer_objectives", "trainer_runs", "trajectory")


def families_of(row: Row) -> Iterator[str]:
    """The family of a row's model, and FP8."""
    model = row["model"].replace("pretrain_gpt.py", "tiny-llama")
    found = next((name for name, names in FAMILIES.items() if re.search(names, model)), "")
    if found:
        yield found
    if "FP8" in f"{row['model']} {row['options']}" and "bf16" not in row["options"]:
        yield "FP8, blockwise scales"
    if "windows" in row["options"] and found == "dense":
        yield "windows and sinks, with and without experts"


def place_of(row: Row) -> str | None:
    """The column of a row, by the ranks of its layout; None if nothing ran."""
    if row["machine"] == "simulated" or "CPU" in row["machine"]:
        return None if row["machine"] == "simulated" else "CPU"
    sizes = [
        int(size) for name, size in re.findall(r"([A-Z]+)(\d+)", row["layout"]) if name != "VPP"
    ]
    return next(name for name, num in PLACES.items() if num == math.prod(sizes))


def ran(rows: Iterable[Row]) -> dict[str, dict[str, list[str]]]:
    """Layouts by family and place, in the order of the rows."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        cpu = {"dense": "dense", "experts": "experts"} if row["question"] == "layout_matrix" else {}
        names = [name for name in cpu if name in row["figures"]] or [*families_of(row)]
        if not cpu and row["question"] not in ON_GPUS:
            continue
        layout = "yes" if row["layout"] == "one GPU" else row["layout"].partition(",")[0]
        for name in names:
            layouts = found[name][place_of(row) or ""]
            if layout not in layouts:
                layouts.append(layout)
    return found


def called(layout: Layout) -> str:
    """A layout as rows of results call it: TP2 x PP2 SP; data-parallel ranks that experts need have
    no name."""
    dp = 1 if layout.ep > 1 and layout.dp * layout.cp == layout.ep else layout.dp
    sizes = {**vars(layout), "dp": dp}
    names = [f"{name.upper()}{sizes[name]}" for name in ("tp", "pp", "vpp", "cp", "ep", "dp")
             if sizes[name] > 1]  # fmt: skip
    return (" x ".join(names) or ONE) + " SP" * layout.sequence_parallel


def as_called(layout: str) -> str:
    """A trainer's layout by the names of `called`; what says more than ranks stays as it is."""
    if layout in ("1", "1 rank"):
        return ONE
    if not re.fullmatch(r"[A-Z\dx ]+", layout):
        return layout
    sizes = re.findall(r"[A-Z]+\d+", layout)
    return " x ".join(sizes) + " SP" * ("SP" in layout.split())


def tested() -> Iterator[tuple[str, str, str]]:
    """Families, places and layouts that tests compare with the stock schedule, in fp64."""
    jobs = [("CPU", "one", ROWS), *(("CPU", *job) for job in ON_RANKS.items())]
    for place, layout, cases in (*jobs, *((ACROSS_RANKS, *job) for job in ACROSS.items())):
        for case in cases:
            begins = ((name, re.match(text, case.values["model"])) for name, text in TESTED.items())
            if case.expects == "equal" and not case.mistake:
                family = next(name for name, fits in begins if fits)
                yield family, place, called(LAYOUTS[layout])
    for layout, _ in test_vision.JOBS.values():
        yield VISION, "CPU", called(layout)
    for name in test_quantised.ROWS:
        yield QUANTISED, "CPU", called(LAYOUTS[name])


def by_family(rows: Sequence[Row]) -> dict[str, dict[str, list[str]]]:
    """Layouts by family and place: of recorded runs, then of tests."""
    layouts = ran(rows)
    for name, place, layout in tested():
        known = layouts[name][place]
        if parts_of(layout) not in map(parts_of, known):
            known.insert(0 if layout == ONE else len(known), layout)
    return layouts


def parts_of(layout: str) -> frozenset[str]:
    """A layout whose parts may stand in any order."""
    return frozenset(layout.split(" x "))


def models(rows: Sequence[Row]) -> str:
    """A line for each family: its layouts on CPUs and on one, two and four GPUs."""
    places = ["CPU", ACROSS_RANKS, *(place for place in PLACES if place != "CPU")]
    lines = (
        [name, *(", ".join(ran_on[place]) for place in places)]
        for name, ran_on in sorted(by_family(rows).items())
    )
    return table(["family", *places], lines)


def layouts_of(trainer: Trainer, rows: Iterable[Row]) -> tuple[list[str], list[str]]:
    """Layouts whose steps shared in a trainer, and what ran besides its policy loss."""
    layouts, forms = dict[str, None](), dict[str, None]()
    script = "pretrain_gpt.py" if trainer.name == "Megatron-LM" else "no script"
    for row in rows:
        mine = row["model"].partition(" ")[0].rstrip(",") in (trainer.name, script)
        if row["question"] not in STEPS or not mine or row["figures"].get("schedule") == "stock":
            continue
        if row["figures"].get("second_step", "shared") == "stock schedule":
            continue
        for one in re.split(r"[,;] ", row["layout"]):
            layouts[as_called(one)] = None
        forms |= dict.fromkeys(row["subject"].split(":")[:1])
    return [*layouts], [*forms]


def trainers(rows: Sequence[Row]) -> str:
    """A line for each trainer: versions, models, layouts and forms that ran, and what it is
    refused."""
    lines = []
    for one in TRAINERS:
        layouts, forms = layouts_of(one, rows)
        page = f"trainers/{one.name.lower().replace('-', '_')}.md"
        listed = [", ".join(some) for some in (one.tried, which_runs.models_of(one), layouts)]
        refused = "; ".join(refusal.name for refusal in one.refused)
        lines.append([f"[{one.name}]({page})", *listed, str(len(forms)), refused])
    head = ["trainer", "versions that ran", "models", "layouts, on the CPU", "forms and losses"]
    return table([*head, "refused"], lines)


def ran_versions(rows: Iterable[Row]) -> dict[str, dict[str, list[Version]]]:
    """Versions of each package that ran, on the CPU and on GPUs; not those with which something has
    failed."""
    found = {name: {"CPU": set[Version](), "GPUs": set[Version]()} for name in PACKAGES}
    for row in rows:
        if row["machine"] == "simulated" or row["figures"].get("failed"):
            continue
        place = "CPU" if "CPU" in row["machine"] else "GPUs"
        for name, version in row["versions"].items():
            if (package := name.replace("_", "-")) in found:
                found[package][place].add(Version(version.partition("+")[0]))
    return {name: {place: sorted(those) for place, those in ran.items()}
            for name, ran in found.items()}  # fmt: skip


def packages(rows: Sequence[Row]) -> str:
    """A line for each package: versions that ran, and what counts as tested."""
    head = ["package", "on the CPU", "on GPUs", "counts as tested"]
    return table(head, [
        [name, *(", ".join(map(str, those)) for those in ran.values()), ", ".join(PACKAGES[name])]
        for name, ran in ran_versions(rows).items()
    ])  # fmt: skip


def runs_of(model: str, rows: Iterable[Row]) -> str:
    """Where a model of docs/families/models.md has run: GPUs, or tiny models with its layers."""
    names, families = OF_MODELS[model]
    ran_on = {
        place_of(row) for row in rows if re.search(names, f"{row['model']}, {row['options']}")
    }
    gpus = [place for place in PLACES if place in ran_on and place != "CPU"]
    has_tiny = any(families[0] == tested_family for tested_family, _, _ in tested())
    return ", ".join(gpus) or "tiny models of its layers, on the CPU" * has_tiny


def common_layouts(model: str, rows: Sequence[Row]) -> str:
    """Layouts of several ranks in which all of a model's kinds of layers have run, wherever."""
    layouts = by_family(rows)
    ran_in = [
        [layout for several in layouts[family].values() for layout in several]
        for family in OF_MODELS[model][1]
    ]
    sets = [set(map(parts_of, several)) for several in ran_in]
    common = {parts_of(each): each for each in ran_in[0] if all(parts_of(each) in s for s in sets)}
    return ", ".join(each for each in common.values() if each not in (ONE, "yes"))


def with_runs(table_by_hand: str, rows: Sequence[Row]) -> str:
    """The table of models with its last columns made anew; the others are written by hand."""
    head, _, *lines = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table_by_hand.splitlines()
    )
    if any(len(cells) != len(head) for cells in lines):
        raise ValueError("a line of the table of models has other columns than its head")
    return table(head, [
        [*cells[:-2], runs_of(cells[0], rows), common_layouts(cells[0], rows)] for cells in lines
    ])  # fmt: skip


def written(text: str, rows: Sequence[Row]) -> str:
    """A page with its tables made anew."""
    makers = {"models": models, "packages": packages, "trainers": trainers}

    def made(found: re.Match[str]) -> str:
        name, old = found[2], found[3]
        new = with_runs(old, rows) if name == "has_run" else makers[name](rows)
        return f"{found[1]}{new}{found[4]}"

    return PART.sub(made, text)


if __name__ == "__main__":
    for page in (PAGE, MODELS_PAGE):
        text = written(page.read_text(encoding="utf-8"), read())
        page.write_text(text, encoding="utf-8")
        print(*(found[3] for found in PART.finditer(text)), sep="\n")
    sys.exit(0)
