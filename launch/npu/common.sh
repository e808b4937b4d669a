# shellcheck shell=bash
# What the scripts beside this file share; they source it. Variables that are set already are kept.
set -euo pipefail
unset CDPATH # with it cd prints where it goes

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$repository"

export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-3600}"
export TASK_QUEUE_ENABLE="${TASK_QUEUE_ENABLE:-2}"
export CPU_AFFINITY_CONF="${CPU_AFFINITY_CONF:-1}"
export MULTI_STREAM_MEMORY_REUSE="${MULTI_STREAM_MEMORY_REUSE:-2}"
export PYTORCH_NPU_ALLOC_CONF="${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}"
export PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}"

refuse() { # MESSAGE: say what is wrong and end
  echo "$(basename "$0"): error: $1" >&2
  exit 2
}

take() { # [--dry-run] RECIPE [OPTION ...]: set dry_run, and options to those of RECIPE and more
  dry_run=no
  if [ "${1:-}" = --dry-run ]; then
    dry_run=yes
    shift
  fi
  local names file line
  names=$(cd launch/npu/recipes && ls ./*.args)
  names=${names//.\//}
  names=${names//.args/}
  [ $# -gt 0 ] || refuse "name a recipe: ${names//$'\n'/, }"
  file="launch/npu/recipes/$1.args"
  [ -f "$file" ] || refuse "no recipe is called $1; there are ${names//$'\n'/, }"
  shift
  options=()
  while read -r line; do
    case "$line" in "" | "#"*) continue ;; esac
    read -ra words <<<"$line"
    options+=("${words[@]}")
  done <"$file"
  if [ -n "${CORPUS:-}" ]; then
    read -ra words <<<"$CORPUS"
    options+=(--corpus "${words[@]}")
  fi
  options+=("$@")
}

start() { # COMMAND ...: look at it without an NPU; then run it, unless this is a dry run
  if [ "$dry_run" != no ]; then
    exec python3 -m launch.npu.check -- "$@"
  fi
  python3 -m launch.npu.check --here -- "$@"
  "$@" &
  local child=$! code=0
  trap 'kill -TERM "$child" 2>/dev/null || true' INT TERM USR1
  wait "$child" || code=$?
  while kill -0 "$child" 2>/dev/null; do # a signal has ended the wait, not the job
    code=0
    wait "$child" || code=$?
  done
  # A job that died holds HCCP for some seconds, in which the next one cannot start.
  [ "$code" -eq 0 ] || sleep "${HCCP_WAIT_S:-10}"
  exit "$code"
}
