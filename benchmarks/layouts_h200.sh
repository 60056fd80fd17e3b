#!/usr/bin/env bash
# Two GPUs of 141 GB over NCCL: both schedules in the same layout, aligned first; dp and ep reduce
# gradients during the backward (overlap_grad_reduce).
#   bash benchmarks/layouts_h200.sh FOLDER [ROW...]
# Rows: tp (with sequence parallelism), cp, pp, dp (Llama3-8B shape), ep (Qwen3-30B-A3B, 12 layers).
# FOLDER gets ROW.json for each. Exit code 0 when everything was aligned and timed.
set -uo pipefail

output=${1:?FOLDER for the results}
mkdir -p "$output" || exit 2
chosen=("${@:2}")
[[ ${#chosen[@]} -gt 0 ]] || chosen=(tp cp pp dp ep)
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
# Four responses per wave, with room for the alignment of tensor and context parallelism.
dense=(--model llama3-8b --shapes 10240:2048:8:8256)
status=0
for row in "${chosen[@]}"; do
    case $row in
    tp) options=("${dense[@]}" --tp 2 --sequence-parallel) ;;
    cp) options=("${dense[@]}" --cp 2) ;;
    pp) options=("${dense[@]}" --pp 2 --shape-groups 2 --chunk-tokens 4096) ;;
    dp) options=("${dense[@]}" --dp 2 --overlap-grad-reduce) ;;
    ep)
        options=(--model qwen3-30b-a3b --set num_layers=12 --shapes 10240:2048:8 --ep 2
            --overlap-grad-reduce)
        ;;
    *)
        echo "row $row: give some of tp cp pp dp ep" >&2
        exit 2
        ;;
    esac
    echo "$row: ${options[*]}"
    python3 -m torch.distributed.run --nproc-per-node 2 -m megatron_prefix bench "${options[@]}" \
        --dtype bfloat16 --device cuda --align-layers 1 --warm-up-calls 2 --repeats 2 \
        --bench-json "$output/$row.json" || status=1
done
exit $status
