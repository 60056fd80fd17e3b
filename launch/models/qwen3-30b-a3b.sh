# Arguments for Qwen3 30B-A3B on 16 GPUs of 80 GB; sourced by launch/arguments.sh.
# Expert parallelism re-uses the data-parallel ranks: 4 * 2 * 2 ranks hold every expert once.
# shellcheck shell=bash disable=SC2034
#
# Data-parallel ranks share experts, so they meet in every microbatch. Megatron's schedule, to which
# "auto" may fall back, then needs equally many rollouts on each, and the bundled groups have 5 to 8.

PREFIX_SCHEDULE=${PREFIX_SCHEDULE:-on}
MODEL_ARGS=(
    --model qwen3-30b-a3b
    --dtype bfloat16
    --recompute full
)
LAYOUT_ARGS=(
    --tp 4
    --sequence-parallel
    --pp 2
    --ep 2
)
LENGTH_ARGS=(
    --max-tokens 32768
    --chunk-tokens 4096
    --segment-tokens 4096
)
