#!/usr/bin/env bash
# One prompt once in the whole job, on this host's GPUs over NCCL: real rollouts dealt to data-parallel
# ranks by length, each rank alone and prompts across ranks, and whole groups on a rank. Qwen3-8B
# widths with few layers, against the stock schedule on the same packs, aligned first. With
# transformer-engine and flash-attn-4.
#   bash benchmarks/across_ranks_gpus.sh FOLDER [OUTPUT] [ARGUMENTS of `megatron-prefix bench`]
# FOLDER has the rollout files SET.jsonl.gz; OUTPUT (default: runs/across_ranks) gets one JSON file per run.
# Exit code 0 when everything was aligned and timed. A run that takes longer than TOTAL_S prints where
# every process is and ends.
#
# Environment variables:
#   LAYERS   (default: 12)
#   SETS     the sets, by their files' names (default: rag_musique)
#   WAYS     how rollouts are dealt, and --across-ranks (default: length,on length,off groups,off)
#   STEPS    timed steps of a set, after one warm-up step (default: 3)
#   TOKENS   of a step, per GPU (default: 100000)
#   NGPU     GPUs to use (default: those that nvidia-smi lists)
#   TOTAL_S  seconds of one run (default: 200)
set -uo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
folder=${1:?FOLDER of the rollout files}
output=${2:-runs/across_ranks}
mkdir -p "$output" || exit 2
num=${NGPU:-$(nvidia-smi --list-gpus | wc -l)}
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} PYTHONFAULTHANDLER=1
status=0

timed() { # DEAL ACROSS SET
    timeout --signal=ABRT --kill-after=10 "${TOTAL_S:-200}" \
        python3 -m megatron_prefix bench --model qwen3-8b --set "num_layers=${LAYERS:-12}" \
        --dtype bfloat16 --device cuda --align-layers 1 --rollouts "$folder/$3.jsonl.gz" \
        --step-tokens $((num * ${TOKENS:-100000})) --warm-up 1 --steps "${STEPS:-3}" --dp "$num" \
        --deal "$1" --across-ranks "$2" --bench-json "$output/$3-$1-$2.json" --progress "${options[@]}" ||
        status=1
}
options=("${@:3}")
for name in ${SETS:-rag_musique}; do
    for way in ${WAYS:-length,on length,off groups,off}; do
        echo "== $name $way: $(date +%T)"
        timed "${way%,*}" "${way#*,}" "$name"
    done
done
exit "$status"
