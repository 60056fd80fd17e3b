#!/usr/bin/env bash
# The whole suite on the CPU: bash launch/test.sh [ARGUMENTS OF PYTEST]
# Installs what it needs first; environment.sh has the variables that change where and with what.

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare test

# Tests start several ranks on a few cores: one thread each.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
cd "$root"
exec python -m pytest "$@"
