"""Documents name what exists: links, files, modules, and commands that the parsers take."""

import ast
import importlib.util
import io
import itertools
import json
import re
import shlex
import tokenize
from pathlib import Path

import pytest

from benchmarks import figures, support
from benchmarks.trainers import which_runs
from megatron_prefix.lab.cli.main import VERBS, make_parser
from tests.harness.command_line import BUNDLED, printed
from tests.harness.data import REPOSITORY, tracked
from tests.repository.generated import PART

PACKAGE = REPOSITORY / "megatron_prefix"
FOLDERS = "megatron_prefix|tests|benchmarks|launch|examples|docs|schedules"
FILE = re.compile(r"(?<![\w/.{}*$<-])((?:[\w.*-]+/)*[\w*-][\w.*-]*\.(?:py|sh|sbatch|cfg|toml))\b")
UNDER = re.compile(rf"(?<![\w/.$}}-])((?:{FOLDERS})/[\w./*-]*[\w*/])")
MODULE = re.compile(r"(?<![\w./-])megatron_prefix((?:\.[A-Za-z_]\w*)+)")
OTHERS = ("megatron", "nemo_rl", "torch", "transformer_engine", "transformers")
"""Packages whose files are named, too."""
SCRIPTS = {"pretrain_gpt.py", "train.py", "train_rl.py"}  # of trainers, in no package


def relative(path):
    return str(path.relative_to(REPOSITORY))


DOCUMENTS = [path for path in sorted(tracked()) if path.suffix == ".md"]
SOURCES = [path for path in sorted(tracked()) if path.suffix in (".py", ".sh", ".sbatch")]
# What is about other projects' trainers names their files.
OWN = [path for path in (*DOCUMENTS, *SOURCES) if path.parent.name != "trainers"]


