#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# What a Slurm job's own shell does, called by tools/launch.sh with its arguments: one task on every
# node, each of which is tools/launch.sh again; a stop in time; and the job back in the queue.
#
#   RUN=FOLDER           the run's folder; by default runs/NAME-slurm-JOB, so that a requeued job
#                        finds its run again
#   SRUN_OPTIONS="..."   further words for srun, for example --container-image=...
#   MAX_REQUEUES=100     a job that is stopped again and again ends at last
#
# Slurm's --signal=B:TERM@SECONDS wakes this shell ahead of the time limit (and ahead of preemption,
# where the site has PreemptParameters=send_user_signal). A signal sent through srun or scancel would
# reach every process of a node, the rollout engines too, and srun answers SIGTERM with SIGKILL for
# its tasks. So the wish to stop travels as a file on the shared disk.

set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
say() { printf 'slurm job %s: %s\n' "$SLURM_JOB_ID" "$*"; }

if [[ -z ${PYTHON:-} && -z ${SRUN_OPTIONS:-} ]]; then
    bash "$root/tools/bootstrap.sh" # once, before all nodes want it
fi

export RUN
export NNODES=${SLURM_JOB_NUM_NODES:-1}
export GPUS_PER_NODE=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}
export MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "${SLURM_JOB_NODELIST:-localhost}" | head -n 1)}
# Two jobs that share a node differ in their numbers.
export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}
export PDM_RL_STOP_FILE=$RUN.stop
mkdir -p -- "$(dirname -- "$RUN")"
rm -f -- "$PDM_RL_STOP_FILE"

stopped=false
stop() {
    say "asked to stop; the run saves itself"
    stopped=true
    : >"$PDM_RL_STOP_FILE"
}
trap stop TERM

# All cores for the one task of a node; one that fails ends the others, one that is done does not.
read -r -a srun_options <<<"${SRUN_OPTIONS:-}"
cd -- "$PDM_RL_CALLED_FROM"
say "$NNODES nodes x $GPUS_PER_NODE GPUs, first node $MASTER_ADDR, run folder $RUN"
# shellcheck disable=SC2016 # for the shell of the task
srun --nodes "$NNODES" --ntasks "$NNODES" --ntasks-per-node 1 --cpu-bind none \
    --kill-on-bad-exit=1 --wait 0 "${srun_options[@]}" \
    bash -c 'NODE_RANK=$SLURM_NODEID exec bash "$@"' task "$root/tools/launch.sh" "$@" &
tasks=$!

code=0
wait "$tasks" || code=$?
while kill -0 "$tasks" 2>/dev/null; do # the signal ended the wait, not the tasks
    code=0
    wait "$tasks" || code=$?
done
# The status once more, should both have come at the same time.
$stopped && { code=0 && wait "$tasks" || code=$?; }
rm -f -- "$PDM_RL_STOP_FILE"

if ! $stopped || ((code != 0)); then
    exit "$code"
fi
if [[ -f $RUN/result.json ]]; then
    say "finished meanwhile"
    exit 0
fi
restarts=${SLURM_RESTART_COUNT:-0}
if ((restarts >= ${MAX_REQUEUES:-100})); then
    say "stopped after $restarts restarts (MAX_REQUEUES); not requeued"
    exit 1
fi
say "saved; back into the queue"
scontrol requeue "$SLURM_JOB_ID"
