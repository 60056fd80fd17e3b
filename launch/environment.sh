# Sourced by the scripts in this folder: `prepare EXTRAS` makes a virtual environment with the pinned
# dependencies of the CPU and this package, and puts it in front of PATH. Nothing is repeated
# while setup.cfg and the pins do not change.
#
# Environment variables:
#   PYTHON  interpreter that makes the environment: 3.10 or newer (default: python3)
#   VENV    folder of the environment (default: .venv in the repository; scripts that install nothing
#           take an active environment before it)
#   PIP_*   pip's own. If pip would take a CUDA build of torch and you do not want one, set
#           PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels.
# shellcheck shell=bash

set -euo pipefail

named=${VENV:-}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
pins=$root/launch/requirements-cpu.txt
seldom='/(tests?|torch/testing|transformers/models|networkx|fontTools|mypyc?|pip)/'
PYTHON=${PYTHON:-python3}
VENV=${VENV:-$root/.venv}
[[ $VENV == /* ]] || VENV=$PWD/$VENV

# --help prints the comment at the head of the script, before anything is installed.
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,${/^#/!q;s/^# \{0,1\}//p}' "$0"
    exit 0
fi

say() { printf '== %s\n' "$*"; }

fail() {
    printf '%s: %s\n' "$0" "$*" >&2
    exit 2
}

check_python() {
    local found
    command -v "$PYTHON" >/dev/null ||
        fail "there is no $PYTHON here; install Python 3.10 or newer, or name it: PYTHON=python3.11 bash $0"
    found=$("$PYTHON" -c 'import platform; print(platform.python_version())') ||
        fail "$PYTHON does not run; name another: PYTHON=python3.11 bash $0"
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$PYTHON is Python $found, 3.10 is the oldest; name a newer one: PYTHON=python3.11 bash $0"
    "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "$PYTHON $found lacks venv; install it (Debian, Ubuntu: apt-get install python3-venv) or name another: PYTHON=... bash $0"
}

make_environment() {
    "$VENV/bin/python" -c '' 2>/dev/null && return
    check_python
    if [[ -e $VENV && ! -e $VENV/pyvenv.cfg ]]; then
        fail "$VENV exists and is not a virtual environment; set VENV to another folder"
    fi
    say "Making the environment $VENV"
    "$PYTHON" -m venv --clear "$VENV"
}

# find_environment: for scripts that install nothing. Takes VENV, else the active environment, else the
# one that quickstart.sh has made, else what is on PATH.
find_environment() {
    local folder
    [[ -z $named || -x $VENV/bin/torchrun ]] || fail "VENV=$named holds no torchrun; name another"
    for folder in ${named:+"$VENV"} "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}" "$VENV"; do
        if [[ -n $folder && -x $folder/bin/torchrun ]]; then
            export PATH="$folder/bin:$PATH"
            return
        fi
    done
    command -v torchrun >/dev/null ||
        fail "no environment here; bash launch/quickstart.sh makes one, or name yours: VENV=folder bash $0"
}

# check_gpus ARGUMENTS: NGPU ranks want as many GPUs, unless ARGUMENTS have --device cpu.
check_gpus() {
    local found
    [[ " $* " =~ \ --device[=\ ]cpu\  ]] && return
    found=$(python3 -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null) ||
        fail "$(command -v python3) cannot import torch; bash launch/quickstart.sh makes an environment"
    ((found > 0)) ||
        fail "torch sees no GPU here (a CPU build, or none visible); launch/two_nodes.sh runs on the CPU"
    ((found >= ${NGPU:-8})) || fail "torch sees $found GPUs here, not ${NGPU:-8}; set NGPU=$found"
}

# check_model: MODEL is a file in launch/models.
check_model() {
    [[ -f $root/launch/models/$MODEL.sh ]] && return
    fail "MODEL=$MODEL is not there; give one of$(printf ' %s' "$root"/launch/models/*.sh |
        sed "s|$root/launch/models/||g; s|\.sh||g")"
}

# What an environment depends on; a copy in the environment means that the install was finished.
recipe() {
    printf '%s\n' "$root" "$1"
    cat "$root/setup.cfg" "$pins"
}

# prepare EXTRAS: EXTRAS of setup.cfg, separated by commas.
prepare() {
    local extras=$1 stamp=$VENV/installed-$1.txt
    local install=("$VENV/bin/python" -m pip install --disable-pip-version-check -c "$pins")
    install+=(--no-compile) # it compiles on one core
    make_environment
    export PATH="$VENV/bin:$PATH"
    if recipe "$extras" | cmp -s - "$stamp"; then return; fi
    [[ -t 1 ]] || install+=(--quiet)
    say "Installing $(grep '^torch==' "$pins") (without a GPU its CPU build is 2 GB smaller: launch/environment.sh says how to choose)"
    "${install[@]}" torch setuptools
    say "Installing megatron_prefix[$extras] and its dependencies"
    "${install[@]}" --no-build-isolation --editable "${root}[$extras]"
    # Half of the files are never imported here. Those that are after all are compiled then.
    "$VENV/bin/python" -m compileall -qq -j 0 -x "$seldom" "$VENV/lib" || true # or of other Pythons
    recipe "$extras" >"$stamp"
}
