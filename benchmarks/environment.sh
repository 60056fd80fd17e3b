# Sourced by the scripts in this folder that run on a GPU: changes to the repository and sets what its commands need.
# shellcheck shell=bash

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
# Memory grows without fragments; flash-attn-4 keeps its compiled kernels for the next process.
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
# Each rank imports the same files: Python keeps what it has compiled, whatever the image says.
unset PYTHONDONTWRITEBYTECODE
