# shellcheck shell=bash
# What the scripts beside this file share; they source it. Variables that are set already are kept.
set -euo pipefail
unset CDPATH # with it cd prints where it goes

# Paths that a user gives are from where the user is.
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

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
  names=$(cd "$repository/launch/npu/recipes" && ls ./*.args)
  names=${names//.\//}
  names=${names//.args/}
  [ $# -gt 0 ] || refuse "name a recipe: ${names//$'\n'/, }"
  file="$repository/launch/npu/recipes/$1.args"
  [ -f "$file" ] || refuse "no recipe is called $1; there are ${names//$'\n'/, }"
  shift
  options=()
  while read -r line || [ -n "$line" ]; do # the last line may lack its end
    line=${line%$'\r'}
    case "$line" in "" | "#"*) continue ;; esac
    read -ra words <<<"$line"
    options+=("${words[@]}")
  done <"$file"
  if [ -n "${CORPUS:-}" ]; then
    read -r -d '' -a words <<<"$CORPUS" || true # over all of its lines
    [ ${#words[@]} -gt 0 ] || refuse "CORPUS has only blanks: name text files or folders"
    options+=(--corpus "${words[@]}")
  fi
  options+=("$@")
}

look() { # COMMAND ...: look at it without an NPU, and end there if this is a dry run
  if [ "$dry_run" != no ]; then
    exec python3 "$repository/launch/npu/check.py" -- "$@"
  fi
  python3 "$repository/launch/npu/check.py" --here -- "$@"
}

tell() { # PROGRAM PID: have the ranks that it has started save and stop
  case "$1" in
  srun) kill -USR1 "$2" ;; # srun sends it to its tasks; of a SIGTERM it kills them at once
  torchrun) pkill -TERM -P "$2" || kill -TERM "$2" ;; # itself it would kill them 30 seconds later
  *) # deepspeed on one host ends alone, and its launcher and ranks go on
    pkill -TERM -P "$2"
    kill -TERM "$2"
    ;;
  esac 2>/dev/null || true
}

run() { # COMMAND ...: run it, and pass signals on; set code, and told to the last signal
  local child before num_told=0
  told=none
  # Slurm may send SIGUSR1 to all processes of a task.
  (
    [ "$1" != torchrun ] || trap "" USR1
    exec "$@"
  ) &
  child=$!
  for before in INT TERM USR1; do
    # shellcheck disable=SC2064 # of now
    trap "told=$before num_told=\$((num_told + 1)); tell '$1' $child" "$before"
  done
  while :; do
    before=$num_told code=0
    wait "$child" || code=$?
    [ "$before" != "$num_told" ] || break # else a signal has ended the wait, not the job
  done
}

finish() { # end with the exit code of what has run
  # A job that died holds HCCP for some seconds, in which the next one cannot start.
  [ "$code" -eq 0 ] || sleep "${HCCP_WAIT_S:-10}"
  # Stopped is not done.
  [ "$code" -ne 0 ] || [ "$told" = none ] || exit 143
  exit "$code"
}

start() { # COMMAND ...: look at it, run it, end
  look "$@"
  run "$@"
  finish
}
