#!/usr/bin/env bash
# From nothing to GRPO updates with both schedules side by side: bash launch/quickstart.sh
# Installs what it needs first; environment.sh has the variables that change where and with what.
#
# Environment variables:
#   ROLLOUTS  rollout file (default: the bundled one)
#   MODEL     model preset, or a Hugging Face config.json (default: tiny-llama, widened until
#             most of the time is computation, not overhead)
#   STEPS     number of updates (default: 4)
#   OUTPUT    folder for metrics and the picture of the plan (default: runs/quickstart)
# Arguments are passed on to `megatron-prefix train`.

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare train,plot

# One thread: several would wait for one another if anything else runs.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
output=${OUTPUT:-runs/quickstart}
model=(--model "${MODEL:-tiny-llama}")
if [[ -z ${MODEL:-} ]]; then
    for field in hidden_size=256 num_attention_heads=4 kv_channels=64 ffn_hidden_size=768; do
        model+=(--set "$field")
    done
fi
# Prompts as short as the bundled ones would run in one segment with their suffixes; where spans may be cut
# they run apart, and the picture has all phases: A and C of prompts, B of suffixes.
cut=()
[[ -n ${ROLLOUTS:-} ]] || cut=(--chunk-tokens 512)
say "Training: Megatron-Core's schedule and the prefix schedule side by side"
exec megatron-prefix train "${ROLLOUTS:-$root/megatron_prefix/lab/data/bundled/agents.jsonl.gz}" \
    "${model[@]}" "${cut[@]}" --steps "${STEPS:-4}" --lr 1e-4 --prefix-schedule on --compare \
    --output "$output" --overwrite --plan-svg "$output/plan.svg" --progress "$@"
