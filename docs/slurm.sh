#!/bin/bash
#SBATCH --job-name=qbench
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH --time=04:00:00
#SBATCH --output=qbench-%j.log
#SBATCH --signal=B:TERM@120
# Once, on the login node, which has network access but no GPU:
#   TORCH=cuda make setup && .venv/bin/qbench fetch recipes/paper-340m.yaml
# Then, in the same folder: `sbatch docs/slurm.sh`, or for another recipe `sbatch docs/slurm.sh recipes/paper-1.8b.yaml`.
# If a job runs out of time, its finished cells are kept: submit it again.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
recipe=${1:-recipes/paper-340m.yaml}
export HF_HUB_OFFLINE=1

# In the background, so the shell can pass on Slurm's signal while it waits.
trap 'kill -TERM $!; wait $!' TERM
make bench RECIPE="$recipe" &
wait $!
