#!/usr/bin/env bash
# Train BERT on the nodes of a Slurm job, from the repository's root:
#   sbatch --nodes 4 launch/npu/slurm.sh RECIPE [OPTION ...]
#   launch/npu/slurm.sh --dry-run RECIPE [OPTION ...]
#SBATCH --job-name=shardfuse-bert
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
# Two minutes before the time limit, which have to be enough for a step and a save:
#SBATCH --signal=B:USR1@120
# sbatch runs a copy of this file from a folder of its own.
here=$(dirname "$0")
[ -f "$here/common.sh" ] || here=${SLURM_SUBMIT_DIR:-.}/launch/npu
if [ ! -f "$here/common.sh" ]; then
  echo "slurm.sh: error: $here has no scripts: call sbatch from the repository's root" >&2
  exit 2
fi
# shellcheck source=common.sh
. "$here/common.sh"
take "$@"

nodes=${SLURM_NNODES:-${NNODES:-1}}
job=${SLURM_JOB_ID:-0}
if [ -n "${SLURM_JOB_NODELIST:-}" ]; then
  hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
  MASTER_ADDR=${hosts%%$'\n'*}
elif [ "$dry_run" = no ]; then
  refuse "this is no Slurm job: start it by sbatch, or look at it by --dry-run"
fi
launcher=(srun --kill-on-bad-exit=1 "$repository/launch/npu/task.sh")
launcher+=(torchrun --nnodes "$nodes" --nproc-per-node "${NPROC:-8}")
launcher+=(--rdzv-id "$job" --rdzv-backend c10d)
launcher+=(--rdzv-endpoint "${MASTER_ADDR:-localhost}:${MASTER_PORT:-29500}")
# A job that is requeued goes on from its newest checkpoint.
launcher+=("$repository/launch/bert/pretrain.py" --run-dir "${RUN_DIR:-runs/slurm-$job}" --resume auto)
look "${launcher[@]}" "${options[@]}"
run "${launcher[@]}" "${options[@]}"
if [ "$told" = USR1 ] && [ "$code" -eq 0 ]; then # all is saved; the time limit is near
  scontrol requeue "$job"
  exit 0
fi
finish
