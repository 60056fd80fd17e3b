#!/usr/bin/env bash
# Two or four GPUs over NCCL: both schedules in the same layouts, on packs, aligned first; in cp, dp and ep gradients are
# reduced during the backward (overlap_grad_reduce). With transformer-engine and flash-attn-4.
#   bash benchmarks/layouts_gpus.sh OUTPUT [ARGUMENTS of `megatron-prefix bench`]
# benchmarks/layouts_gpus.py has the rows and says what OUTPUT gets. Exit code 0 when all were aligned and timed.
#
# Environment variables:
#   ROWS      names of rows (default: tp cp pp dp ep)
#   SETS      rollout files, by name, besides 10240:2048:8: two steps of TOKENS each in the rows that have files (default: none)
#   DATA      their folder (default: ../shared/data)
#   TOKENS    of a step of a file, per data-parallel rank (default: 100000)
#   NGPU      GPUs to use (default: those that nvidia-smi lists)
#   TOTAL_S   seconds of one row, after which it prints where it is and ends the job (default: 280)
set -uo pipefail

output=$(realpath -m "${1:?OUTPUT folder}")
options=("${@:2}")
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} # multicast hung on machines that share a host's switch
read -ra rows <<<"${ROWS:-tp cp pp dp ep}"
read -ra sets <<<"${SETS:-}"
exec torchrun --nproc-per-node "${NGPU:-$(nvidia-smi --list-gpus | wc -l)}" -m benchmarks.layouts_gpus "$output" \
    --rows "${rows[@]}" --sets "${sets[@]}" --data "${DATA:-../shared/data}" --step-tokens "${TOKENS:-100000}" \
    --row-s "${TOTAL_S:-280}" -- "${options[@]}"
