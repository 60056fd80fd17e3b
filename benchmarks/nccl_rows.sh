#!/usr/bin/env bash
# Do both schedules agree over NCCL? Rows of the alignment matrix that fill this host's GPUs, 2 or 4 of
# them, in bf16 by the numerics policy and in fp32, one torchrun world per dtype.
#   bash benchmarks/nccl_rows.sh [OUTPUT] [ARGUMENTS of `megatron-prefix matrix`]
# One line per row goes to stderr when the row ends. OUTPUT (default: runs/nccl_rows) gets DTYPE.jsonl with
# the results so far and, at the end, DTYPE.md. Exit code 0 when all are aligned.
#
# Environment variables:
#   NGPU     GPUs, 2 or 4 (default: those that nvidia-smi lists)
#   DTYPES   (default: bfloat16 float32)
#   TOTAL_S  seconds for all rows of a dtype; rows that are left then do not run (default: 280)
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
output=${1:-runs/nccl_rows}
NGPU=${NGPU:-$(nvidia-smi --list-gpus | wc -l)}
case $NGPU in
    2) rows=(moe/{EP2,CP2,TP2+SP,PP2}/tree/none
        dense/{PP2,PP2xVPP2,TP2,TP2+SP,CP2,DP2}/{tree/none,chunked/full}) ;;
    4) rows=(moe/{EP4,PP2xEP2,TP2xPP2}/tree/none
        dense/{PP4,TP2xPP2,PP2xCP2,CP4,TP2xCP2}/{tree/none,chunked/full}) ;;
    *) echo "nccl_rows.sh: rows are for 2 or 4 GPUs, not $NGPU; set NGPU" >&2 && exit 2 ;;
esac

export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
# Every row has another model: most of the time would go into compiling fused operators.
export TORCH_COMPILE_DISABLE=${TORCH_COMPILE_DISABLE:-1}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$output" || exit 2
status=0
for dtype in ${DTYPES:-bfloat16 float32}; do
    rm -f "$output/$dtype.jsonl"
    timeout --signal=TERM --kill-after=15 "${TOTAL_S:-280}" \
        torchrun --nproc-per-node "$NGPU" -m megatron_prefix matrix --device cuda --dtype "$dtype" \
        --only "${rows[@]}" --continue "$output/$dtype.jsonl" --markdown "$output/$dtype.md" \
        "${@:2}" || status=1
done
exit "$status"
