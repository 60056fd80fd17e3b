#!/usr/bin/env bash
# The alignment matrix on the CPU: models with and without experts, every layout of
# megatron_prefix/lab/verify/matrix.py, flat groups, trees and chunks, with and without recomputation.
#   bash launch/align_matrix.sh [ARGUMENTS]
# Installs what it needs first; environment.sh has the variables that change where and with what.
# If it was interrupted, the same command continues where it stopped. ARGUMENTS are those of `megatron-prefix matrix`.
#
# Environment variables:
#   OUTPUT  folder of rows.jsonl (one result per line) and matrix.md (default: runs/align_matrix)

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare test

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
output=${OUTPUT:-runs/align_matrix}
megatron-prefix matrix --continue "$output/rows.jsonl" --markdown "$output/matrix.md" "$@"
