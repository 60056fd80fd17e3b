#!/usr/bin/env bash
# Do both schedules agree over NCCL? Rows of the alignment matrix that fill this host's GPUs, 2 or 4 of
# them, in bf16 by the numerics policy and in fp32.
#   bash benchmarks/nccl_rows.sh [OUTPUT] [ARGUMENTS of `megatron-prefix matrix`]
# A line a row goes to stderr when the row ends. A row that takes too long is ended, with the stack of
# every rank, and the next one runs. OUTPUT (default: runs/nccl_rows) gets rows.jsonl and a table a
# dtype; begun again, rows that are aligned there do not run again. Exit code 0 when all are aligned.
#
# Environment variables:
#   NGPU     GPUs, 2 or 4 (default: those that nvidia-smi lists)
#   ROW_S    seconds of a row (default: 90)
#   TOTAL_S  seconds of all rows of a dtype; what is left then does not run (default: 260)
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
output=${1:-runs/nccl_rows}
NGPU=${NGPU:-$(nvidia-smi --list-gpus | wc -l)}
case $NGPU in
    2) rows=(dense/{PP2,PP2xVPP2,TP2,TP2+SP,CP2,DP2}/tree/none moe/EP2/tree/none) ;;
    4) rows=(dense/{PP4,TP2xPP2,PP2xCP2,CP4,TP2xCP2}/tree/none moe/EP4/tree/none) ;;
    *) echo "nccl_rows.sh: rows are for 2 or 4 GPUs, not $NGPU; set NGPU" >&2 && exit 2 ;;
esac

export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
status=0
for dtype in bfloat16 float32; do
    timeout --signal=TERM --kill-after=15 "${TOTAL_S:-260}" \
        python -m megatron_prefix matrix --device cuda --dtype "$dtype" --timeout "${ROW_S:-90}" \
        --only "${rows[@]}" --continue "$output/rows.jsonl" --markdown "$output/$dtype.md" \
        "${@:2}" || status=1
done
exit "$status"
