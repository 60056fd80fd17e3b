#!/usr/bin/env bash
# The whole suite on the CPU, three files at a time: bash launch/test.sh
# A part of it:                                  bash launch/test.sh ARGUMENTS OF PYTEST
# Installs what it needs first; environment.sh has the variables that change where and with what.

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare test
# Triton's interpreter runs our kernels on the CPU (tests/core/device/test_triton_kernels.py). In a folder
# of its own: other packages behave differently when they find it.
triton=$(grep -E '^triton==' "$pins" || true)
if [[ $triton && ! -d $VENV/triton-only ]]; then
    say "Installing $triton for its interpreter"
    python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
        --target "$VENV/triton-only.part" "$triton"
    mv "$VENV/triton-only.part" "$VENV/triton-only"
fi

# Tests start several ranks on a few cores: one thread each.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
cd "$root"
# Many tests wait for processes to start or for time to pass; meanwhile others run.
if [[ $# -eq 0 ]]; then set -- --numprocesses 3 --dist loadfile --no-loadscope-reorder; fi
exec python -m pytest "$@"
