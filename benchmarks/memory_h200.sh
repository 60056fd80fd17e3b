#!/usr/bin/env bash
# Memory on the Llama3-8B shape, one GPU of 141 GB (docs/results.md has the figures):
#   peaks     of a step under each policy and with the stock schedule, 12,288 tokens per rollout
#   cost      time of a step under each policy, 16 rollouts of 10k/2k
#   short     the same in chunks, with 30 GiB for a step: `auto` and the policies that fit
#   frontier  a step of two rollouts of 235,520 tokens, 2,048 of them a response
#   longer    of 360,448 tokens, K/V and gK/gV of half the layers on the host
#   bash benchmarks/memory_h200.sh PART [RESULT.json] [ARGUMENTS OF bench memory]
set -euo pipefail

part=${1:-}
case $part in
peaks)
    arguments=(--shapes 10240:2048:8 8192:4096:8 6144:6144:8 2048:10240:8
        --ways retain offload recompute stock --repeats 1 --kernel "${KERNEL:-cudnn}")
    ;;
cost)
    arguments=(--shapes 10240:2048:16
        --ways retain offload recompute auto --repeats 2 --kernel "${KERNEL:-cudnn}")
    ;;
short)
    arguments=(--shapes 10240:2048:16 --chunk-tokens 2048 --memory-budget-gb 30
        --ways offload recompute auto --repeats 1 --kernel "${KERNEL:-cudnn}")
    ;;
frontier)
    arguments=(--shapes 233472:2048:2 --ways recompute+full --repeats 0 --chunk-tokens 2048
        --kernel "${KERNEL:-cudnn}")
    ;;
longer)
    # With fewer chunks, K/V of earlier ones come from the host less often.
    arguments=(--shapes 358400:2048:2 --ways recompute+full --repeats 0 --chunk-tokens 4096
        --cache-host-layers 16 --kernel "${KERNEL:-cudnn}")
    ;;
*)
    echo "give a part: peaks, cost, short, frontier or longer" >&2
    exit 2
    ;;
esac
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
exec python3 -m megatron_prefix bench memory --model llama3-8b --dtype bfloat16 --device cuda \
    --align-layers 2 "${arguments[@]}" --bench-json "${2:-memory-$part.json}" "${@:3}"
