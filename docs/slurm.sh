#!/bin/bash
#SBATCH --job-name=qbench
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH --time=04:00:00
#SBATCH --output=qbench-%j.log
#SBATCH --signal=B:TERM@120
# On the login node, which has network and no GPU, once:
#   TORCH=cuda make setup && .venv/bin/qbench fetch recipes/paper-340m.yaml
# Then `sbatch docs/slurm.sh`, or with another recipe `sbatch docs/slurm.sh recipes/paper-1.8b.yaml`, from the same folder.
# A job that runs out of time keeps its finished cells: submit it again.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
recipe=${1:-recipes/paper-340m.yaml}
export HF_HUB_OFFLINE=1

# In the background, so that the shell can pass on Slurm's signal while it waits.
trap 'kill -TERM $!; wait $!' TERM
make bench RECIPE="$recipe" &
wait $!
