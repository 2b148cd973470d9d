#!/bin/bash
# A batch on several nodes of a Slurm cluster, with Ray:
#   sbatch --nodes=4 --gpus-per-node=4 dendritic_lab/fleet/slurm/ray_batch.sh many.yaml --retry 1
# Submitted again with --resume after the time limit, it runs what is missing.
# The checkout and its outputs/ lie on a disk that all nodes share, with the environment of `make install` plus the extra cluster.
#SBATCH --job-name=dendritic-lab
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
set -euo pipefail

cd "${SLURM_SUBMIT_DIR:?submit this with sbatch, from the checkout}"
source .venv/bin/activate

export RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN_PATH="$PWD/.ray-token-$SLURM_JOB_ID"
(umask 077 && python -c "import secrets; print(secrets.token_hex(32))" > "$RAY_AUTH_TOKEN_PATH")

head=$(hostname)
address=$(hostname --ip-address | awk '{print $1}')
port=$((20000 + SLURM_JOB_ID % 20000))

finish() {
    ray stop || true
    rm -f "$RAY_AUTH_TOKEN_PATH"
}
trap finish EXIT

ray start --head --node-ip-address="$address" --port="$port" --num-cpus="$SLURM_CPUS_PER_TASK" --disable-usage-stats
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    srun --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --exclude="$head" \
        ray start --address="$address:$port" --num-cpus="$SLURM_CPUS_PER_TASK" --disable-usage-stats --block &
fi

# Two minutes before the limit Slurm sends TERM; the batch then marks what is running as failed and ends.
dendritic-lab batch "$@" --engine ray --address "$address:$port" &
batch=$!
trap 'kill -TERM $batch' TERM
status=0
wait $batch || status=$?
if kill -0 $batch 2>/dev/null; then status=0; wait $batch || status=$?; fi
exit $status
