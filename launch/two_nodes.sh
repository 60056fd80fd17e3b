#!/usr/bin/env bash
# Two nodes on this machine, on its CPU, to try what a cluster does before there is one:
#   bash launch/two_nodes.sh align [ARGUMENTS]   runs launch/align_cluster.sh on both
#   bash launch/two_nodes.sh train [ARGUMENTS]   runs launch/train_multinode.sh on both
# ARGUMENTS are those of `megatron-prefix matrix` and `train`. A node is a Linux namespace with a host
# name and a network of its own, which ends in a cable to the other node: nothing leaves the machine.
# Nothing is installed or configured, and when this script ends, however it does, the kernel takes all
# of it back. It needs root, or user namespaces.
#
# Environment variables:
#   NGPU    ranks per node (default: 2)
#   STEPS   updates of `train` (default: 4)
#   OUTPUT  folder of metrics, checkpoints and the table (default: runs/two_nodes)
# arguments.sh has the others.

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
find_environment

export NGPU=${NGPU:-2} STEPS=${STEPS:-4} OUTPUT=${OUTPUT:-runs/two_nodes}
export NNODES=2 MASTER_ADDR=node-a GLOO_SOCKET_IFNAME=cable NCCL_SOCKET_IFNAME=cable
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

ALIGN_ARGS=(
    --device cpu
    --only dense/TP2/tree/none dense/PP2/chunked/full dense/DP2/flat/none
)
TRAIN_ARGS=(
    --device cpu
    --model tiny-llama
    --dtype float32
    --recompute none
    --tp 2
    --sequence-parallel
    --pp 2
    --max-tokens 256
    --chunk-tokens 64
    --segment-tokens 256
    --prefix-schedule on
)

# node NUMBER SCRIPT ARGUMENTS: one node, in this process. It waits for the cable.
node() {
    local number=$1
    shift
    printf 'node-%s\n' "$([[ $number == 0 ]] && echo a || echo b)" >/proc/sys/kernel/hostname
    mount --bind "$work/hosts" /etc/hosts
    ip link set lo up
    : >"$work/ready-$number"
    until ip link show cable &>/dev/null; do sleep 0.05; done
    ip address add "10.0.0.$((number + 1))/24" dev cable
    ip link set cable up
    export NODE_RANK=$number
    exec bash "$root/launch/$1" "${@:2}"
}

# nodes SCRIPT ARGUMENTS: both, and the cable. The first process of a process namespace, which ends
# with it.
nodes() {
    local number status=0 pids=()
    for number in 0 1; do
        unshare --net --uts --mount bash "$0" --node "$work" "$number" "$@" &
        pids+=("$!")
        until [[ -e $work/ready-$number ]]; do
            kill -0 "$!" 2>/dev/null || exit 1
            sleep 0.05
        done
    done
    ip link add cable netns "${pids[0]}" type veth peer name cable netns "${pids[1]}"
    wait -n "${pids[@]}" || status=$?
    if ((status)); then # the other has a while to say what it has lost
        { sleep 60 && kill "${pids[@]}"; } &>/dev/null &
    fi
    for number in 0 1; do wait "${pids[number]}" || status=$?; done
    exit "$status"
}

# check_namespaces: sets `spaces`, the command that makes what both nodes are in.
check_namespaces() {
    local command said
    for command in unshare setpriv ip mount; do
        command -v "$command" >/dev/null || fail "there is no $command here; install util-linux and iproute2"
    done
    spaces=(unshare --net --mount --pid --fork --kill-child --mount-proc)
    ((EUID == 0)) || spaces+=(--user --map-root-user)
    said=$("${spaces[@]}" ip link add cable type veth peer name other 2>&1) ||
        fail "no namespaces here (${said##*$'\n'}); run as root, in a container with --cap-add SYS_ADMIN,NET_ADMIN"
}

case ${1:-} in
    --node) work=$2 && node "${@:3}" ;;
    --nodes) work=$2 && nodes "${@:3}" ;;
    align) set -- align_cluster.sh "${ALIGN_ARGS[@]}" "${@:2}" ;;
    train) set -- train_multinode.sh "${TRAIN_ARGS[@]}" "${@:2}" ;;
    *) fail "give align or train: bash $0 align [ARGUMENTS]" ;;
esac

check_namespaces
work=$(mktemp -d)
export TMPDIR=$work # torchrun leaves folders behind
job=
trap 'kill -KILL $job 2>/dev/null || true; wait; rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP
printf '%s\n' '127.0.0.1 localhost' '10.0.0.1 node-a' '10.0.0.2 node-b' >"$work/hosts"
# The kernel kills the first process with its parent, and all others with the first.
setpriv --pdeathsig KILL "${spaces[@]}" bash "$0" --nodes "$work" "$@" &
job=$!
wait "$job"
