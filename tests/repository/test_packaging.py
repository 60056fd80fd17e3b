"""What is pinned, and the rules that every file keeps."""

import ast
import configparser
import functools
import gc
import re
import subprocess
import sys
from collections import Counter
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.harness.data import REPOSITORY, tracked

CODE = ("megatron_prefix", "examples", "benchmarks", "tests")
MAX_LINES = {"function": 40, "file": 300}
WHY_LONG = re.compile(r"# long: \S|\b(?:40|300) lines")
HOSTS = {"www.apache.org", "www.w3.org"}  # of the licence and of SVG; papers are cited by title
# torch pins its own; three extras need a GPU.
CUDA_ONLY = re.compile(r"nvidia-|cuda-|triton$|transformer-engine$|flash-attn-4$|fla-core$")


@pytest.fixture(scope="module")
def setup():
    parser = configparser.ConfigParser()
    parser.read(REPOSITORY / "setup.cfg", encoding="utf-8")
    return parser


def pins(*more):
    """Of launch/requirements-cpu.txt and of other files, by package."""
    files = (REPOSITORY / "launch" / "requirements-cpu.txt", *more)
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(one.name): one for one in found}


def asked_by(name, extras):
    """What an installed package needs here."""
    for line in metadata.requires(name) or ():
        one = Requirement(line)
        if one.marker is None or any(one.marker.evaluate({"extra": e}) for e in {"", *extras}):
            yield one


def test_pins_are_exact():
    for one in pins().values():
        assert re.fullmatch(r"==[\w.]+", str(one.specifier)), one


def test_everything_that_gets_installed_is_pinned(setup):
    sections = (setup["options"]["install_requires"], *setup["options.extras_require"].values())
    todo = [Requirement(line) for text in sections for line in text.split("\n") if line.strip()]
    pinned, seen = pins(), set()
    while todo:
        one = todo.pop()
        name = canonicalize_name(one.name)
        if name in seen or name == "megatron-prefix" or CUDA_ONLY.match(name):
            continue
        seen.add(name)
        assert name in pinned, f"{one} has no version in launch/requirements-cpu.txt"
        try:
            todo += asked_by(name, one.extras)
        except metadata.PackageNotFoundError:
            continue  # an extra that is not installed here
    assert "megatron-core" in seen


def test_no_file_names_a_machine_or_a_host():
    folder = re.compile(r"(?<![\w.)}-])/(?:home|root|work|opt|mnt|srv|Users)/\w")
    url = re.compile(r"\b(?:https?|git|ssh)://([\w.-]+)")
    for path in tracked():
        if path.suffix in (".gz", ".png"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert not folder.search(line), f"{path}:{number}: {line}"
            assert set(url.findall(line)) <= HOSTS, f"{path}:{number}: {line}"


def sources():
    code = [path for path in tracked() if path.relative_to(REPOSITORY).parts[0] in CODE]
    return [path for path in code if path.suffix == ".py"]


def num_lines(function):
    first = function.body[0]
    has_doc = ast.get_docstring(function) is not None
    doc = first.end_lineno - first.lineno + 1 if has_doc else 0
    return function.end_lineno - function.lineno + 1 - doc


def nodes_of(text):
    return [*ast.walk(ast.parse(text))]


@functools.cache
def nodes(path):
    """Of a file, which is parsed once for all rules."""
    return nodes_of(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module", autouse=True)
def _parsed():
    """Nothing of what is parsed is garbage before the end."""
    gc.disable()
    yield
    nodes.cache_clear()
    gc.enable()


def long_functions(path):
    """Functions over the limit that do not say why, in or just above them."""
    lines, found = path.read_text(encoding="utf-8").splitlines(), []
    for node in nodes(path):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        around = "\n".join(lines[max(0, node.lineno - 3) : node.end_lineno])
        if num_lines(node) > MAX_LINES["function"] and not WHY_LONG.search(around):
            found.append(f"{node.name} has {num_lines(node)} lines")
    return found


def test_functions_are_short_or_say_why_not():
    assert [f"{path}: {line}" for path in sources() for line in long_functions(path)] == []


def without_encoding(some):
    """Calls that read or write text in whatever encoding the locale has, among nodes."""
    found = []
    for node in some:
        if not isinstance(node, ast.Call) or any(one.arg == "encoding" for one in node.keywords):
            continue
        owner, _, name = ast.unparse(node.func).rpartition(".")
        mode = node.args[0 if owner else 1 :][:1]
        binary = bool(mode) and "b" in ast.unparse(mode[0])
        silent = {
            "open": owner not in ("os", "gzip") and not binary,
            "read_text": not node.args,
            "write_text": owner not in ("report", "files") and len(node.args) == 1,
        }
        if silent.get(name):
            found.append(ast.unparse(node))
    return found


def test_files_are_utf_8_in_every_locale():
    calls = ["open('x')", "x.open()", "x.read_text()", "f(x).write_text('')", "open(x, 'w')"]
    assert without_encoding(nodes_of("\n".join(calls))) == calls
    fine = ["open(x, 'rb')", "x.open('wb')", "x.read_text('utf-8')", "open(x, encoding='utf-8')"]
    assert without_encoding(nodes_of("\n".join(fine))) == []
    found = [f"{path}: {call}" for path in sources() for call in without_encoding(nodes(path))]
    assert found == []


@pytest.mark.parametrize("tool", [
    pytest.param(["ruff", "check", "."], id="ruff check"),
    pytest.param(["ruff", "format", "--check", "."], id="ruff format"),
    pytest.param(["mypy", "--cache-dir", f"{sys.prefix}/mypy"], id="mypy", marks=pytest.mark.slow),
])  # fmt: skip
def test_linters_agree(tool):
    pytest.importorskip(tool[0], reason=f"{tool[0]} is not installed (extra: test)")
    done = subprocess.run(
        [sys.executable, "-m", *tool], cwd=REPOSITORY, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr


MOST = 50
"""Uses of private names of the package that are left. Lower it with every one that goes."""
FOREIGN = {"_actions", "_axis", "_forward_mlp", "_modules", "_replace", "_ssm_training"}
"""Of argparse, torch, Megatron, ModelOpt and named tuples; the package has the same names."""
PRIVATE = re.compile(r"(?:def |class |self\.|^|, )(_[A-Za-z]\w*)(?=[(: =,])", re.M)
USES = re.compile(
    r"(?<!self)\.(_[A-Za-z]\w*)|^from .*import (.*)$|\"[\w.]*?\b(_[A-Za-z]\w*)\"", re.M
)
"""Attributes but of a class itself, imports on a line, and names in strings."""


def test_few_private_names_are_used():
    package = (path.read_text("utf-8") for path in (REPOSITORY / "megatron_prefix").rglob("*.py"))
    names, found = {*PRIVATE.findall("\n".join(package))} - FOREIGN, Counter()
    for path in sorted((REPOSITORY / "tests").rglob("*.py")):
        words = " ".join(map(" ".join, USES.findall(path.read_text("utf-8"))))
        found[path.name] = sum(word in names for word in re.findall(r"\b_\w+", words))
    most = "\n".join(f"{num} in {name}" for name, num in found.most_common(8))
    assert found.total() <= MOST, f"{found.total()} uses, {MOST} are allowed; most:\n{most}"
    assert found.total() > MOST - 10, f"only {found.total()} uses are left: lower MOST"


def test_names_of_tests_fit_a_line():
    files = REPOSITORY.joinpath("tests").rglob("test_*.py")
    functions = [one for path in files for one in nodes(path) if isinstance(one, ast.FunctionDef)]
    assert [one.name for one in functions if re.match("test_.{56}", one.name)] == []