def prose(path):
    """The text of a document or script; of Python only the docstrings and comments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return text
    lines = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    found = [str(one.value) for one in lines if isinstance(one, ast.Constant)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join([*found, *(t.string for t in tokens if t.type == tokenize.COMMENT)])


def installed(package):
    """Folders of a package that is installed here; it is not imported."""
    spec = importlib.util.find_spec(package)
    return [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]


def exists(name, path):
    """Whether a file that `path` names is there: named from the repository's root, the package's,
    Megatron-Core's or `path`'s own folder, or with the name of another package in front."""
    core = [folder / "core" for folder in installed("megatron")]
    tops = [(top, name) for top in (path.parent, REPOSITORY, PACKAGE, *core)]
    package, _, rest = name.partition("/")
    if name in SCRIPTS:
        return True
    if package in OTHERS:
        if not installed(package):
            return True
        tops += [(top, rest) for top in installed(package)]
    return any(any(top.glob(name)) if "*" in name else (top / name).exists() for top, name in tops)


def missing_files(path):
    # Of most files nothing is missing in the whole text: they need not be taken apart.
    return missing_in(path.read_text(encoding="utf-8"), path) and missing_in(prose(path), path)


def missing_in(text, path):
    names = {*FILE.findall(text), *UNDER.findall(text)}
    return sorted(name for name in names if not exists(name, path))


def is_module_or_member(dotted):
    """Whether `.folder.module.Name` is a folder or module of the package, or a name in one."""
    here, parts = PACKAGE, dotted.strip(".").split(".")
    for number, part in enumerate(parts):
        if (here / part).is_dir():
            here = here / part
        elif (here / f"{part}.py").exists():
            text, rest = (here / f"{part}.py").read_text(encoding="utf-8"), parts[number + 1 :]
            return not rest or re.search(rf"\b{rest[0]}\b", text) is not None
        else:
            return re.search(rf"\b{part}\b", (here / "__init__.py").read_text("utf-8")) is not None
    return True


def anchors(path):
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(path):
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


def command_lines(text):
    """Commands in code spans and code blocks of a document, each on one line."""
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S):
        yield from block.replace("\\\n", " ").splitlines()
    text = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.M | re.S)
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text))


def verb_arguments(line):
    """What stands behind `megatron-prefix` in a command, or None."""
    found = re.search(r"(?:\bmegatron-prefix|-m megatron_prefix) (.*)", line.partition(" #")[0])
    if not found or found[1].startswith(("VERB", "--version")):
        return None
    return shlex.split(re.sub(r"[\[\]…]|\.\.\.", "", found[1]))


def relaxed(parser):
    """The parser, with nothing required: a text may name only what it speaks of."""
    for action in parser._actions:
        action.required = False
        if not action.option_strings and action.nargs in (None, "+"):
            action.nargs, action.choices = "*", None
    return parser


def unknown_command(line):
    """What is wrong with a command; None if nothing is, or if it is not one of ours."""
    words = verb_arguments(line)
    if words is None:
        return None
    verb, *rest = words
    if verb not in VERBS:
        return f"{line}: {verb} is no verb"
    verbs = next(a for a in make_parser(verb)._actions if isinstance(a.choices, dict))
    try:
        relaxed(verbs.choices[verb]).parse_args(rest)
    except SystemExit as error:
        return None if error.code == 0 else f"{line}: {verb} does not take this"
    return None


def missing_program(line):
    """The file that a `bash FILE` or `python FILE` or `python -m MODULE` runs, where it is none."""
    found = re.match(r"(?:\w+=\S+ )*(bash|sbatch|python3?)( -m)? ([\w./]+)", line)
    if not found:
        return None
    name = f"{found[3].replace('.', '/')}.py" if found[2] else found[3]
    if found[2] and found[3].partition(".")[0] not in FOLDERS.split("|"):
        return None
    folder = REPOSITORY / name.removesuffix(".py")
    is_there = name in SCRIPTS or (REPOSITORY / name).exists() or folder.is_dir()
    return None if is_there else f"{line}: no {name}"


MOST_WORDS, MOST_OF_A_PARAGRAPH = 1500, 90
WHICH_RUNS = re.compile(f"{which_runs.BEGIN}.*?{which_runs.END}", re.S)
LONGER = {"docs/results.md": 5000, "benchmarks/LOG.md": 8000}
"""Pages that grow with measurements."""


def written_by_hand(text: str) -> str:
    """A page without its code blocks, comments and generated parts."""
    for part in (PART, support.PART, figures.PART, WHICH_RUNS):
        text = part.sub("", text)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return re.sub(r"<!--.*?-->", "", text, flags=re.S)


def paragraphs(text: str) -> list[str]:
    """Paragraphs, items of lists and rows of tables."""
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*] |\d+\. |\|))", written_by_hand(text))
    return [" ".join(block.split()) for block in blocks if block.strip()]


def num_words(text: str) -> int:
    """Words, without the bars of tables and signs that stand alone."""
    return sum(re.search(r"\w", word) is not None for word in text.split())


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_pages_and_paragraphs_are_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert num_words(written_by_hand(text)) <= LONGER.get(relative(path), MOST_WORDS)
    assert [one for one in paragraphs(text) if num_words(one) > MOST_OF_A_PARAGRAPH] == []


def test_lengths_are_counted() -> None:
    text = "# Title\nOne two.\n\n- three\n- four | -\n\n| a | b |\n|---|---|\n```\nsix seven\n```\n"
    assert num_words(written_by_hand(text)) == 7
    assert paragraphs(text)[1:4] == ["- three", "- four | -", "| a | b |"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_links_lead_somewhere(path):
    assert broken_links(path) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_commands_in_documents_are_taken(path):
    lines = list(command_lines(path.read_text(encoding="utf-8")))
    assert list(filter(None, map(unknown_command, lines))) == []
    assert list(filter(None, map(missing_program, lines))) == []


def test_files_that_are_named_exist():
    found = {relative(path): missing_files(path) for path in OWN}
    assert {path: names for path, names in found.items() if names} == {}


def test_modules_that_are_named_exist():
    for path in (*DOCUMENTS, *SOURCES):
        names = MODULE.findall(path.read_text(encoding="utf-8"))
        bad = [name for name in names if not is_module_or_member(name)]
        assert bad == [], relative(path)


def test_the_readme_is_short():
    assert len((REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


FROM_INDEX = re.compile(r"pip install [^\n`]*\bmegatron_prefix(?=[\[\s`']|$)", re.M)


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_no_document_installs_from_an_index(path):
    """The package is on none: a wheel's path, or a checkout."""
    assert FROM_INDEX.search("pip install 'megatron_prefix[fa4]'")
    assert not FROM_INDEX.search("pip install 'dist/megatron_prefix-0.1.0.whl[fa4]'")
    assert FROM_INDEX.findall(path.read_text(encoding="utf-8")) == []


