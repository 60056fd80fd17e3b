#!/usr/bin/env bash
# From nothing to GRPO updates with both schedules side by side: bash launch/quickstart.sh
# Installs what it needs first; environment.sh has the variables that change where and with what.
#
# Environment variables:
#   ROLLOUTS  rollout file (default: the bundled one)
#   MODEL     model preset, or a Hugging Face config.json (default: tiny-llama)
#   STEPS     number of updates (default: 3)
#   OUTPUT    folder for metrics and the picture of the plan (default: runs/quickstart)
# Arguments are passed on to `megatron-prefix train`.

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare train,plot

cd "$root"
output=${OUTPUT:-runs/quickstart}
say "Training: Megatron-Core's schedule and the prefix schedule side by side"
megatron-prefix train "${ROLLOUTS:-megatron_prefix/data/bundled/agents.jsonl.gz}" \
    --model "${MODEL:-tiny-llama}" --steps "${STEPS:-3}" --prefix-schedule on --compare \
    --output "$output" --plan-svg "$output/plan.svg" "$@"
say "The plan as a picture: $output/plan.svg"
