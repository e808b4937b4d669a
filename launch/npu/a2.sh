#!/usr/bin/env bash
# Train BERT on one A2 node, 8 NPUs: a2.sh [--dry-run] RECIPE [OPTION ...]
NPROC="${NPROC:-8}" NNODES=1 exec "$(dirname "$0")/nodes.sh" "$@"
