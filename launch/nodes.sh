# Sourced by the scripts for several nodes, after arguments.sh: where the nodes meet.
#
# Environment variables, the same on every node:
#   NNODES       nodes (default: 2)
#   MASTER_ADDR  name or address of node 0, as the others reach it
#   MASTER_PORT  a free port there (default: 29500)
# and different on each node:
#   NODE_RANK    its number, from 0 (default: Slurm's)
# shellcheck shell=bash disable=SC2034

NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-}}

# With a number per node, torchrun asks nobody while ranks run, and ends with them. With --rdzv-backend
# c10d a node that has lost its network waits for the store for minutes.
NODES_ARGS=(
    --nnodes "${NNODES:-2}"
    --node-rank "${NODE_RANK:?the number of this node, from 0}"
    --nproc-per-node "${NGPU:-8}"
    --master-addr "${MASTER_ADDR:?name or address of node 0}"
    --master-port "${MASTER_PORT:-29500}"
)
