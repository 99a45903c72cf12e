#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A real checkpoint in a few real RL steps, on two CPU cores: SmolLM2-135M-Instruct on word problems
# in GSM8K's layout, through Megatron-Core and vLLM, with the predictive mask. Slow, and honest: it
# ends with what was measured, from the log-probs before the first update to the peak memory.
#
#   bash examples/rl/smollm2_gsm8k.sh
#   bash examples/rl/smollm2_gsm8k.sh --set train.rollouts=1      # any setting of the config
#   bash examples/rl/smollm2_gsm8k.sh --dry-run                   # says what it would do
#
#   GSM8K=FILE       problems of GSM8K itself (too difficult for this model: it had 0 of 80 right)
#   MODEL=FOLDER     another starting policy than runs/smollm2, which is made once
#   RUN=FOLDER       the run's folder
#   PYTHON=FILE      an environment of your own; without it tools/bootstrap.sh makes one

set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
problems=$root/runs/smollm2-problems
recipe=$root/examples/rl/smollm2_gsm8k.yaml
dry_run=false
for argument in "$@"; do
    [[ $argument != --dry-run ]] || dry_run=true
done

kind=words
[[ -z ${GSM8K:-} ]] || kind=gsm8k
further=(--set "task.params.train=$problems/$kind/train.parquet" "$@")

if $dry_run; then
    exec bash "$root/tools/launch.sh" "$recipe" "${further[@]}"
fi

export RUN=${RUN:-$root/runs/smollm2-gsm8k-$(date +%Y%m%d-%H%M%S)}
python=${PYTHON:-$root/.venv/bin/python}
[[ -n ${PYTHON:-} ]] || bash "$root/tools/bootstrap.sh"
[[ -n ${MODEL:-} ]] || "$python" "$root/tools/make_smollm2.py" --out "$root/runs/smollm2"

source=${GSM8K:-$problems/words.jsonl}
if [[ $kind == words ]]; then
    "$python" "$root/tools/make_word_problems.py" --out "$source" --count 400 --steps 1 --largest 12
fi
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} "$python" -m megatron.rl.cli data prepare "$source" \
    --out "$problems/$kind" --force

bash "$root/tools/launch.sh" "$recipe" "${further[@]}"
"$python" "$root/tools/report_run.py" "$RUN"
