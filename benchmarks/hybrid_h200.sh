#!/usr/bin/env bash
# A hybrid model against the FLOP bound: the widths of Qwen3.5 or Qwen3-Next-80B-A3B with 12 layers, 3 of them with
# attention; aligned in bfloat16 first, against fp32 by the rule's definition. Long prompts in waves of four rollouts,
# prompts in chunks of 2,048, and consecutive steps of real rollouts. One GPU of 141 GB with flash-linear-attention,
# transformer-engine and flash-attn-4.
#   bash benchmarks/hybrid_h200.sh OUTPUT [ARGUMENTS of `megatron-prefix bench`]
# OUTPUT gets one JSON file per row; the tables go to stdout. Exit code 0 when everything was aligned and timed. The first
# row compiles kernels for some minutes; with TRITON_CACHE_DIR they are kept for the next call. Steps are run once
# before they are timed, by both schedules: some of fla's kernels are tuned anew every 1,024 positions.
#
# With CUDA graphs of what is around the recurrences and attention, in the chunks: `--graph-tokens 2048` as ARGUMENTS.
#
# Environment variables:
#   ROWS      which of waves, chunks and steps to run (default: all)
#   DATA      folder of the rollout files, for steps (default: ../shared/data)
#   MODEL     qwen3.5-9b (default), qwen3.5-27b or qwen3-next-80b-a3b
#   EXPERTS   of Qwen3-Next: how many per layer (default: none, but an MLP 5,632 wide). With few tokens Megatron's
#             experts keep the host busier than the GPU.
#   BASELINE  rollout or packed (default: packed if megatron-core is 0.18 or newer, which GatedDeltaNet needs)
#   STOCK     the stock schedule's attention, te or fa4 (default: te; fa4 for packs)
set -uo pipefail

output=$(realpath -m "${1:?OUTPUT folder}")
options=("${@:2}")
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
data=${DATA:-../shared/data}
mkdir -p "$output" || exit 2
baseline=${BASELINE:-$(python3 -W ignore -c 'import megatron.core as m
print("packed" if tuple(map(int, m.__version__.split(".")[:2])) >= (0, 18) else "rollout")')}
[ "$baseline" = packed ] || echo "steps are compared with one rollout per microbatch, not with packs" >&2
status=0

model=(--model "${MODEL:-qwen3.5-9b}" --set num_layers=12)
if [ "${MODEL:-}" = qwen3-next-80b-a3b ]; then
    model+=(--set "num_moe_experts=${EXPERTS:-none}" --set ffn_hidden_size=5632)
elif [ -n "${EXPERTS:-}" ]; then
    echo "EXPERTS: only with MODEL=qwen3-next-80b-a3b" >&2
    exit 2
fi
[ "$baseline" = packed ] && usual=fa4 || usual=te
case ${STOCK:-$usual} in
te) bench=(megatron_prefix bench) ;;
fa4) bench=(benchmarks.stock_fa4) ;;
*)
    echo "STOCK: $STOCK is neither te nor fa4" >&2
    exit 2
    ;;
esac

timed() { # NAME, ARGUMENTS
    python3 -m "${bench[@]}" "${model[@]}" --progress \
        --dtype bfloat16 --device cuda --layer-spec te --baseline "$baseline" --align-layers 4 \
        --warm-up-calls 2 --repeats 3 --bench-json "$output/$1.json" "${@:2}" "${options[@]}" || status=1
}
for row in ${ROWS:-waves chunks steps}; do
    case $row in
    waves) timed waves --set vocab_size=32768 --shapes 10240:2048:8 16384:64:9 ;;
    chunks) timed chunks --set vocab_size=32768 --shapes 10240:2048:8 --chunk-tokens 2048 ;;
    steps)
        # As many tokens as the tokenizer of the rollouts has; with Qwen3.5's own 248,320 alignment ran out of 140 GB.
        timed steps --set vocab_size=151936 --rollouts "$data"/{tau_airline,rag_musique}.jsonl.gz \
            --step-tokens 100000 --warm-up 1 --steps 3 --rehearse
        ;;
    *)
        echo "ROWS: $row is none of waves, chunks, steps" >&2
        exit 2
        ;;
    esac
done
exit "$status"
