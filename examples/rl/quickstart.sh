#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A tiny Qwen3-MoE learns by reinforcement learning, on two CPU cores, in minutes.
#
#   bash examples/rl/quickstart.sh
#   bash examples/rl/quickstart.sh --set loss.direction=exact     # any setting of the config
#   bash examples/rl/quickstart.sh --dry-run                      # says what it would do
#
# Installs what is missing, makes the starting policy once (runs/tiny-model), then trains.

set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
exec bash "$root/tools/launch.sh" "$root/examples/rl/quickstart.yaml" "$@"
