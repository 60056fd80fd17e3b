#!/usr/bin/env bash
# What depends on the interpreter, with the system's own Python, which is often the oldest there is:
# checkpoints, resuming, starting ranks, packaging, scripts and the command line. It makes its own
# environment (.venv-VERSION): with the packages of the suite's where both Pythons load the same binary
# ones (3.11.2 and 3.11.7 do), else with packages of its own, with the same pins. If that Python is the
# suite's or cannot be used, one line says so.
# Distributions build their Python with profiles, and the suite takes a tenth less with it. So in CI the
# two change places:
#   bash launch/test_system_python.sh --suite  the suite with the system's Python, or if that cannot be
#                                              used with its own
#   bash launch/test_system_python.sh --rest   what depends on the interpreter, with the suite's own Python
#   SYSTEM_PYTHON  the interpreter (default: /usr/bin/python3)

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
SYSTEM_PYTHON=${SYSTEM_PYTHON:-/usr/bin/python3}

tests=(
    "tests/lab/rl/test_resume.py::test_resume_is_exact[distributed-optimizer]"
    tests/lab/rl/test_checkpoint_files.py
    tests/lab/cli/test_cli_frame.py
    tests/core/plan/test_files.py
    tests/repository/test_launch_scripts.py
    tests/repository/test_packaging.py
    tests/repository/test_shipped.py
    tests/lab/rl/test_resume.py
    tests/lab/runtime/test_runtime.py
    # Linters say the same on every Python.
    --deselect tests/repository/test_packaging.py::test_linters_agree
)

part=${1:-}
skip() {
    say "Nothing is run with $SYSTEM_PYTHON: $*"
    [[ $part == --suite ]] && exec bash "$root/launch/test.sh"
    exit 0
}

version() { "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null; }
# The suffix of modules in C: what is built for one Python runs with all that have the same.
interface() { "$1" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))'; }
packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# share FOLDER: an environment of the system's Python with the packages of the suite's.
share() {
    prepare test
    "$SYSTEM_PYTHON" -m venv --clear --without-pip "$1"
    printf 'import site; site.addsitedir("%s")\n' "$(packages "$VENV/bin/python")" \
        >"$(packages "$1/bin/python")/suite.pth"
    grep -lsI "^#!$VENV/bin/python" "$VENV"/bin/* | while read -r script; do # torchrun and others
        sed "1s|.*|#!$1/bin/python|" "$script" >"$1/bin/$(basename "$script")"
        chmod +x "$1/bin/$(basename "$script")"
    done || true # none
    mkdir -p "$VENV/trainers"
    ln -sfn "$VENV/trainers" "$1/trainers" # packages that tests put there (tests/core/trainers/registry.py)
    recipe test >"$1/installed-test.txt" # nothing is missing in it
}

has_venv() { "$SYSTEM_PYTHON" -c 'import venv, ensurepip' 2>/dev/null; }

install_venv() {
    [[ $EUID -eq 0 ]] && command -v apt-get >/dev/null || return 0
    say "Installing python3-venv"
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y python3-venv; } >/dev/null || true
}

command -v "$SYSTEM_PYTHON" >/dev/null || skip "it is not there"
system=$(version "$SYSTEM_PYTHON") || skip "it does not run"
suite=$(version "$VENV/bin/python" || version "$PYTHON") || skip "the suite has no Python to compare with"
[[ $system != "$suite" ]] || skip "it is Python $system, as the suite's"
"$SYSTEM_PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    skip "it is Python $system, 3.10 is the oldest"

say "With $SYSTEM_PYTHON, Python $system (the suite's: $suite)"
own=$root/.venv-$system
[[ -x $VENV/bin/python ]] && first=$VENV/bin/python || first=$PYTHON
if [[ $(interface "$SYSTEM_PYTHON") == $(interface "$first") ]]; then
    share "$own"
else
    has_venv || install_venv
    has_venv || skip "it lacks venv (Debian, Ubuntu: apt-get install python3-venv)"
fi
own_python=$PYTHON own_venv=$VENV
export PYTHON=$SYSTEM_PYTHON VENV=$own
[[ $part == --suite ]] && exec bash "$root/launch/test.sh"
[[ $part == --rest ]] && export PYTHON=$own_python VENV=$own_venv
exec bash "$root/launch/test.sh" --numprocesses 2 --dist loadfile "${tests[@]}"
