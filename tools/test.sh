#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs what is missing, then runs the tests that take seconds.
#
#   tools/test.sh                        the fast tier
#   tools/test.sh --all                  the slow tests as well
#   tools/test.sh tests/unit -k kl -x    anything else goes to pytest; paths are from the repository root
#
# GPU tests are skipped, with the reason, where there is no GPU.

set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd -- "$root"

bash tools/bootstrap.sh

export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 GLOO_SOCKET_IFNAME=lo
exec .venv/bin/python -m pytest "$@"
