#!/usr/bin/env bash
# The README's figures of memory on the Llama3-8B shape, one GPU of 141 GB: `peaks` of a step under
# each policy beside the stock schedule's, or how long a sequence trains (`frontier`).
#   bash benchmarks/memory_h200.sh peaks|frontier [RESULT.json] [ARGUMENTS OF bench memory]
set -euo pipefail

part=${1:-}
case $part in
peaks)
    arguments=(--shapes 2048:10240:8 6144:6144:8 8192:4096:8 10240:2048:8 10240:2048:16
        --ways stock retain offload recompute auto --repeats 1)
    ;;
frontier)
    arguments=(--shapes 2048:2048:2 --ways recompute --repeats 0 --chunk-tokens 2048
        --frontier 2048 --frontier-ways recompute+full recompute --frontier-step 1024 --tries 2)
    ;;
*)
    echo "say which: peaks or frontier" >&2
    exit 2
    ;;
esac
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
exec python -m megatron_prefix bench memory --model llama3-8b --dtype bfloat16 --device cuda \
    --kernel "${KERNEL:-cudnn}" --align-layers 2 \
    "${arguments[@]}" --bench-json "${2:-memory-$part.json}" "${@:3}"
