"""The documentation as a site: links lead somewhere, and the public API has its docstrings."""

import ast
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.core.trainers.registry import installed
from tests.harness.data import REPOSITORY
from tests.repository.test_packaging import pins

DOCS = REPOSITORY / "docs"
PAGE_OF_API = DOCS / "api.md"


def build(repository, site, packages):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    command += ["--config-file", str(repository / "docs" / "site" / "mkdocs.yml")]
    environment = {"PYTHONPATH": str(packages)}
    return subprocess.run(
        command, env={**os.environ, **environment}, cwd=site.parent, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip


@pytest.fixture(scope="module")
def packages():
    return installed("mkdocs", DOCS / "site")


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "repository"
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("docs", "megatron_prefix", "schedules", "benchmarks"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=ignore)
    for name in ("README.md", "CONTRIBUTING.md"):
        shutil.copy(REPOSITORY / name, folder)
    return folder


@pytest.mark.slow
def test_the_site_is_built_and_its_links_hold(packages, copy):
    site = copy.parent / "built"
    done = build(copy, site, packages)
    assert done.returncode == 0, done.stdout + done.stderr
    api = (site / "api" / "index.html").read_text(encoding="utf-8")
    for name in re.findall(r"^::: (\S+)$", PAGE_OF_API.read_text(encoding="utf-8"), re.M):
        assert f'id="{name}"' in api
    assert 'in mode "auto", the predicted speedup below which' in re.sub(r"&quot;", '"', api)
    assert 'id="megatron_prefix.run.schedule.PrefixSchedule.__call__"' in api
    pages = {path.parent.name for path in site.rglob("index.html")}
    assert {path.stem for path in DOCS.rglob("*.md")} <= pages
    # For narrow screens: cells name their column, and a short identifier does not break.
    assert (site / "site.css").is_file()
    refusals = (site / "refusals" / "index.html").read_text(encoding="utf-8")
    assert '<td data-column="mode auto">stock schedule</td>' in refusals
    assert '<code><span class="whole">megatron-prefix</span> <span class="whole">d' in refusals
    for path in site.rglob("index.html"):  # a list or table that was taken for text
        text = re.sub(r"<pre.*?</pre>", "", path.read_text(encoding="utf-8"), flags=re.S)
        assert not re.search(r"^(- |\d\. |\|.*\|$|<p>\|)", text, re.M), path


@pytest.mark.slow
def test_what_leads_nowhere_ends_the_build(packages, copy):
    mistakes = {
        "docs/results.md": ("[a](limits.md#no-such-heading)", "no-such-heading"),
        "README.md": ("[a](launch/quickstart.sh)", "launch/quickstart.sh"),
    }
    changed = [*mistakes, "docs/api.md"]
    texts = {file: (copy / file).read_text(encoding="utf-8") for file in changed}
    for file, (line, _) in mistakes.items():
        (copy / file).write_text(f"{texts[file]}\n{line}\n", encoding="utf-8")
    without = re.sub(r"^::: .*", "", texts["docs/api.md"], flags=re.M)  # docstrings take longest
    (copy / "docs" / "api.md").write_text(without, encoding="utf-8")
    done = build(copy, copy.parent / "broken", packages)
    for file, text in texts.items():
        (copy / file).write_text(text, encoding="utf-8")
    assert done.returncode != 0
    assert all(told in done.stdout + done.stderr for _, told in mistakes.values())


def test_everything_that_builds_the_site_is_pinned(packages):
    known = pins(DOCS / "site" / "mkdocs.txt")
    for one in metadata.distributions(path=[str(packages)]):
        for line in one.requires or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                assert canonicalize_name(needed.name) in known, f"{one.name} needs {needed}"


def public_names():
    """Modules' names in the table of docs/api.md, as `module.name`."""
    text = PAGE_OF_API.read_text(encoding="utf-8")
    found = set()
    for module, names in re.findall(r"`from ([\w.]+) import ([\w, ]+)`", text):
        found |= {f"{module}.{name}" for name in names.split(", ")}
    for module, names in re.findall(r"^\| `([\w.]+)`: (.*?) \|", text, re.M):
        found |= {f"{module}.{name}" for name in re.findall(r"`(\w+)`", names)}
    return found


def test_every_public_name_has_its_docstring_on_the_page():
    shown = re.findall(r"^::: (\S+)$", PAGE_OF_API.read_text(encoding="utf-8"), re.M)
    names = {name.rpartition(".")[2] for name in public_names()}
    assert names == {name.rpartition(".")[2] for name in shown}
    assert len(shown) == len(names) >= 14
    for name in shown:
        module, _, last = name.rpartition(".")
        path = REPOSITORY / module.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        tree = ast.parse(file.read_text(encoding="utf-8"))
        (node,) = (one for one in tree.body if getattr(one, "name", None) == last)
        assert ast.get_docstring(node), name


def test_what_the_package_exports_is_public():
    import megatron_prefix

    exported = {f"megatron_prefix.{name}" for name in megatron_prefix.__all__}
    assert exported - {"megatron_prefix.__version__"} <= public_names()
