#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Qwen3-30B-A3B in Megatron's own loop, on 4 nodes of 8 GPUs: what a Megatron user types. Layout,
# engines, optimizer, loss and precision are those of qwen3_30b_fp8_rollout.yaml (with FP8=e2e those
# of qwen3_30b_fp8_e2e.yaml); the task is one of reasoning-gym's, and benchmarks, doctor, plan and
# Slurm are the recipe's alone. Not run on GPUs yet; --dry-run checks every argument against
# Megatron, this project and the model's config.json, with no GPU at all. Where there is no such
# file it prints the command.
#
#   MODEL=/path/to/Qwen3-30B-A3B-Base bash examples/rl/megatron_args_qwen3_30b.sh --dry-run
#
#   MODEL=/path/to/Qwen3-30B-A3B-Base    the starting policy
#   FP8=e2e    FP8 in training too; needs Transformer Engine, also for the dry run
#   NODES=4 GPUS_PER_NODE=8 NODE_RANK=0 MASTER_ADDR=... MASTER_PORT=29500    the cluster
#   CHECKPOINTS=checkpoints/qwen3-30b    where Megatron saves, and resumes from
#
# Further arguments go to train_rl.py, for example --lr 2e-6 or --pdm-direction exact.

set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)

dry_run=false further=()
for argument in "$@"; do
    if [[ $argument == --dry-run ]]; then dry_run=true; else further+=("$argument"); fi
done

nodes=${NODES:-4} gpus=${GPUS_PER_NODE:-8}
checkpoints=${CHECKPOINTS:-checkpoints/qwen3-30b} model_folder=${MODEL:-Qwen3-30B-A3B-Base}

model=(
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144
    --num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 128
    --qk-layernorm --normalization RMSNorm --norm-epsilon 1e-6
    --position-embedding-type rope --rotary-base "${ROTARY_BASE:-1000000}" --rotary-percent 1.0
    --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
    --max-position-embeddings "${MAX_POSITIONS:-32768}" --seq-length 10240
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-router-dtype fp32
    # A load balancing loss would be a gradient outside the mask.
    --moe-router-load-balancing-type none
    --moe-grouped-gemm --moe-token-dispatcher-type alltoall
    --transformer-impl transformer_engine --attention-backend flash
)
# 4 key-value heads allow TP 4; each rank holds 16 of 128 experts.
parallel=(
    --tensor-model-parallel-size 4 --sequence-parallel
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
case ${FP8:-rollout} in
    rollout) fp8=() ;;
    e2e)
        # Linear layers multiply in blocks of e4m3; the router pads experts' tokens for it.
        fp8=(--fp8-format e4m3 --fp8-recipe blockwise --moe-router-padding-for-quantization)
        # Block scales as --pdm-bridge-scales has them; read when Transformer Engine is imported.
        export NVTE_FP8_BLOCK_SCALING_FP32_SCALES=0
        ;;
    *)
        printf 'error: FP8 is %s; it may be rollout or e2e\n' "$FP8" >&2
        exit 2
        ;;
esac
# 128 x 16 sequences a rollout batch, 256 an optimizer step: 8 iterations on each batch.
training=(
    --perform-rl-step
    --grpo-prompts-per-step 128 --grpo-group-size 16 --grpo-iterations 1
    --global-batch-size 256 --micro-batch-size 2 --train-iters 3200
    --bf16 --lr 1e-6 --lr-warmup-iters 10 --lr-decay-style constant
    --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.98
    --save "$checkpoints" --load "$checkpoints" --save-interval 160
    --eval-iters 1 --eval-interval 160 --rl-prompts-per-eval 256
    --log-interval 1 --tensorboard-dir "$checkpoints/tensorboard"
)
# Engines of 4 GPUs, which they share with the ranks: one sleeps while the other works.
rollouts=(
    --pdm-model-path "$model_folder"
    --pdm-task-name reasoning_gym/gsm_symbolic --pdm-task-exact true
    --pdm-rollout-max-prompt-tokens 2048 --pdm-rollout-max-response-tokens 8192
    --pdm-rollout-engines-per-node 2 --pdm-rollout-sleep true
    --pdm-rollout-engine-args
    '{tensor_parallel_size: 4, enable_expert_parallel: true, gpu_memory_utilization: 0.6}'
    --pdm-rollout-max-num-seqs 256 --pdm-bridge-transport cuda_ipc
    --pdm-bridge-quantization block_fp8 --pdm-bridge-scales power_of_two
)
loss=(
    --pdm-mask divergence --pdm-divergence topk_kl --pdm-direction uniform
    --pdm-threshold 0.15 --pdm-top-k 20
)
command=(
    "$root/examples/rl/train_rl.py" --pdm-device cuda
    "${model[@]}" "${parallel[@]}" "${fp8[@]}" "${training[@]}" "${rollouts[@]}" "${loss[@]}"
    "${further[@]}"
)

export CUDA_DEVICE_MAX_CONNECTIONS=1
# This checkout, also where the environment has another one or none.
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-$root/.venv/bin/python}
launcher=(
    "$python" -m torch.distributed.run
    --nnodes "$nodes" --nproc-per-node "$gpus" --node-rank "${NODE_RANK:-0}"
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}"
)
if $dry_run; then
    printf '# on each of %s nodes, with its NODE_RANK:\n' "$nodes"
    printf '%q ' "${launcher[@]}" "${command[@]}"
    printf '\n'
    if [[ ! -f $model_folder/config.json ]] || ! command -v -- "$python" >/dev/null; then
        printf '# arguments not checked: that takes MODEL=FOLDER with a config.json, and %s\n' "$python"
        exit 0
    fi
    RANK=0 LOCAL_RANK=0 WORLD_SIZE=$((nodes * gpus)) LOCAL_WORLD_SIZE=$gpus \
        exec "$python" "${command[@]}" --pdm-dry-run
fi
exec "${launcher[@]}" "${command[@]}"
