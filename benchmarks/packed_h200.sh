#!/usr/bin/env bash
# Real rollouts against what trainers run: consecutive steps of new groups, the stock schedule on packed
# microbatches and the prefix schedule on the same ones, Qwen3-8B widths with few layers, aligned first.
# One GPU of 141 GB, with transformer-engine and flash-attn-4.
#   bash benchmarks/packed_h200.sh FOLDER [OUTPUT] [ARGUMENTS of `megatron-prefix bench`]
# FOLDER has the rollout files SET.jsonl.gz; OUTPUT (default: runs/packed_h200) gets one JSON file per run.
# The tables go to stdout. Exit code 0 when everything was aligned and timed.
#
# Environment variables:
#   LAYERS  (default: 12)
#   SETS    the sets, by their files' names (default: all six)
#   STEPS   timed steps of a set, after one warm-up step, for gsm8k two (default: 3)
set -uo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
folder=${1:?FOLDER of the rollout files}
output=${2:-runs/packed_h200}
mkdir -p "$output" || exit 2
sets=${SETS:-gsm8k rag_hotpot_llm rag_musique tau2_mixed tau_airline math_cot}
status=0

timed() { # TOKENS of a step, WARM-UP steps, SETS
    local tokens=$1 warm_up=$2 files=() name
    shift 2
    for name; do [[ " $sets " == *" $name "* ]] && files+=("$folder/$name.jsonl.gz"); done
    ((${#files[@]})) || return
    python3 -m megatron_prefix bench --model qwen3-8b --set "num_layers=${LAYERS:-12}" \
        --dtype bfloat16 --device cuda --rollouts "${files[@]}" --step-tokens "$tokens" --warm-up "$warm_up" \
        --steps "${STEPS:-3}" --bench-json "$output/$1.json" "${options[@]}" || status=1
}
options=("${@:3}")
timed 90000 2 gsm8k
timed 100000 1 rag_hotpot_llm rag_musique tau2_mixed tau_airline
timed 25000 1 math_cot # it is short
exit "$status"
