#!/usr/bin/env bash
# Speed against the FLOP bound, Llama3-8B shape: prompts and responses of 12,288 tokens together, and
# two long prompts; with flash-attn-4 and fused weight gradients where they are installed. One GPU of
# 141 GB, about 10 minutes; give shapes to run only those.
#   bash benchmarks/grid_h200.sh [RESULT.json] [P:R:n...]
# Environment variables:
#   BASELINE  rollout or packed (default: rollout; a pack of 16,384 holds one of these rollouts as well)
#   REPEATS   timed calls (default: 2)
set -euo pipefail

export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
shapes=("${@:2}")
if [[ ${#shapes[@]} -eq 0 ]]; then
    shapes=(16384:64:9 8192:4096:9)
    for n in 4 8 16; do
        # Two responses of 6,144 tokens per wave: as many rows at a time as with 10240:2048.
        shapes+=("10240:2048:$n" "8192:4096:$n" "6144:6144:$n:12288" "2048:10240:$n")
    done
fi
exec python3 -m megatron_prefix bench --model llama3-8b --dtype bfloat16 --device cuda \
    --baseline "${BASELINE:-rollout}" --memory retain --align-layers 1 --warm-up-calls 1 --repeats "${REPEATS:-2}" \
    --shapes "${shapes[@]}" --bench-json "${1:-grid.json}"
