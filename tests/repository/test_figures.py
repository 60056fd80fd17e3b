"""Figures and tables of documents are those of benchmarks/results and of the code."""

import dataclasses
import datetime
import json
import re

import pytest

from benchmarks import figures, support
from benchmarks.figures import read
from megatron_prefix import __version__
from megatron_prefix.config import PrefixConfig
from megatron_prefix.refusals.table import TABLE
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.trainers import TRAINERS, versions
from tests.harness.data import REPOSITORY
from tests.repository import generated
from tests.repository.test_documents import WHICH_RUNS, written_by_hand

NUMBER = re.compile(r"(?<![\w.,-])(\d[\d,]*(?:\.\d+)?(?:e-?\d+)?)( ?(?:x|ms|GiB|%))?(?![\w.]*\w)")
NAMES = re.compile(
    r"(?:torch|Python|transformer-engine|Megatron-Core|CUDA|nvidia-modelopt|arXiv)\s[\d.]+"
    r"|Qwen[\w.-]+|\d+\.\d+\.\d+|(?<![\d.])0\.1[6-9](?![\d.])"
)
"""Names and versions; those of Megatron-Core are 0.16 to 0.19."""
SETTINGS = {"5 %", "30 GiB"}
"""What is set and not measured: the limit of a step's memory, and a budget."""
OTHERS = {"docs/related-work.md"}
"""Pages with figures of others, each with its source."""
NOT_MEASURED = {
    "README.md": {"1.2"},  # (P + R) / R
    "docs/changelog.md": {"1.0"},  # a release
    "docs/cuda-graphs.md": {"0.97", "8 %"},  # rules of the code
    "docs/families/hybrid.md": {"72 GiB"},  # 1,000 states
    "docs/families/mla-and-windows.md": {"1.1"},  # KiB of a latent
    "docs/families/sparse-attention.md": {"64 x", "128 x", "2,048 x"},  # products of widths
    "docs/tuning-and-memory.md": {"100 GiB", "105 GiB", "10 %", "2 %"},  # an example; tests
    "docs/when-a-step-is-shared.md": {"1.5"},  # a rule of the code
}
"""Numbers of pages that no row can have."""
PAGES = [
    path
    for path in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md")))
    if str(path.relative_to(REPOSITORY)) not in OTHERS
]


def measured(text):
    """Numbers that look like measurements: with a fraction, or with a unit."""
    found = NUMBER.findall(NAMES.sub("", text))
    return [(number, unit) for number, unit in found if unit or "." in number]


