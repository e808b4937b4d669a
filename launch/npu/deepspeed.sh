#!/usr/bin/env bash
# Train BERT by DeepSpeed's launcher on the hosts of a hostfile; start it on the first:
#   HOSTFILE=hostfile deepspeed.sh [--dry-run] CONFIG.json [OPTION ...]
# A line of the hostfile: "worker-0 slots=8". DeepSpeed starts the other hosts by ssh.
# shellcheck source=common.sh
. "$(dirname "$0")/common.sh"
dry_run=no
if [ "${1:-}" = --dry-run ]; then
  dry_run=yes
  shift
fi
[ $# -gt 0 ] || refuse "name a configuration, such as launch/npu/recipes/bert-large-deepspeed.json"
[ -n "${HOSTFILE:-}" ] || refuse "HOSTFILE must name a file with lines such as: worker-0 slots=8"
config=$1
shift
# The other hosts see of the environment what DeepSpeed is told to pass on. What the user's own file
# says comes last, and counts.
if [ "$dry_run" = no ]; then
  given=${DS_ENV_FILE:-.deepspeed_env}
  passed=$(
    for name in HCCL_CONNECT_TIMEOUT TASK_QUEUE_ENABLE CPU_AFFINITY_CONF MULTI_STREAM_MEMORY_REUSE \
      PYTORCH_NPU_ALLOC_CONF TORCH_HCCL_ZERO_COPY PYTHONPATH; do
      [ -z "${!name:-}" ] || echo "$name=${!name}"
    done
    for file in "$HOME/$given" "$given"; do # where DeepSpeed looks
      [ ! -f "$file" ] || [ -r "$file" ] || refuse "$file cannot be read"
      [ ! -f "$file" ] || grep -e = -- "$file" || true
    done
  )
  # The user's variables may be secrets: nobody else reads them, and nothing is left.
  DS_ENV_FILE=$(mktemp "${TMPDIR:-/tmp}/shardfuse-env.XXXXXXXX")
  export DS_ENV_FILE
  trap 'rm -f -- "$DS_ENV_FILE"' EXIT
  echo "$passed" >"$DS_ENV_FILE"
fi
launcher=(deepspeed --hostfile "$HOSTFILE" --no_local_rank --master_port "${MASTER_PORT:-29500}")
[ -z "${MASTER_ADDR:-}" ] || launcher+=(--master_addr "$MASTER_ADDR")
start "${launcher[@]}" "$repository/launch/deepspeed/train_bert.py" --deepspeed-config "$config" "$@"
