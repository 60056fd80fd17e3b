#!/usr/bin/env bash
# Consecutive steps of real rollouts, stock on packed microbatches against the prefix schedule.
#
#   bash benchmarks/rollouts_h200.sh FOLDER [LAYERS] [MODE] [options of bench...]
#
# FOLDER has the rollout files, MODE is on or auto. One process a set, Qwen3-8B widths.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1 layers=${2:-12} mode=${3:-on}
shift $(($# < 3 ? $# : 3))
# flash-attn-4 keeps what it has compiled for the next process.
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 CUDA_DEVICE_MAX_CONNECTIONS=1
# Set, groups a step: 40,000 to 120,000 tokens.
for set in gsm8k:64 math_cot:10 rag_musique:2 rag_hotpot_llm:7 tau2_mixed:4 tau_airline:4; do
    python3 -m megatron_prefix bench --model qwen3-8b --set "num_layers=$layers" \
        --dtype bfloat16 --device cuda --rollouts "$folder/${set%:*}.jsonl.gz" \
        --groups "${set#*:}" --steps 4 --pack-tokens 16384 --prefix-schedule "$mode" "$@"
done
