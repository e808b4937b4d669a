#!/usr/bin/env bash
# Train BERT on one A3 node, 16 NPUs: a3.sh [--dry-run] RECIPE [OPTION ...]
NPROC="${NPROC:-16}" NNODES=1 exec "$(dirname "$0")/nodes.sh" "$@"