def is_printed(number, generated):
    """Whether a generated part has the number, with as many digits or with more."""
    _, _, digits = number.partition(".")
    exact = set(re.findall(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", generated))
    if number in exact or "e" in number:
        return number in exact
    values = [float(one.replace(",", "")) for one in exact]
    return any(f"{value:.{len(digits)}f}" == number.replace(",", "") for value in values)


def unknown(text, others=frozenset()):
    """Figures in a document's own words that no table of their section has."""
    bad = []
    for section in re.split(r"^## ", text, flags=re.M):
        made = " ".join(part[2] for part in figures.PART.findall(section))
        words = re.sub(r"`[^`]*`|\]\([^)]*\)", " ", written_by_hand(section))
        for number, unit in measured(words):
            if number + unit not in SETTINGS | others and not is_printed(number, made):
                bad.append(number + unit)
    return bad


def test_generated_parts_are_current():
    rows = figures.newest(figures.read())
    paths = figures.documents()
    assert {path.name for path in paths} >= {"README.md", "results.md"}
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert figures.written(text, rows) == text, f"{path}: python -m benchmarks.figures"
    old = [str(path) for path, _ in generated.stale()]
    assert old == [], f"{generated.COMMAND} writes them"


def is_older(row):
    """Whether a row may lack its commit: those before this day were recorded without."""
    return row["date"] < "2026-11-29" and row["commit"] == ""


def test_rows_say_what_was_measured_on_what():
    files = {}
    for path in figures.RESULTS.glob("*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            assert files.setdefault(row["question"], path) == path, row["question"]
            assert row["subject"] and row["figures"] and row["machine"] and row["command"], row
            assert all(isinstance(row[name], dict) for name in ("figures", "peaks", "versions"))
            datetime.date.fromisoformat(row["date"])
            assert re.fullmatch("[0-9a-f]{7,40}", row["commit"]) or is_older(row), row
            assert row["versions"] or row["machine"] == "simulated"
    assert len(files) > 40


def test_every_question_is_in_a_document():
    text = "".join(path.read_text(encoding="utf-8") for path in figures.documents())
    text += "".join(path.read_text("utf-8") for path in figures.RESULTS.glob("*.table"))
    for question in {row["question"] for row in figures.read()}:
        assert re.search(rf"<!-- figures {question}$|{{{question}\[", text, re.M), question


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_page_has_no_figures_but_those_of_its_rows(page):
    name = str(page.relative_to(REPOSITORY))
    text = page.read_text(encoding="utf-8")
    for part in (generated.PART, support.PART, WHICH_RUNS):
        text = part.sub("", text)
    assert unknown(text, NOT_MEASURED.get(name, set())) == []


def test_numbers_that_no_row_has_are_in_their_pages():
    for name, numbers in NOT_MEASURED.items():
        found = unknown((REPOSITORY / name).read_text(encoding="utf-8"))
        assert numbers <= {*found}, name


@pytest.fixture
def rows():
    row = {
        "question": "speed", "subject": "musique", "model": "m", "layout": "one GPU",
        "options": "", "figures": {"speedup": 3.5}, "peaks": {"stock_gib": 2.0, "prefix_gib": 2.5},
        "machine": "one H200", "versions": {"torch": "2.13"}, "commit": "a", "command": "run it",
        "date": "2026-11-20",
    }  # fmt: skip
    newer = {**row, "figures": {"speedup": 4.0}, "date": "2026-11-21"}
    return [newer, row, {**row, "subject": "gsm8k", "peaks": {}}]


def test_the_newest_row_counts_and_what_a_row_lacks_is_empty(rows):
    assert [row["figures"]["speedup"] for row in figures.newest(rows)] == [4.0, 3.5]
    text = "<!-- figures speed\nset | {subject}\nby | {speedup:.2f}x\npeaks | {peaks}\n-->\n"
    made = figures.written(text + "old\n<!-- end of figures -->", figures.newest(rows))
    assert "| musique | 4.00x | 2.0, 2.5 | 1 |\n| gsm8k | 3.50x |  | 2 |\n" in made
    assert "- 1: one H200, 2026-11-21, commit a: `run it`\n" in made and "old" not in made
    assert figures.written(made, figures.newest(rows)) == made


def test_a_row_names_its_commit_or_says_that_none_was_recorded(rows):
    text = "<!-- figures speed\nset | {subject}\n-->\n<!-- end of figures -->"
    rows = [{**row, "date": "2026-11-20"} for row in rows[1:]]
    assert "| gsm8k |\n\n- one H200, 2026-11-20, commit a: `run it`" in figures.written(text, rows)
    unknown = [{**row, "commit": ""} for row in rows]
    assert "\n- one H200, 2026-11-20, commit not recorded: `" in figures.written(text, unknown)
    mixed = [rows[0], {**rows[1], "commit": "2dd6cad4"}, {**unknown[0], "subject": "math"}]
    made = figures.written(text, mixed)
    assert "| set | commit |" in made and "\n- one H200, 2026-11-20: `run it`\n" in made
    for cells in ("musique | a", "gsm8k | 2dd6cad4 (rebased)", "math | not recorded"):
        assert f"| {cells} |\n" in made
    assert not is_older({**unknown[0], "date": "2026-11-30"}) and is_older(unknown[0])


def test_commands_of_a_table_are_those_of_the_rows_it_reads(rows):
    figures_of_two = "{speed[musique][speedup]}x, {speed[gsm8k][speedup]}x"
    lines = ["figure | command", f"{figures_of_two} | {{commands}}"]
    other = {**rows[2], "command": 'SETS="a b" bash benchmarks/grid_h200.sh OUT'}
    made = figures.of_all(lines, [rows[0], other])
    assert made.endswith("| 4.0x, 3.5x | `run it`, `bash benchmarks/grid_h200.sh ...` |\n")
    programs = {
        "python -m benchmarks.peers_step --repeats 2": "`python -m benchmarks.peers_step ...`",
        "torchrun --nproc-per-node 2 -m a.b X": "`torchrun --nproc-per-node 2 -m a.b ...`",
        "megatron-prefix bench": "`megatron-prefix bench`",
    }
    assert {command: figures.program(command) for command in programs} == programs
    for name in ("readme", "peers"):
        text = (figures.RESULTS / f"{name}.table").read_text(encoding="utf-8")
        assert [line for line in text.splitlines()[1:] if not line.endswith(" | {commands}")] == []


def test_the_check_of_words_can_fail():
    part = "<!-- figures a\n-->\n| 3.52x | 1.0e-15 |\n<!-- end of figures -->"
    assert unknown(f"## A\n{part}\nIt is 3.5x, 4.1x and 1.0e-15, 12 ms.") == ["4.1x", "12 ms"]
    assert unknown("Megatron-Core 0.16.1, torch 2.11, Qwen3-0.6B, in 12 layers, `1.3x`") == []


@pytest.mark.parametrize("kind", [PrefixConfig, Callbacks])
def test_every_field_is_described(kind):
    names = [field.name for field in dataclasses.fields(kind)]
    assert [*generated.attributes(kind)] == names


def test_every_refusal_has_its_row():
    rows = [line for line in generated.refusals().splitlines() if line.count("|") == 5]
    heads = [line for line in rows if line.startswith(("| refused |", "|---"))]
    assert len(rows) - len(heads) == len(TABLE)


def test_a_part_that_is_old_is_made_anew():
    page = f"# A\n<!-- b: {generated.COMMAND} -->\nold\n<!-- end of b -->\nc\n"
    new = generated.written(page, {"b": lambda: "new\n"})
    assert new == page.replace("old", "new")


@pytest.mark.parametrize("name", ["CITATION.cff", "docs/citing.md"])
def test_a_citation_has_the_version(name):
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    assert re.findall(r"^\s*version(?: =|:) \{?([\d.]+)", text, re.M) == [__version__]


def test_support_pages_are_current():
    for page in (support.PAGE, support.MODELS_PAGE):
        text = page.read_text(encoding="utf-8")
        assert support.PART.search(text)
        assert support.written(text, read()) == text, support.COMMAND


def test_versions_that_count_as_tested_have_run():
    """Ends of ranges, all that is recorded, and the versions of trainers that are named."""
    rows = read()
    for name, ran in support.ran_versions(rows).items():
        seen = {*ran["CPU"], *ran["GPUs"]}
        assert all(versions.is_tested(name, str(one)) for one in seen), name
        ends = " to ".join(versions.TESTED[name]).split(" to ")
        assert {*map(support.Version, ends)} <= seen, name
    models = " ".join(row["model"] for row in rows).split()
    for tried in (tried for one in TRAINERS for tried in one.tried):
        assert {*tried.split()} & {*models}, tried


def test_where_a_model_has_run_comes_from_rows():
    row = {
        "model": "GLM-4.7-Flash, 4 layers", "options": "", "machine": "four H200s",
        "layout": "PP2 x VPP2",
    }  # fmt: skip
    tiny = "tiny models of its layers, on the CPU"
    assert support.runs_of("GLM-4.7-Flash", read()) == tiny
    assert support.runs_of("GLM-4.7-Flash", [*read(), row]) == "two GPUs"
    for other in (*support.OF_MODELS.keys() - {"GLM-4.7-Flash"},):
        assert support.runs_of(other, [row]) == (tiny if other != "any, in FP8" else "")
    by_family = support.ran(read())  # the support matrix says the same
    for model, (_, families) in support.OF_MODELS.items():
        for place in support.runs_of(model, read()).split(", "):
            small = place.startswith("tiny") or place == "on the CPU"
            assert small or by_family[families[0]][place]
    with pytest.raises(KeyError, match="GLM-9"):
        support.written(f"<!-- has_run: {support.COMMAND} -->\n| a | b | c |\n|---|---|---|\n"
                        "| GLM-9 | | |\n<!-- end of has_run -->", [])  # fmt: skip


def test_a_model_runs_where_all_its_layers_do():
    layouts = support.by_family(read())
    for model, (_, families) in support.OF_MODELS.items():
        for layout in support.common_layouts(model, read()).split(", "):
            for family in families:
                ran = (map(support.parts_of, several) for several in layouts[family].values())
                assert support.parts_of(layout) in set().union(*ran), (model, family, layout)
    assert "CP2" in support.common_layouts("GLM-4.7-Flash", read()).split(", ")
    assert "EP2" not in support.common_layouts("DeepSeek-V3.2, GLM-5", read())


def test_every_trainer_has_layouts_that_ran():
    rows = read()
    for trainer in support.TRAINERS:
        layouts, forms = support.layouts_of(trainer, rows)
        assert layouts and forms, trainer.name
