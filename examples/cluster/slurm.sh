#!/usr/bin/env bash
#SBATCH --job-name=slime
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# Runs a multi-node recipe on the nodes that Slurm allocates; start it in the clone's folder:
#
#   sbatch examples/cluster/slurm.sh my_run.sh [FLAG...]
#
# my_run.sh calls start_nodes of scripts/nodes.sh with the numbers above.  ssh must reach the nodes of the job.
set -euo pipefail

export HOSTFILE="${PWD}/slurm-${SLURM_JOB_ID}.hosts" SSH_USER="${USER}"
for name in $(scontrol show hostnames "${SLURM_JOB_NODELIST}"); do
    getent ahostsv4 "${name}" | awk 'NR == 1 {print $1}'
done >"${HOSTFILE}"
MASTER_ADDR="$(head -n 1 "${HOSTFILE}")"
export MASTER_ADDR

bash "$@"
