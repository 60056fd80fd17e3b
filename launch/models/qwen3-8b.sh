# Arguments for Qwen3 8B on 8 GPUs of 80 GB; sourced by launch/arguments.sh.
# shellcheck shell=bash disable=SC2034

MODEL_ARGS=(
    --model qwen3-8b
    --dtype bfloat16
    --recompute none
)
LAYOUT_ARGS=(
    --tp 4
    --sequence-parallel
    --pp 2
)
LENGTH_ARGS=(
    --max-tokens 32768
    --chunk-tokens 4096
    --segment-tokens 4096
)
