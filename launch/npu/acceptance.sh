#!/usr/bin/env bash
# Whether shardfuse works on this host's NPUs, in under ten minutes; see README.md.
#   [DEVICE=cpu] [NPROC=2] [REPORT=FILE] acceptance.sh [OPTION ...]
# shellcheck source=common.sh
. "$(dirname "$0")/common.sh"
report=${REPORT:-$repository/launch/npu/results/$(date -u +%Y-%m-%d).json}
exec python3 -m launch.acceptance --device "${DEVICE:-npu}" \
  ${NPROC:+--nproc-per-node "$NPROC"} --report "$report" "$@"
