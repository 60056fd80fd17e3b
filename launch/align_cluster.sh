#!/usr/bin/env bash
# Do both schedules agree on this cluster? Runs TP, PP, CP and EP over all its GPUs, filled up with data
# parallelism. Run it on each node, with that node's number:
#   NODE_RANK=0 NNODES=2 MASTER_ADDR=node0 bash launch/align_cluster.sh [ARGUMENTS]
# Prints one table; the exit code is 0 when every row is aligned. arguments.sh and nodes.sh have the
# environment variables; ARGUMENTS are those of `megatron-prefix matrix`, e.g. --only 'dense/PP*'.

source "$(dirname "${BASH_SOURCE[0]}")/arguments.sh"
source "$(dirname "${BASH_SOURCE[0]}")/nodes.sh"

MATRIX_ARGS=(
    --device cuda
    --only '*/*/tree/none' '*/*/chunked/full'
    --markdown "${OUTPUT:-runs/align_cluster}/matrix.md"
)

torchrun "${NODES_ARGS[@]}" -m megatron_prefix matrix "${MATRIX_ARGS[@]}" "$@"
