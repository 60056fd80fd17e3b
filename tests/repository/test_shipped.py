"""The sdist and the wheel: what is in them, and that the wheel runs the quick start by itself."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import megatron_prefix
from tests.harness.data import BUNDLED, REPOSITORY, tracked

RELEASE = f"megatron_prefix-{megatron_prefix.__version__}"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
OFFLINE = ["--no-deps", "--no-index", "--no-build-isolation"]
BUILD = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
# What lies about in a checkout and must not be shipped.
STRAYS = (
    "shared/data/rollouts.jsonl", "out/run.jsonl", "tests/core/__pycache__/a.pyc", "notes.txt",
)  # fmt: skip


def done(*command, cwd, **environment):
    """What a command prints; it must end well."""
    made = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout


@pytest.fixture(scope="module")
def files():
    return {str(path.relative_to(REPOSITORY)) for path in tracked()}


@pytest.fixture(scope="module")
def built(tmp_path_factory, files):
    """A folder with the sdist of a copy of the sources among strays, unpacked, and its wheel."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    for name in files:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, source / name)
    for name in STRAYS:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("stray", encoding="utf-8")
    done(sys.executable, "-c", BUILD, str(folder), cwd=source)
    shutil.rmtree(source)
    sdist = folder / f"{RELEASE}.tar.gz"
    done(*PIP, "wheel", *OFFLINE, "--wheel-dir", str(folder), str(sdist), cwd=folder)
    done("tar", "xzf", str(sdist), cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_sdist_holds_the_repository_and_nothing_else(built, files):
    top = built / RELEASE
    names = {str(path.relative_to(top)) for path in top.rglob("*") if path.is_file()}
    made = {name for name in names if name.partition("/")[0].endswith(".egg-info")}
    assert names - made - {"PKG-INFO"} == files
    bundled = BUNDLED.relative_to(REPOSITORY)
    assert (top / bundled).read_bytes() == BUNDLED.read_bytes()


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = wheel.namelist()
    assert {name.split("/")[0] for name in names} == {"megatron_prefix", f"{RELEASE}.dist-info"}
    package = REPOSITORY / "megatron_prefix"
    code = {str(path.relative_to(REPOSITORY)) for path in package.rglob("*.py")}
    assert code <= set(names)
    assert str(BUNDLED.relative_to(REPOSITORY)) in names


def test_no_path_of_this_machine_is_shipped(built, wheel):
    here = [str(one).encode() for one in (REPOSITORY, built, Path.home()) if len(str(one)) > 5]
    texts = {name: wheel.read(name) for name in wheel.namelist()}
    for path in (built / RELEASE).rglob("*"):
        if path.is_file():
            texts[str(path)] = path.read_bytes()
    assert [name for name, text in texts.items() if any(one in text for one in here)] == []


@pytest.mark.slow
def test_the_wheel_runs_the_quick_start_from_another_folder(built):
    """launch/quickstart.sh of the sdist, in a folder that holds nothing but the wheel; what the
    wheel asks for is this environment's."""
    alone, elsewhere = built / "alone", built / "elsewhere"
    elsewhere.mkdir()
    (wheel,) = built.glob("*.whl")
    done(*PIP, "install", *OFFLINE, "--no-compile", "--target", str(alone), str(wheel), cwd=built)
    # As an environment in which the install was finished: the script then goes on.
    (alone / "bin" / "python").symlink_to(sys.executable)
    recipe = "source launch/environment.sh; recipe train,plot"
    recipe = done("bash", "-c", recipe, cwd=built / RELEASE)
    (alone / "installed-train,plot.txt").write_text(recipe, encoding="utf-8")
    paths = {"VENV": str(alone), "PYTHONPATH": str(alone), "PYTHONDONTWRITEBYTECODE": "1"}
    where = "from megatron_prefix import __file__; print(__file__)"
    found = done(sys.executable, "-c", where, cwd=elsewhere, **paths)
    assert Path(found.strip()).is_relative_to(alone)
    quickstart = built / RELEASE / "launch/quickstart.sh"
    table = done(
        "bash", str(quickstart), "--groups", "1", "--set", "num_layers=1", cwd=elsewhere,
        STEPS="1", **paths,
    )  # fmt: skip
    assert re.search(r"verdict +aligned *$", table, re.M), table
    written = {path.name for path in (elsewhere / "runs" / "quickstart").iterdir()}
    assert {"plan.svg", "metrics.jsonl"} <= written
    assert [path.name for path in elsewhere.iterdir()] == ["runs"]
