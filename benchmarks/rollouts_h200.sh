#!/usr/bin/env bash
# Consecutive steps of real rollouts: stock on packed microbatches against the prefix schedule.
#
#   bash benchmarks/rollouts_h200.sh FOLDER [options of bench...]
#
# FOLDER has the rollout files. Steps of about 60,000 tokens (math_cot, which is short: 30,000),
# Qwen3-8B widths with 12 layers. More options: --set num_layers=36, --prefix-schedule auto.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1
shift
# flash-attn-4 keeps what it has compiled for the next process; memory grows without fragments.
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export CUDA_DEVICE_MAX_CONNECTIONS=1

timed() { # TOKENS SETS...
    local tokens=$1 files=()
    shift
    for name; do files+=("$folder/$name.jsonl.gz"); done
    python3 -m megatron_prefix bench --model qwen3-8b --set num_layers=12 --dtype bfloat16 \
        --device cuda --pack-tokens 16384 --steps 4 --warm-up 2 --step-tokens "$tokens" \
        --rollouts "${files[@]}" "${options[@]}"
}
options=("$@")
timed 60000 gsm8k rag_musique rag_hotpot_llm tau2_mixed tau_airline
timed 30000 math_cot
