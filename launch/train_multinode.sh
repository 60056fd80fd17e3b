#!/usr/bin/env bash
# GRPO updates on several nodes; run it on each node, with that node's number:
#   NODE_RANK=0 NNODES=2 MASTER_ADDR=node0 MODEL=qwen3-30b-a3b bash launch/train_multinode.sh [ARGUMENTS]
# arguments.sh and nodes.sh have the environment variables; ARGUMENTS are those of
# `megatron-prefix train`.

source "$(dirname "${BASH_SOURCE[0]}")/arguments.sh"
source "$(dirname "${BASH_SOURCE[0]}")/nodes.sh"
[[ -n ${LOAD_HF:-} ]] || echo "$0: random weights; LOAD_HF=FOLDER takes a checkpoint's" >&2

torchrun "${NODES_ARGS[@]}" -m megatron_prefix train "${TRAIN_ARGS[@]}" \
    "${MODEL_ARGS[@]}" "${LAYOUT_ARGS[@]}" "${LENGTH_ARGS[@]}" "${SCHEDULE_ARGS[@]}" "$@"
