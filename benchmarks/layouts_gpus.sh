#!/usr/bin/env bash
# Two or four GPUs over NCCL: both schedules in the same layout, on packs, aligned first; cp, dp and ep reduce gradients
# during the backward (overlap_grad_reduce). With transformer-engine and flash-attn-4.
#   bash benchmarks/layouts_gpus.sh OUTPUT [ARGUMENTS of `megatron-prefix bench`]
# OUTPUT gets ROW.json for each; the tables go to stdout. Exit code 0 when everything was aligned and timed. A row that
# takes longer than TOTAL_S prints where every process is and ends.
#
# Environment variables:
#   ROWS      which of tp (with sequence parallelism), cp, pp, dp (Qwen3-8B's widths), ep (Qwen3-30B-A3B, 12 layers),
#             latents-tp, latents-pp (Moonlight's widths), windows-tp (Qwen3-8B's with gpt-oss's windows: Megatron
#             refuses biases of experts with TP), windows-pp (gpt-oss-20b's, without sinks; both with flash-attn-4 in
#             the stock schedule, since transformer-engine's own attention of packs with windows materialises scores),
#             fp8-tp, fp8-pp (Llama3-8B's, 8 layers, blockwise scales), and on four GPUs pp4, tp2-pp2, cp4, ep4 to run
#             (default: tp cp pp dp ep)
#   LAYERS    of the dense rows and of experts (default: 12; all 36 fit two GPUs of 141 GB)
#   SETS      rollout files, by name, besides 10240:2048:8: two steps of 100,000 tokens each, in tp, cp, pp and ep
#             (default: none)
#   DATA      their folder (default: ../shared/data)
#   TOTAL_S   seconds of one row (default: 280)
set -uo pipefail

output=$(realpath -m "${1:?OUTPUT folder}")
options=("${@:2}")
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
mkdir -p "$output" || exit 2
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} # multicast hung on machines that share a host's switch
export PYTHONFAULTHANDLER=1
files=()
for name in ${SETS:-}; do files+=("${DATA:-../shared/data}/$name.jsonl.gz"); done
steps=()
((${#files[@]})) && steps=(--rollouts "${files[@]}" --step-tokens 100000 --warm-up 1 --steps 2 --rehearse)
dense=(--model qwen3-8b --set "num_layers=${LAYERS:-12}" --shapes 10240:2048:8)
experts=(--model qwen3-30b-a3b --set "num_layers=${LAYERS:-12}" --shapes 10240:2048:8)
latents=(--model moonlight-16b-a3b --set num_layers=6 --set num_moe_experts=16 --set max_position=32768
    --shapes 10240:2048:8)
windows=(--model gpt-oss-20b --set num_layers=6 --set num_moe_experts=8 --set softmax_type=vanilla
    --shapes 10240:2048:8)
fp8=(--model llama3-8b --set num_layers=8 --set vocab_size=32768 --set fp8=e4m3 --set fp8_recipe=blockwise
    --shapes 10240:2048:8)
tp=(--tp 2 --sequence-parallel)
pp=(--pp 2 --shape-groups 2 --chunk-tokens 4096)
status=0
for row in ${ROWS:-tp cp pp dp ep}; do
    bench=(python3 -m megatron_prefix bench)
    case $row in
    tp) row_options=("${dense[@]}" "${tp[@]}" "${steps[@]}") ;;
    cp) row_options=("${dense[@]}" --cp 2 --overlap-grad-reduce "${steps[@]}") ;;
    pp) row_options=("${dense[@]}" "${pp[@]}" "${steps[@]}") ;;
    dp) row_options=("${dense[@]}" --dp 2 --overlap-grad-reduce) ;;
    ep) row_options=("${experts[@]}" --ep 2 --overlap-grad-reduce "${steps[@]}") ;;
    pp4) row_options=("${dense[@]}" --pp 4 --shape-groups 4 --chunk-tokens 4096 "${steps[@]}") ;;
    tp2-pp2) row_options=("${dense[@]}" "${tp[@]}" "${pp[@]}" "${steps[@]}") ;;
    cp4) row_options=("${dense[@]}" --cp 4 --overlap-grad-reduce "${steps[@]}") ;;
    ep4) row_options=("${experts[@]}" --ep 4 --overlap-grad-reduce "${steps[@]}") ;;
    latents-tp) row_options=("${latents[@]}" "${tp[@]}") ;;
    latents-pp) row_options=("${latents[@]}" "${pp[@]}") ;;
    windows-*) bench=(torchrun --nproc-per-node 2 -m benchmarks.stock_fa4) ;;&
    windows-tp) row_options=("${dense[@]}" --set window_size=127,0 --set window_attn_skip_freq=2 "${tp[@]}") ;;
    windows-pp) row_options=("${windows[@]}" "${pp[@]}") ;;
    fp8-tp) row_options=("${fp8[@]}" "${tp[@]}") ;;
    fp8-pp) row_options=("${fp8[@]}" "${pp[@]}") ;;
    *)
        echo "ROWS: $row is none of the rows" >&2
        exit 2
        ;;
    esac
    echo "== $row: $(date +%T)"
    timeout --signal=ABRT --kill-after=10 "${TOTAL_S:-280}" "${bench[@]}" \
        "${row_options[@]}" --dtype bfloat16 --device cuda --align-layers 1 --warm-up-calls 2 --repeats 2 \
        --bench-json "$output/$row.json" --progress "${options[@]}" || status=1
done
exit "$status"
