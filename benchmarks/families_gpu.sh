#!/usr/bin/env bash
# Multi-latent attention, windows, sinks and multi-token prediction against the FLOP bound, on one GPU with
# transformer-engine and flash-attn-4: widths of Moonlight, DeepSeek-V3, gpt-oss-20b and Qwen3-8B with few layers and few
# experts (deepseek, gpt-oss-packed and the last two rows with a smaller vocabulary), aligned first. The bound counts what
# latents are expanded.
#   bash benchmarks/families_gpu.sh OUTPUT [ARGUMENTS of `megatron-prefix bench`]
# OUTPUT gets one JSON file per row; the tables go to stdout. Exit code 0 when everything was aligned and timed.
#
# Environment variables:
#   ROWS      which of moonlight moonlight-steps deepseek gpt-oss gpt-oss-packed gpt-oss-steps mtp mtp-moonlight mtp-five
#             mtp-hybrid to run (default: all but the last two, which need megatron-core 0.19; mtp-hybrid, of Nemotron-H's
#             widths, also mamba-ssm and causal-conv1d). transformer-engine has no packs with sinks: gpt-oss has one
#             rollout per microbatch, and its other two rows no sinks
#   DATA      folder of the rollout files, for steps (default: ../shared/data)
#   SETS      the sets, by their files' names (default: rag_musique rag_hotpot_llm)
#   TOTAL_S   seconds of one row (default: 280)
set -uo pipefail

output=$(realpath -m "${1:?OUTPUT folder}")
options=("${@:2}")
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
mkdir -p "$output" || exit 2
steps=(--step-tokens 100000 --warm-up 1 --steps 3 --rehearse --rollouts)
for name in ${SETS:-rag_musique rag_hotpot_llm}; do steps+=("${DATA:-../shared/data}/$name.jsonl.gz"); done
moonlight=(--model moonlight-16b-a3b --set num_layers=12 --set num_moe_experts=16 --set max_position=32768)
oss=(--model gpt-oss-20b --set num_layers=12 --set num_moe_experts=8)
# In packs of 16,384 logits of 201,088 tokens do not fit beside 12 layers in 140 GB; files need so many. The rotary kernel
# is off for this model, as for all with YaRN: in packs it leaves their scale out.
oss_packs=("${oss[@]}" --set softmax_type=vanilla)
mtp=(--set mtp_num_layers=1 --set vocab_size=65536 --shapes 10240:2048:8)
five=(--set mtp_num_layers=5 --set mtp_use_repeated_layer=true --set mtp_detach_heads=true --set vocab_size=65536
    --shapes 10240:2048:8)
nemotron=(--model tiny-nemotron-h --set num_layers=12 --set hybrid_override_pattern=M-M-M*-M-M*- --set hidden_size=4096
    --set num_attention_heads=32 --set num_query_groups=8 --set kv_channels=128 --set ffn_hidden_size=16384
    --set mamba_num_heads=128 --set mamba_head_dim=64 --set mamba_state_dim=128 --set mamba_num_groups=8
    --set init_method_std=0.02 --baseline rollout)
status=0
for row in ${ROWS:-moonlight moonlight-steps deepseek gpt-oss gpt-oss-packed gpt-oss-steps mtp mtp-moonlight}; do
    case $row in
    moonlight) row_options=("${moonlight[@]}" --shapes 10240:2048:8 16384:64:9) ;;
    moonlight-steps) row_options=("${moonlight[@]}" "${steps[@]}") ;;
    deepseek)
        row_options=(--model deepseek-v3 --set num_layers=2 --set moe_layer_freq=0,1 --set num_moe_experts=16 --set vocab_size=32768
            --shapes 10240:2048:8)
        ;;
    gpt-oss) row_options=("${oss[@]}" --baseline rollout --shapes 10240:2048:8) ;;
    gpt-oss-packed) row_options=("${oss_packs[@]}" --set vocab_size=65536 --shapes 10240:2048:8 16384:64:9) ;;
    gpt-oss-steps) row_options=("${oss_packs[@]}" --set num_layers=8 "${steps[@]}") ;;
    mtp) row_options=(--model qwen3-8b --set num_layers=12 "${mtp[@]}") ;;
    mtp-moonlight) row_options=("${moonlight[@]}" "${mtp[@]}") ;;
    mtp-five) row_options=(--model qwen3-8b --set num_layers=12 "${five[@]}") ;;
    mtp-hybrid) row_options=("${nemotron[@]}" --set "mtp_hybrid_override_pattern=*-" "${five[@]}") ;;
    *)
        echo "ROWS: $row is none of the rows" >&2
        exit 2
        ;;
    esac
    echo "== $row: $(date +%T)"
    timeout --signal=ABRT --kill-after=10 "${TOTAL_S:-280}" python3 -X faulthandler -m megatron_prefix bench \
        "${row_options[@]}" --dtype bfloat16 --device cuda --layer-spec te --warm-up-calls 2 --repeats 3 \
        --bench-json "$output/$row.json" --progress "${options[@]}" || status=1
done
exit "$status"
