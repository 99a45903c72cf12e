#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A tiny Qwen3-MoE learns by reinforcement learning, on two CPU cores, in minutes.
#
#   bash examples/rl/quickstart.sh
#   bash examples/rl/quickstart.sh --set loss.direction=exact     # any setting of the config
#
# Installs what is missing, makes the starting policy once (runs/tiny-model), then trains.

set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
cd -- "$root"

bash tools/bootstrap.sh
.venv/bin/python tools/make_tiny_model.py --out runs/tiny-model
exec .venv/bin/pdm-rl train examples/rl/quickstart.yaml "$@"
