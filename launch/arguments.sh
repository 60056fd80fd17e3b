# Sourced by the scripts in this folder: the arguments that they have in common. They need an
# environment (environment.sh says which is taken) and GPUs; if there is none, one line says so.
#
# Environment variables:
#   MODEL            file in launch/models (default: llama3-8b)
#   LOAD_HF          folder of a Hugging Face checkpoint (default: none, the weights are random)
#   ROLLOUTS         rollout file (default: the bundled one, small and synthetic)
#   OUTPUT           folder of metrics and checkpoints, seen by all nodes (default: runs/MODEL)
#   STEPS            updates (default: 100)
#   LR               learning rate (default: 1e-6)
#   PREFIX_SCHEDULE  off, observe, auto or on (default: auto; on for models with experts)
#   NGPU             GPUs per node (default: 8)
# Arguments of the script come last, so they override all of these.
# shellcheck shell=bash disable=SC2034

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
find_environment
check_gpus "$@"

MODEL=${MODEL:-llama3-8b}
check_model
# shellcheck source=models/llama3-8b.sh
source "$root/launch/models/$MODEL.sh"

ONE_NODE_ARGS=(
    --standalone
    --nproc-per-node "${NGPU:-8}"
)
TRAIN_ARGS=(
    "${ROLLOUTS:-$root/megatron_prefix/lab/data/bundled/agents.jsonl.gz}"
    --device cuda
    --steps "${STEPS:-100}"
    --lr "${LR:-1e-6}"
    --distributed-optimizer
    --output "${OUTPUT:-runs/$MODEL}"
    ${LOAD_HF:+--load-hf "$LOAD_HF"}
    --save-every 50
    --resume
)
SCHEDULE_ARGS=(
    --prefix-schedule "${PREFIX_SCHEDULE:-auto}"
)

# Megatron overlaps communication and computation in the order in which it issues them.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
