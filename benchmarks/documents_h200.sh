#!/usr/bin/env bash
# Shapes that four published documents measured, run with both schedules on one GPU of 141 GB with
# transformer-engine and flash-attn-4; docs/results.md, "Published results", says how their
# conditions differ. About 4 minutes.
#   bash benchmarks/documents_h200.sh FOLDER [OUTPUT] [ROW...]
# FOLDER has tau2_mixed.jsonl.gz; OUTPUT (default: runs/documents) gets ROW.json for each row:
#   caching         train-time prompt caching's shapes with short responses
#   dualkv_layer    DualKV table 2: decoder layers, responses of unequal length
#   dualkv_step     DualKV tables 3 and 10: an update, 8 and 32 responses
#   dualkv_logprob  DualKV tables 4 and 10: the same, a pass for log-probs
#   moe_step        DualKV table 4: Qwen3-30B-A3B widths, an update
#   moe_logprob     the same, a pass for log-probs
#   dta             AReaL-DTA figure 5 and table 3: model calls of agents, and little to share
#   capacity        schedule-level reuse table 7: its longest step under each policy; one minute, runs
#                   only when named
# `python -m benchmarks.documents OUTPUT` prints the tables. Exit code 0 when everything was aligned
# and timed.
#
# Environment variables:
#   LAYERS  of the Qwen3-8B and Qwen3-30B-A3B widths (default: 8)
#   VOCAB   of them, their own cut in proportion to the layers (default: 32768)
set -uo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
folder=${1:?FOLDER of the rollout files}
output=${2:-runs/documents}
chosen=("${@:3}")
[[ ${#chosen[@]} -gt 0 ]] ||
    chosen=(caching dualkv_layer dualkv_step dualkv_logprob moe_step moe_logprob dta)
mkdir -p "$output" || exit 2
status=0

bench() { # ROW, ARGUMENTS
    local row=$1
    shift
    echo "$row"
    SECONDS=0
    python3 -m megatron_prefix bench "$@" --dtype bfloat16 --device cuda \
        --bench-json "$output/$row.json" || status=1
    echo "$row: $SECONDS s"
}
timed=(--align-layers 1 --warm-up-calls 1 --repeats 2)
cut=(--set "num_layers=${LAYERS:-8}" --set "vocab_size=${VOCAB:-32768}" "${timed[@]}")
dense=(--model qwen3-8b "${cut[@]}")
moe=(--model qwen3-30b-a3b "${cut[@]}")
# The whole of Qwen3-1.7B.
small=(--model qwen3-8b --set num_layers=28 --set hidden_size=2048 --set num_attention_heads=16
    --set ffn_hidden_size=6144 --set tie_embeddings=true)

layer_files() { # responses of unequal length, 1,090 tokens in the mean
    local shape num
    files=()
    for shape in 5059:32 8192:16 16384:8 32768:4; do
        num=${shape#*:}
        files+=("$output/${shape%:*}_$num.jsonl.gz")
        python3 -m megatron_prefix generate "${files[-1]}" --overwrite --tree flat --groups 1 --uneven \
            --prompt-tokens "${shape%:*}" --response-tokens 1453 --rollouts "$num" >&2 || status=1
    done
}

for row in "${chosen[@]}"; do
    case $row in
    caching) bench "$row" "${dense[@]}" --shapes 16384:128:9 16384:1024:9 1000:100:8 ;;
    dualkv_layer)
        layer_files
        bench "$row" --model qwen3-8b --set num_layers=4 --set vocab_size=2048 \
            "${timed[@]}" --groups 1 --rollouts "${files[@]}"
        ;;
    dualkv_step) bench "$row" "${dense[@]}" --shapes 8192:2048:8 8192:2048:32 ;;
    dualkv_logprob) bench "$row" "${dense[@]}" --forward-only --shapes 8192:2048:8 8192:2048:32 ;;
    moe_step) bench "$row" "${moe[@]}" --shapes 8192:2048:8 ;;
    moe_logprob) bench "$row" "${moe[@]}" --forward-only --shapes 8192:2048:8 ;;
    dta)
        python3 -m benchmarks.calls "$folder/tau2_mixed.jsonl.gz" "$output/tau2_calls.jsonl.gz" ||
            status=1
        bench "$row" "${small[@]}" "${timed[@]}" --shape-groups 4 \
            --shapes 512:1088:16 176:1624:8 --rollouts "$output/tau2_calls.jsonl.gz" \
            --groups 1 --steps 2 --warm-up 1
        ;;
    capacity)
        bench_memory=(memory --model llama3-8b --shapes 18944:10752:2 --repeats 0 --align-layers 1)
        bench "$row" "${bench_memory[@]}" --ways recompute offload stock \
            --frontier 2048 --frontier-step 512 --frontier-ways stock recompute
        ;;
    *)
        echo "$row: not one of the rows above" >&2
        exit 2
        ;;
    esac
done
exit "$status"
