#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A tiny Qwen3-MoE in Megatron's own loop, on two CPU cores: pretrain() on two ranks (tensor and
# expert parallel), a vLLM engine, the predictive divergence mask, a checkpoint. About a minute.
#
#   bash examples/rl/megatron_args_tiny.sh                        # 8 iterations
#   bash examples/rl/megatron_args_tiny.sh --train-iters 40 --pdm-direction exact
#   bash examples/rl/megatron_args_tiny.sh --dry-run              # prints the command
#
#   MODEL=FOLDER             another starting policy than runs/tiny-model, which is made
#   SAVE=runs/tiny-megatron  Megatron's checkpoint, and its TensorBoard

set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
model_folder=${MODEL:-$root/runs/tiny-model} save=${SAVE:-$root/runs/tiny-megatron}
python=${PYTHON:-$root/.venv/bin/python}

dry_run=false further=()
for argument in "$@"; do
    if [[ $argument == --dry-run ]]; then dry_run=true; else further+=("$argument"); fi
done
if ! $dry_run; then
    [[ -n ${PYTHON:-} ]] || bash "$root/tools/bootstrap.sh"
    [[ -n ${MODEL:-} ]] || "$python" "$root/tools/make_tiny_model.py" --out "$model_folder"
fi

model=(
    --num-layers 2 --hidden-size 128 --ffn-hidden-size 128
    --num-attention-heads 4 --group-query-attention --num-query-groups 2 --kv-channels 32
    --qk-layernorm --normalization RMSNorm --norm-epsilon 1e-6
    --position-embedding-type rope --rotary-base 100
    --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
    --max-position-embeddings 512 --seq-length 80
    --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-router-dtype fp32
    --moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall
)
parallel=(
    --tensor-model-parallel-size 2 --sequence-parallel
    --expert-model-parallel-size 2 --expert-tensor-parallel-size 1
    --use-distributed-optimizer
)
# 32 x 8 sequences a rollout batch, 64 an optimizer step: 4 iterations on each batch.
training=(
    --perform-rl-step
    --grpo-prompts-per-step 32 --grpo-group-size 8 --grpo-iterations 1
    --global-batch-size 64 --micro-batch-size 32 --train-iters 8
    --lr 4e-4 --lr-decay-style constant --weight-decay 0 --clip-grad 1.0
    --save "$save" --save-interval 4 --tensorboard-dir "$save/tensorboard"
    --eval-iters 1 --eval-interval 4 --rl-prompts-per-eval 64 --log-interval 1
)
rollouts=(
    --pdm-model-path "$model_folder"
    --pdm-task-name reasoning_gym/spell_backward --pdm-task-exact true
    --pdm-task-params '{min_word_len: 3, max_word_len: 5}'
    --pdm-rollout-max-prompt-tokens 64 --pdm-rollout-max-response-tokens 16
    --pdm-rollout-threads 1
    --pdm-run-folder "$root/runs" --pdm-run-name tiny-megatron
)
loss=(
    --pdm-mask divergence --pdm-divergence topk_kl --pdm-direction uniform --pdm-threshold 0.05
)

command=(
    "$python" -m torch.distributed.run --standalone --nproc-per-node 2
    "$root/examples/rl/train_rl.py" --pdm-device cpu
    "${model[@]}" "${parallel[@]}" "${training[@]}" "${rollouts[@]}" "${loss[@]}" "${further[@]}"
)

export OMP_NUM_THREADS=1 PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
if $dry_run; then
    printf 'OMP_NUM_THREADS=1 PYTHONPATH=%q ' "$PYTHONPATH"
    printf '%q ' "${command[@]}"
    printf '\n'
    exit 0
fi
exec "${command[@]}"
