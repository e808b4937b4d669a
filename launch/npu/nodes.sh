#!/usr/bin/env bash
# Train BERT on one node or several; start it on each. See README.md.
#   [NPROC=8] [NNODES=2 NODE_RANK=0 MASTER_ADDR=host] nodes.sh [--dry-run] RECIPE [OPTION ...]
# shellcheck source=common.sh
. "$(dirname "$0")/common.sh"
take "$@"

launcher=(torchrun --nproc-per-node "${NPROC:-8}")
if [ "${NNODES:-1}" = 1 ]; then
  launcher+=(--standalone)
else
  [ -n "${MASTER_ADDR:-}" ] || refuse "NNODES=$NNODES needs MASTER_ADDR, the first node's address"
  [ -n "${NODE_RANK:-}" ] || refuse "NNODES=$NNODES needs NODE_RANK, this node's number from 0"
  launcher+=(--nnodes "$NNODES" --node-rank "$NODE_RANK")
  launcher+=(--master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
fi
start "${launcher[@]}" "$repository/launch/bert/pretrain.py" "${options[@]}"
