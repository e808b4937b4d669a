#!/usr/bin/env bash
# One task of a Slurm job, for slurm.sh: task.sh torchrun ...
# SIGUSR1 or SIGTERM has the ranks of this node save and stop, and all others with them. torchrun
# ends of SIGUSR1, and kills its ranks 30 seconds after a SIGTERM.
# shellcheck source=common.sh
. "$(dirname "$0")/common.sh"
run "$@"
exit "$code"
