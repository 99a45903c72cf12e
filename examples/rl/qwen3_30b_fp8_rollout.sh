#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Qwen3-30B-A3B-Base on 4 nodes of 8 GPUs, FP8 in the rollout engine, BF16 in training. Not run on
# GPUs yet.
#
#   bash examples/rl/qwen3_30b_fp8_rollout.sh --dry-run    # config, plan and commands; starts nothing
#   sbatch examples/rl/qwen3_30b_fp8_rollout.sh            # MODEL and DATA in the environment
#
#   MODEL=/path/to/Qwen3-30B-A3B-Base DATA=/path/to/data    the rest: tools/launch.sh
#
# Further arguments go to pdm-rl train, for example --set train.learning_rate=2e-6.

#SBATCH --job-name=qwen3_30b_fp8_rollout
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:TERM@900

set -euo pipefail

readonly recipe=examples/rl/qwen3_30b_fp8_rollout
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
# Slurm runs a copy of this file, and knows where the original is.
if [[ -n ${SLURM_JOB_ID:-} && ! -f $root/tools/launch.sh ]]; then
    root=$(scontrol show job "$SLURM_JOB_ID" | sed -n "s|^ *Command=\(.*\)/$recipe\.sh.*|\1|p")
    [[ -f $root/tools/launch.sh ]] || root=${SLURM_SUBMIT_DIR:-}
fi
if [[ ! -f $root/tools/launch.sh ]]; then
    printf 'error: no tools/launch.sh found: call sbatch in the repository, or with %s.sh\n' "$recipe" >&2
    exit 2
fi
exec bash "$root/tools/launch.sh" "$root/$recipe.yaml" "$@"
