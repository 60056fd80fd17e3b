#!/usr/bin/env bash
# FP8 with blockwise scales against the stock schedule, Llama3-8B widths with few layers, on one GPU of 80 GB of
# Hopper's with transformer-engine (CUDA 12.9 or newer) and flash-attn-4. About 5 minutes.
#   bash benchmarks/fp8_h100.sh [OUTPUT] [ROW...]
# OUTPUT (default: runs/fp8) gets ROW.json for align, fp8 and bf16. Rows:
#   tests   tests/gpu/test_fp8_gpu.py (needs pytest)
#   rates   linear layers alone, in both precisions
#   align   both schedules against fp32, over eight draws
#   fp8     speed against the bound, which counts linear layers at the rate that `rates` measured
#   bf16    the same in bfloat16
# Exit code 0 when every row was aligned, timed or passed.
#
# Environment variables:
#   LAYERS  of the model (default: 8)
#   VOCAB   of it, its own cut in proportion to the layers (default: 32768)
#   SHAPES  P:R:n of fp8 and bf16, between spaces (default: 10240:2048:8 4096:1024:8)
set -uo pipefail

output=$(realpath -m "${1:-runs/fp8}")
rows=("${@:2}")
[[ ${#rows[@]} -gt 0 ]] || rows=(tests rates align fp8 bf16)
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
mkdir -p "$output" || exit 2
status=0
read -ra shapes <<<"${SHAPES:-10240:2048:8 4096:1024:8}"
gpu=(--model llama3-8b --dtype bfloat16 --device cuda --set "vocab_size=${VOCAB:-32768}")
fp8=(--set fp8=e4m3 --set fp8_recipe=blockwise)
timed=(--set "num_layers=${LAYERS:-8}" --memory retain --align-layers 1 --warm-up-calls 1 --repeats 2
    --shapes "${shapes[@]}")

for row in "${rows[@]}"; do
    echo "== $row"
    SECONDS=0
    case $row in
    tests) python3 -m pytest -q -s tests/gpu/test_fp8_gpu.py || status=1 ;;
    rates) python3 -m benchmarks.fp8_rates || status=1 ;;
    align)
        python3 -m megatron_prefix generate "$output/align.jsonl.gz" --overwrite --tree flat --groups 2 \
            --prompt-tokens 1000 --response-tokens 250 --rollouts 4 || status=1
        python3 -m megatron_prefix align "${gpu[@]}" "${fp8[@]}" --set num_layers=2 \
            --rollouts "$output/align.jsonl.gz" --json >"$output/align.json" || status=1
        cat "$output/align.json"
        ;;
    fp8) python3 -m megatron_prefix bench "${gpu[@]}" "${fp8[@]}" "${timed[@]}" --bench-json "$output/fp8.json" || status=1 ;;
    bf16) python3 -m megatron_prefix bench "${gpu[@]}" "${timed[@]}" --bench-json "$output/bf16.json" || status=1 ;;
    *)
        echo "$row: not one of the rows above" >&2
        exit 2
        ;;
    esac
    echo "$row: $SECONDS s"
done
exit "$status"
