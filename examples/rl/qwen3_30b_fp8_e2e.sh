#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Qwen3-30B-A3B, on 4 nodes of 8 GPUs. FP8 is not built yet: see below.
#
#   bash examples/rl/qwen3_30b_fp8_e2e.sh --dry-run     # print the resolved config and commands
#   SCALE=tiny bash examples/rl/qwen3_30b_fp8_e2e.sh    # the same recipe on two CPU cores
#
#   MODEL=/path/to/Qwen3-30B-A3B-Base    the starting policy
#   NODES=4 GPUS_PER_NODE=8 NODE_RANK=0 MASTER_ADDR=... MASTER_PORT=29500    the cluster
#
# Further arguments go to pdm-rl train, for example --set train.learning_rate=2e-6.

set -euo pipefail

readonly USAGE=2
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
cd -- "$root"

scale=${SCALE:-full}
dry_run=false
for argument in "$@"; do
    [[ $argument != --dry-run ]] || dry_run=true
done

case $scale in
    full) recipe=examples/rl/qwen3_30b_fp8_e2e.yaml ;;
    tiny) recipe=examples/rl/qwen3_30b_fp8_e2e_tiny.yaml ;;
    *)
        printf 'SCALE is %s; it may be full or tiny\n' "$scale" >&2
        exit $USAGE
        ;;
esac

printf 'note: FP8 training and FP8 rollouts are not built yet; this recipe runs in %s\n' \
    "$([[ $scale == tiny ]] && echo float32 || echo BF16)"

overrides=()
[[ -z ${MODEL:-} ]] || overrides=(--set "model.path=$MODEL")

bash tools/bootstrap.sh

if [[ $scale == tiny ]]; then
    $dry_run || .venv/bin/python tools/make_tiny_model.py --out runs/tiny-model
    exec .venv/bin/pdm-rl train "$recipe" "${overrides[@]}" "$@"
fi

nodes=${NODES:-4} gpus=${GPUS_PER_NODE:-8}
launcher=(
    .venv/bin/python -m torch.distributed.run
    --nnodes "$nodes" --nproc-per-node "$gpus" --node-rank "${NODE_RANK:-0}"
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}"
    -m megatron.rl.cli train "$recipe" "${overrides[@]}"
)
if $dry_run; then
    .venv/bin/pdm-rl train "$recipe" "${overrides[@]}" "$@"
    printf '# on each of %s nodes, with its NODE_RANK:\n' "$nodes"
    printf '%q ' "${launcher[@]}"
    printf '\n'
    exit 0
fi
printf '%s\n' "error: the full-scale run is not built yet (FP8, one engine a node, the math data)." \
    "Use --dry-run to see it, or SCALE=tiny to run the recipe here." >&2
exit $USAGE
