#!/usr/bin/env bash
# A hundred GRPO steps on real rollouts by the stock schedule, by the stock schedule in another reduction order
# and by the prefix schedule, from the same random weights, in bfloat16: how far their fp32 main parameters
# drift apart. The shape of Qwen3-0.6B, and Qwen3-30B-A3B with 4 layers of 32 experts. One GPU of 141 GB: three
# models with their optimizers stay on it, about 35 GiB dense and 75 GiB MoE before activations. The MoE runs
# follow the routes that the stock run chooses before each step, without load-balancing loss, whose counts are
# a choice as well.
#   bash benchmarks/replay_h200.sh OUTPUT [ARGUMENTS of `megatron-prefix replay`]
# OUTPUT gets a JSON file and a picture of each; the tables go to stdout, one line per step to stderr. Exit code 0
# if both stayed within twice the noise floor at every step.
#
# A step is one group of rag_musique (16 rollouts) and one of tau_airline (4), cut to 2,048 tokens: about
# 40,000 positions for the stock schedule, in two updates.
#
# Environment variables:
#   SHAPES  which of dense and moe to run (default: both)
#   STEPS   (default: 100)
#   DATA    folder of the rollout files (default: ../shared/data)
set -uo pipefail

output=$(realpath -m "${1:?OUTPUT folder}")
options=("${@:2}")
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
data=${DATA:-../shared/data}
mkdir -p "$output" || exit 2
status=0

replay() { # NAME, ARGUMENTS of the model
    python3 -m megatron_prefix replay "$data"/{rag_musique,tau_airline}.jsonl.gz --steps "${STEPS:-100}" \
        --groups-per-step 2 --minibatches 2 --lr 1e-6 --max-tokens 2048 --pack-tokens 8192 \
        --dtype bfloat16 --device cuda --progress --result-json "$output/$1.json" --plot "$output/$1.svg" \
        "${@:2}" "${options[@]}" || status=1
}
for shape in ${SHAPES:-dense moe}; do
    case $shape in
    dense) replay dense --model qwen3-0.6b ;;
    moe) replay moe --model qwen3-30b-a3b --set num_layers=4 --set num_moe_experts=32 --set moe_aux_loss_coeff=0 \
        --same-routes ;;
    *)
        echo "SHAPES: $shape is neither dense nor moe" >&2
        exit 2
        ;;
    esac
done
exit "$status"
