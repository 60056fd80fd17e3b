#!/usr/bin/env bash
# The suite on the CPU, four files at a time: bash launch/test.sh
# A part of it:                                bash launch/test.sh ARGUMENTS OF PYTEST
# Installs what it needs first; environment.sh has the variables that change where and with what.

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare test

# Tests start several ranks on a few cores: one thread each.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Many processes import the same files: Python keeps what it has compiled, whatever the image says.
unset PYTHONDONTWRITEBYTECODE
cd "$root"
# Many tests wait for processes to start or for time to pass; meanwhile others run.
# tests/conftest.py keeps two on each of two cores.
if [[ $# -eq 0 ]]; then
    set -- --numprocesses 4 --dist loadfile --no-loadscope-reorder
fi
exec python -m pytest "$@"
