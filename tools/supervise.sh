#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs a command and passes on the wish to stop: SIGTERM, or a file that appears.
#
#   tools/supervise.sh children COMMAND...    SIGTERM for the processes that COMMAND started
#   tools/supervise.sh process COMMAND...     SIGTERM for COMMAND itself
#
#   PDM_RL_STOP_FILE=FILE    its appearance counts as SIGTERM
#
# `children` is for torchrun. Given SIGTERM itself, it kills its ranks 30 s later, which may be in
# the middle of a rollout batch, and fails. Ranks that get the signal without it save, end with 0,
# and torchrun ends with 0 after them. A second SIGTERM goes to the command.

set -euo pipefail

readonly POLL_S=2
signalled=$1
shift

# A group of its own: Ctrl-C reaches the command through here, once.
set -m
"$@" &
child=$!
set +m

times=0
stop() {
    local target targets=("$child")
    times=$((times + 1))
    if [[ $signalled == children ]] && ((times == 1)); then
        # One file a thread: who was started by which.
        read -r -d '' -a targets < <(cat "/proc/$child/task/"*/children 2>/dev/null) || true
    fi
    for target in "${targets[@]}"; do
        kill -TERM "$target" 2>/dev/null || true
    done
}
trap stop TERM
trap 'kill -INT "-$child" 2>/dev/null || true' INT
trap 'kill -KILL "-$child" 2>/dev/null || true' EXIT

while kill -0 "$child" 2>/dev/null; do
    if ((times == 0)) && [[ -n ${PDM_RL_STOP_FILE:-} && -e $PDM_RL_STOP_FILE ]]; then
        stop
    fi
    sleep "$POLL_S" &
    pause=$!
    wait -n "$child" "$pause" || true # a signal ends it early
    kill "$pause" 2>/dev/null || true
done
code=0
wait "$child" || code=$?
trap - EXIT
exit "$code"
