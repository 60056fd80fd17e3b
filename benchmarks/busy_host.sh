#!/usr/bin/env bash
# Whether the host matters: a dense row (Qwen3-8B, 12 layers) alone, and with two busy processes on every core. One GPU with
# transformer-engine and flash-attn-4.
#   bash benchmarks/busy_host.sh OUTPUT [ARGUMENTS of `megatron-prefix bench`]
# OUTPUT gets alone.json and busy.json; the tables go to stdout. Exit code 0 when both were aligned and timed.
set -uo pipefail

output=$(realpath -m "${1:?OUTPUT folder}")
options=("${@:2}")
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
mkdir -p "$output" || exit 2
status=0

row() { # NAME
    python3 -m megatron_prefix bench --model qwen3-8b --set num_layers=12 --dtype bfloat16 --device cuda --layer-spec te \
        --shapes 10240:2048:8 --align-layers 1 --warm-up-calls 4 --repeats 5 --bench-json "$output/$1.json" \
        "${options[@]}" || status=1
}
row alone
busy=()
trap 'kill "${busy[@]}" 2>/dev/null' EXIT
for ((number = 0; number < 2 * $(nproc); number++)); do
    python3 -c "while True: pass" &
    busy+=($!)
done
row busy
exit "$status"
