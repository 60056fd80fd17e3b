#!/usr/bin/env bash
# Both schedules on the Llama3-8B shape with cuDNN's attention, one rollout per microbatch, aligned
# first (docs/results.md has the figures). One GPU of 141 GB.
#   bash benchmarks/h200.sh [RESULT.json] [ARGUMENTS OF bench]
set -euo pipefail

export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
exec python -m megatron_prefix bench --model llama3-8b --dtype bfloat16 --device cuda \
    --baseline rollout --kernel "${KERNEL:-cudnn}" --memory retain --repeats 2 --align-layers 4 \
    --shapes 10240:2048:8:2048 10240:2048:8:4096 10240:2048:8:8192 16384:64:9:4096 \
    --bench-json "${1:-h200.json}" "${@:2}"
