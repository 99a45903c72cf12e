#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Kills a tiny run at random moments, continues it each time, and compares it with one that was
# left alone. See tools/chaos.py for what is compared; --help for the settings.
#
#   tools/chaos.sh                                     200 kills, some minutes
#   tools/chaos.sh --kills 12 --engine vllm --ranks 2  with a real engine, weight updates and all
#
# Exit code 1 where anything was lost or different.

set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1
python=${PYTHON:-$root/.venv/bin/python}

exec "$python" -W ignore "$root/tools/chaos.py" "$@"
