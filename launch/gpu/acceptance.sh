#!/usr/bin/env bash
# Whether shardfuse works on this host's GPUs (CUDA, NCCL), in under ten minutes.
#   [DEVICE=cpu] [NPROC=2] [REPORT=FILE] acceptance.sh [OPTION ...]
# What it looks at and how its report fills README's table: launch/npu/README.md.
set -euo pipefail
unset CDPATH # with it cd prints where it goes
repository=$(cd "$(dirname "$0")/../.." && pwd)
export PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}"
report=${REPORT:-$repository/launch/gpu/results/$(date -u +%Y-%m-%d).json}
exec python3 -m launch.acceptance --device "${DEVICE:-cuda}" \
  ${NPROC:+--nproc-per-node "$NPROC"} --report "$report" "$@"
