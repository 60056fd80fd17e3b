#!/usr/bin/env bash
# The part of the suite that depends on Megatron-Core, with one release after the other:
#   PYTHON=python3.12 bash launch/test_versions.sh [VERSION...]
# Prints one line per release; pytest's output is in VENV/megatron-core-VERSION.log. A release that this
# Python cannot install is reported and skipped (from 0.17 on they need 3.12). The exit code is 0 if at
# least one release ran and all that ran have passed. The version `main` is the commit of Megatron-LM's main
# branch below (0.20.0): its source is fetched and put in front of the environment's packages.
#
# Environment variables, besides those of environment.sh:
#   VENV   folder of the environment, in which releases take turns (default: .venv-versions)
#   TESTS  what pytest runs (default: platform, models, both schedules in several layouts, routers,
#          hybrid models)
#   MEGATRON_LM  where `main` is fetched from: the git URL of NVIDIA's Megatron-LM, or a copy of it on disk

main=d98e8a64ddf34856e74b24714e3bedb2f5a39553

VENV=${VENV:-$(dirname "${BASH_SOURCE[0]}")/../.venv-versions}
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare test

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
tests="tests/lab/platforms/test_platform.py tests/lab/models/test_build.py tests/core/features/experts/test_moe_router.py
    tests/test_cases.py tests/test_cases_on_ranks.py tests/test_cases_across_ranks.py
    tests/core/alignment/test_replay.py tests/core/alignment/test_hybrid.py
    tests/core/alignment/test_overlap.py tests/core/alignment/test_mla.py"
read -r -d '' -a tests <<<"${TESTS:-$tests}" || true
versions=("$@")
[[ $# -gt 0 ]] || versions=(0.16.1 0.17.1 0.18.1 0.19.2 main)

# Since 0.18 Megatron-Core imports triton, which CPU builds of torch do not include.
checkout=$VENV/megatron-lm
triton=$(grep -E '^triton==' "$pins")

# get VERSION: installs a release, or fetches the source of main into a folder.
get() {
    if [[ $1 != main ]]; then
        python -m pip install --quiet --no-deps "megatron-core==$1" "$triton"
        return
    fi
    if [[ -z ${MEGATRON_LM:-} ]]; then
        echo "set MEGATRON_LM to the git URL of NVIDIA's Megatron-LM, or to a copy of it on disk"
        return 1
    fi
    git init --quiet "$checkout" &&
        git -C "$checkout" fetch --quiet --depth 1 "$MEGATRON_LM" "$main" &&
        git -C "$checkout" checkout --quiet --force FETCH_HEAD &&
        python -m pip install --quiet --no-deps "$triton"
}

# run VERSION: prints its line; the status is pytest's, or 100 if it cannot be had here.
run() {
    local log=$VENV/megatron-core-$1.log first=
    if ! get "$1" &>"$log"; then
        printf 'megatron-core %s: not for %s here (%s)\n' "$1" "$(python --version)" "$(tail -n 1 "$log")"
        return 100
    fi
    [[ $1 != main ]] || first=$checkout:
    PYTHONPATH=$first${PYTHONPATH:-} python -m pytest -q "${tests[@]}" &>"$log" && status=0 || status=$?
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
