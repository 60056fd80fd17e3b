#!/usr/bin/env bash
# Real rollouts against what trainers run: consecutive steps of new groups, the stock schedule on packed
# microbatches and the prefix schedule on the same ones, Qwen3-8B widths with few layers, aligned first.
# One GPU of 141 GB, with transformer-engine.
#   bash benchmarks/packed_h200.sh FOLDER [OUTPUT] [ARGUMENTS of `megatron-prefix bench`]
# FOLDER has the rollout files SET.jsonl.gz; OUTPUT (default: runs/packed_h200) gets SET.json. The table
# of a set goes to stdout when the set ends. Exit code 0 when every set was aligned and timed.
#
# Environment variables:
#   SETS    SET:GROUPS of a step, and each gives a run
#   LAYERS  (default: 12)
#   STEPS   timed steps of a set, after one that warms up (default: 4)
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
folder=${1:?FOLDER of the rollout files}
output=${2:-runs/packed_h200}
SETS=${SETS:-gsm8k:64 math_cot:8 rag_musique:2 rag_hotpot_llm:6 tau2_mixed:6 tau_airline:4}

export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$output" || exit 2
status=0
for set in $SETS; do
    name=${set%%:*}
    python3 -m megatron_prefix bench --model qwen3-8b --set "num_layers=${LAYERS:-12}" \
        --dtype bfloat16 --device cuda --rollouts "$folder/$name.jsonl.gz" --groups "${set#*:}" \
        --steps "${STEPS:-4}" --bench-json "$output/$name.json" "${@:3}" || status=1
done
exit "$status"
