#!/usr/bin/env bash
# GRPO updates on the GPUs of one node: MODEL=qwen3-8b bash launch/train_1node.sh [ARGUMENTS]
# arguments.sh has the environment variables; ARGUMENTS are those of `megatron-prefix train`.

source "$(dirname "${BASH_SOURCE[0]}")/arguments.sh"
[[ -n ${LOAD_HF:-} ]] || echo "$0: random weights; LOAD_HF=FOLDER takes a checkpoint's" >&2

torchrun "${ONE_NODE_ARGS[@]}" -m megatron_prefix train "${TRAIN_ARGS[@]}" \
    "${MODEL_ARGS[@]}" "${LAYOUT_ARGS[@]}" "${LENGTH_ARGS[@]}" "${SCHEDULE_ARGS[@]}" "$@"