def test_no_message_installs_from_an_index() -> None:
    """Messages name an extra's packages, with its pins."""
    texts = [path.read_text("utf-8") for path in SOURCES if path.is_relative_to(PACKAGE)]
    assert [found for text in texts for found in FROM_INDEX.findall(text)] == []
    pins = re.findall(r"pip install ([\w-]+==[\w.]+)", "\n".join(texts))
    assert len(pins) >= 2
    setup = (REPOSITORY / "setup.cfg").read_text("utf-8").split()
    assert [pin for pin in pins if pin not in setup] == []


def test_the_quick_starts_tokens_are_what_it_counts(tmp_path):
    """They depend on the rollouts only, so a smaller model counts them. Its picture has prompts
    apart from their suffixes: phases A, B and C."""
    picture = tmp_path / "plan.svg"
    found = printed(
        "train", BUNDLED, "--set", "num_layers=1", "--steps", "4", "--output",
        str(tmp_path / "run"), "--plan-svg", str(picture), "--chunk-tokens", "512",
    )  # fmt: skip
    tips = re.findall(r"<title>([FB])\d+: (inner|wave)", picture.read_text(encoding="utf-8"))
    assert {*tips} == {*itertools.product("FB", ("inner", "wave"))}
    raw, executed = found["raw_tokens"], found["executed_tokens"]
    counted = f"{executed:,} (-{1 - executed / raw:.1%})"
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    for what, text in (("tokens, all rollouts", f"{raw:,}"), ("tokens, executed", counted)):
        (line,) = (line for line in readme.splitlines() if line.startswith(f"  {what} "))
        assert line.split(what)[1].strip() == text
    lines = (REPOSITORY / "benchmarks/results/exactness.jsonl").read_text("utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["question"] == "quickstart"]
    assert (rows[-1]["figures"]["tokens"], rows[-1]["figures"]["executed"]) == (raw, executed)


def test_the_checks_can_fail(tmp_path):
    document = tmp_path / "bad.md"
    document.write_text(
        "# A title\n[a](no.md) [b](#a-title) [c](#none)\n`plan/planer.py`, `tests/unit/nothing/`,"
        " `plan/planner.py`\n`megatron-prefix plan\nx --svgg y`\n```\nbash launch/no.sh\n```\n",
        encoding="utf-8",
    )
    assert broken_links(document) == ["no.md", "#none"]
    assert missing_files(document) == ["launch/no.sh", "plan/planer.py", "tests/unit/nothing/"]
    lines = list(command_lines(document.read_text(encoding="utf-8")))
    assert "megatron-prefix plan x --svgg y" in lines
    assert unknown_command("megatron-prefix plan x --svgg y")
    assert unknown_command("torchrun -m megatron_prefix pla x")
    assert unknown_command("megatron-prefix plan x --svg y [--csv -]") is None
    line = "A=1 bash launch/no.sh --all"
    assert missing_program(line) == f"{line}: no launch/no.sh"
    assert missing_program("python -m benchmarks.no x")
    assert not is_module_or_member(".pipeline.planner")
    assert not is_module_or_member(".plan.planner.no_such_name")
    assert is_module_or_member(".plan.planner.loss_ready_after")
