#!/usr/bin/env bash
# GRPO updates on several nodes; run the same on each of them:
#   NNODES=2 MASTER_ADDR=node1 MODEL=qwen3-30b-a3b bash launch/train_multinode.sh [ARGUMENTS]
# arguments.sh has the environment variables; ARGUMENTS are those of `megatron-prefix train`.

source "$(dirname "${BASH_SOURCE[0]}")/arguments.sh"

torchrun "${NODES_ARGS[@]}" -m megatron_prefix train "${TRAIN_ARGS[@]}" \
    "${MODEL_ARGS[@]}" "${LAYOUT_ARGS[@]}" "${LENGTH_ARGS[@]}" "${SCHEDULE_ARGS[@]}" "$@"
