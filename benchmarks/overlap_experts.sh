#!/usr/bin/env bash
# Two GPUs that share experts, with gradients that are reduced during backwards: both schedules on steps of a rollout
# file, shuffled by every seed, in one process group. Qwen3-30B-A3B with few layers; the last line says how many seeds
# ended.
#   bash benchmarks/overlap_experts.sh FILE.jsonl.gz [ARGUMENTS of benchmarks/overlap_experts.py]
#   bash benchmarks/overlap_experts.sh FILE.jsonl.gz --device cpu
# --stock-only runs the stock schedule alone. With --device cpu a tiny model and short rollouts. Exit code 0 when every
# seed has ended; one that hangs ends the run, and the stacks of both ranks' threads are printed.
#
# Environment variables:
#   LAYERS   (default: 4)
#   OUTPUT   folder for the stacks (default: runs/overlap_experts)
#   TOTAL_S  seconds of the whole run (default: 1500)
#   CUDA_DEVICE_MAX_CONNECTIONS  (default: 1)
set -uo pipefail

file=$(realpath "${1:?FILE of rollouts}")
output=$(realpath -m "${OUTPUT:-runs/overlap_experts}")
options=("${@:2}")
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} # multicast hung on machines that share a host's switch
export PYTHONFAULTHANDLER=1
model=(--device cuda --dtype bfloat16 --model qwen3-30b-a3b --set "num_layers=${LAYERS:-4}")
if [[ " ${options[*]} " == *" cpu "* ]]; then
    model=(--dtype float32 --model tiny-moe --set "num_layers=${LAYERS:-4}" --max-tokens 192 --step-tokens 3000)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
fi
mkdir -p "$output" || exit 2
rm -f "$output"/stacks-*.txt
timeout --kill-after=10 "${TOTAL_S:-1500}" python3 -m torch.distributed.run --standalone --nproc-per-node 2 \
    -m benchmarks.overlap_experts "$file" --ep 2 --overlap-grad-reduce --output "$output" "${model[@]}" "${options[@]}"
status=$?
if ((status)); then
    for stacks in "$output"/stacks-*.txt; do
        echo "== $stacks" >&2
        cat "$stacks" >&2
    done
fi
exit "$status"
