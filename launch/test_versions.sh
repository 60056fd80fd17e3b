#!/usr/bin/env bash
# The part of the suite that depends on Megatron-Core, with one release after the other:
#   PYTHON=python3.12 bash launch/test_versions.sh [VERSION...]
# Prints one line per release; pytest's output is in VENV/megatron-core-VERSION.log. A release that this
# Python cannot install is reported and skipped (from 0.17 on they need 3.12). The exit code is 0 if at
# least one release ran and all that ran have passed.
#
# Environment variables, besides those of environment.sh:
#   VENV   folder of the environment, in which releases take turns (default: .venv-versions)
#   TESTS  what pytest runs (default: platform, models, both schedules in several layouts, routers,
#          hybrid models)

VENV=${VENV:-$(dirname "${BASH_SOURCE[0]}")/../.venv-versions}
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare test

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
tests="tests/lab/platforms/test_platform.py tests/lab/models/test_build.py tests/core/moe/test_moe_router.py
    tests/core/alignment/test_layouts.py tests/core/alignment/test_moe.py tests/core/alignment/test_distributed.py
    tests/core/alignment/test_replay.py tests/core/alignment/test_hybrid.py
    tests/core/alignment/test_hybrid_layouts.py tests/core/alignment/test_hybrid_16_bit.py
    tests/core/alignment/test_mla.py tests/core/alignment/test_windows.py"
read -r -d '' -a tests <<<"${TESTS:-$tests}" || true
versions=("$@")
[[ $# -gt 0 ]] || versions=(0.16.1 0.17.1 0.18.1 0.19.2)

# Since 0.18 Megatron-Core imports triton, which CPU builds of torch do not include.
triton=$(grep -E '^triton==' "$pins")

# run VERSION: prints its line; the status is pytest's, or 100 if the release cannot be installed here.
run() {
    local log=$VENV/megatron-core-$1.log
    if ! python -m pip install --quiet --no-deps "megatron-core==$1" "$triton" &>"$log"; then
        printf 'megatron-core %s: not for %s here (%s)\n' "$1" "$(python --version)" "$(tail -n 1 "$log")"
        return 100
    fi
    python -m pytest -q "${tests[@]}" &>"$log" && status=0 || status=$?
    printf 'megatron-core %s: %s\n' "$1" "$(tail -n 1 "$log")"
    return "$status"
}

cd "$root" || exit 2
passed=0 failed=0
for version in "${versions[@]}"; do
    run "$version" && status=0 || status=$?
    case $status in
        0) passed=$((passed + 1)) ;;
        100) ;;
        *) failed=$((failed + 1)) ;;
    esac
done
exit "$((failed > 0 || passed == 0))"
