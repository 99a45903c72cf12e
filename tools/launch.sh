#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Starts one recipe: on this machine, on the nodes of a cluster by torchrun, or as a Slurm job. The
# scripts of examples/rl/ name their recipe and call this file.
#
#   tools/launch.sh examples/rl/NAME.yaml [ARGUMENTS OF pdm-rl train...]
#
#   --dry-run            print config, layout, plan, commands and environment; start nothing
#   MODEL=FOLDER         the starting policy (model.path)
#   DATA=FOLDER          has dapo-math-17k/ (pdm-rl data prepare) and the files of the benchmarks
#   RUN=FOLDER           the run's folder, on a disk that all nodes share; the run in it is continued
#   CLUSTER=h20_96gb     examples/rl/cluster/NAME.yaml, merged over the recipe
#   MASK=dppo_topk_kl    examples/rl/masks/NAME.yaml, likewise
#   CONFIG=FILE          a config of your own instead of the recipe
#   SCALE=tiny           the recipe's twin for two CPU cores, NAME_tiny.yaml
#   PLAN=off             start although `pdm-rl plan` says that it does not fit
#
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=node0 MASTER_PORT=29500    start this on every node; IPv6 too
#   GPUS_PER_NODE=8      ranks a node
#   PYTHON=FILE          an environment of your own; without it tools/bootstrap.sh makes one
#
# Under Slurm (`sbatch examples/rl/NAME.sh`) tools/slurm_job.sh does this on every node.
#
# Paths in variables, and of --with, are relative to the folder in which the command is typed; those
# inside configs and of --set, to the repository. SIGTERM has the run saved; send it again to kill.

set -euo pipefail

readonly USAGE=2
called_from=$PWD
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
readonly called_from root
cd -- "$root"

fail() {
    printf 'error: %s\n' "$*" >&2
    exit $USAGE
}

note() { printf '# %s\n' "$*"; }

# A path as the user meant it: from the folder in which the command was typed.
absolute() {
    case $1 in
        /*) printf '%s' "$1" ;;
        *) printf '%s/%s' "$called_from" "$1" ;;
    esac
}

# KEY=VALUE for --set, whose value is YAML: a path may hold '#', ': ' or quotes.
path_setting() { printf "%s='%s'" "$1" "${2//\'/\'\'}"; }

overlay() { # overlay FOLDER NAME: a file of examples/rl/FOLDER
    local folder=$root/examples/rl/$1 there
    [[ -f $folder/$2.yaml ]] && printf '%s' "$folder/$2.yaml" && return
    there=$(cd -- "$folder" && printf '%s ' *.yaml)
    fail "no $1 $2; there are: ${there//.yaml/}"
}

# ---- what to run ------------------------------------------------------------------------------

(($# > 0)) || fail "expected a recipe: tools/launch.sh examples/rl/NAME.yaml"
arguments=("$@")
recipe=$(absolute "$1")
shift

case ${SCALE:-full} in
    full) ;;
    tiny)
        for name in CLUSTER DATA; do
            [[ -z ${!name:-} ]] || fail "$name has no effect with SCALE=tiny; unset it"
        done
        tiny=${recipe%.yaml}_tiny.yaml
        if [[ -z ${CONFIG:-} && ! -f $tiny ]]; then
            there=$(cd -- "$root/examples/rl" && printf '%s ' *_tiny.yaml)
            fail "${recipe##*/} has no tiny twin; there are: ${there//.yaml/}"
        fi
        recipe=$tiny
        ;;
    *) fail "SCALE is $SCALE; it may be full or tiny" ;;
esac
[[ -z ${CONFIG:-} ]] || recipe=$(absolute "$CONFIG")
[[ -f $recipe ]] || fail "no such config: $recipe"

config=("$recipe") train=() dry_run=false
if [[ -n ${CLUSTER:-} ]]; then
    file=$(overlay cluster "$CLUSTER")
    config+=(--with "$file")
fi
if [[ -n ${MASK:-} ]]; then
    file=$(overlay masks "$MASK")
    config+=(--with "$file")
fi
[[ -z ${MODEL:-} ]] || config+=(--set "$(path_setting model.path "$(absolute "$MODEL")")")
if [[ -n ${DATA:-} ]]; then
    data=$(absolute "$DATA")
    config+=(
        --set "$(path_setting task.params.train "$data/dapo-math-17k")"
        --set "$(path_setting task.params.heldout "$data/aime25.jsonl")"
        --set "$(path_setting eval.data "$data")"
    )
fi
[[ -z ${RUN:-} ]] || train=(--run-folder "$(absolute "$RUN")")
while (($# > 0)); do
    case $1 in
        --dry-run) dry_run=true ;;
        --with)
            (($# > 1)) || fail "--with: expected a file"
            config+=(--with "$(absolute "$2")")
            shift
            ;;
        --with=*) config+=(--with "$(absolute "${1#--with=}")") ;;
        --set)
            (($# > 1)) || fail "--set: expected KEY=VALUE"
            config+=(--set "$2")
            shift
            ;;
        --set=*) config+=("$1") ;;
        *) train+=("$1") ;; # what the other commands do not know
    esac
    shift
done

# ---- a Slurm job: this file once more, on each of its nodes -----------------------------------

# In a job's own shell, that is: not in a step of it, and not where the nodes are given.
if [[ -n ${SLURM_JOB_ID:-} && -z ${SLURM_STEP_ID:-} && -z ${NNODES:-} ]] && ! $dry_run; then
    export PDM_RL_CALLED_FROM=$called_from
    [[ -n ${RUN:-} ]] || RUN=$root/runs/$(basename -- "$recipe" .yaml)-slurm-$SLURM_JOB_ID
    RUN=$(absolute "$RUN") exec bash tools/slurm_job.sh "${arguments[@]}"
fi

# ---- an environment ---------------------------------------------------------------------------

python=${PYTHON:-$root/.venv/bin/python}
case $python in */*) python=$(absolute "$python") ;; esac
if [[ -z ${PYTHON:-} ]] && ! $dry_run; then
    bash tools/bootstrap.sh
fi
if ! command -v -- "$python" >/dev/null; then
    [[ -z ${PYTHON:-} ]] || fail "PYTHON is $PYTHON: no such program"
    note "no environment yet (bash tools/bootstrap.sh makes one), so that the config is not resolved;"
    note "then, here or on each node:"
    printf '%q ' "$python" -m megatron.rl.cli train "${config[@]}" "${train[@]}"
    printf '\n'
    exit 0
fi
# This checkout, also where the environment has another one or none.
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
if [[ -z ${PDM_RL_ROLLOUT_PYTHON:-} && -x $root/.venv-rollout/bin/python ]]; then
    export PDM_RL_ROLLOUT_PYTHON=$root/.venv-rollout/bin/python
fi
pdm_rl=("$python" -m megatron.rl.cli)

# ---- where to run it --------------------------------------------------------------------------

shown=$("${pdm_rl[@]}" show "${config[@]}" run.device parallel.world_size model.path) || exit $USAGE
{ read -r device && read -r ranks && IFS= read -r model; } <<<"$shown"

gpus=${GPUS_PER_NODE:-8} node=${NODE_RANK:-0} address=${MASTER_ADDR:-} port=${MASTER_PORT:-29500}
nodes=${NNODES:-$(((ranks + gpus - 1) / gpus))}
# torchrun asks for brackets around an IPv6 address; with or without them it is the same one.
address=${address#[} address=${address%]}
[[ $address != *:* ]] || address="[$address]"

# The command of one node: node_command NODE_RANK, left in the array `command`.
node_command() {
    command=(
        "$python" -m torch.distributed.run
        --nnodes "$nodes" --nproc-per-node "$gpus" --node-rank "$1"
        --master-addr "${address:-localhost}" --master-port "$port"
        -m megatron.rl.cli train "${config[@]}" "${train[@]}"
    )
}

if [[ $device == cpu ]]; then
    nodes=1 environment=()
    [[ ${NNODES:-1} == 1 ]] || fail "NNODES is $NNODES, but a run on cpu has one node"
    node_command() { command=("${pdm_rl[@]}" train "${config[@]}" "${train[@]}"); }
else
    # Megatron relies on it for the order of tensor parallelism's communication and products.
    environment=(CUDA_DEVICE_MAX_CONNECTIONS=1)
    ((nodes * gpus == ranks)) || fail "the config has $ranks ranks, $nodes nodes of $gpus GPUs have" \
        "$((nodes * gpus)): set NNODES and GPUS_PER_NODE, or --set parallel.data"
fi

# The card, for the plan: what is here, or what CLUSTER names.
card=(--gpus "$ranks" --gpus-per-node "$gpus")
if memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null) &&
    [[ ${memory%%$'\n'*} =~ ^[0-9]+$ ]]; then
    card+=(--gpu-memory "$((${memory%%$'\n'*} / 1024))")
elif [[ ${CLUSTER:-} == *_* ]]; then
    card+=(--gpu "${CLUSTER%%_*}")
fi

# ---- say what would be run --------------------------------------------------------------------

if $dry_run; then
    LOCAL_WORLD_SIZE=$((ranks / nodes)) \
        "${pdm_rl[@]}" train "${config[@]}" "${train[@]}" --dry-run
    if [[ ! -f $model/config.json ]]; then
        note "no plan: $model has no config.json here; name a model folder by MODEL=FOLDER"
    else
        "${pdm_rl[@]}" plan "${config[@]}" "${card[@]}" || (($? == 1)) || exit $USAGE
    fi
    for ((node = 0; node < nodes; node++)); do
        node_command "$node"
        ((nodes == 1)) || note "node $node of $nodes, in the folder $root:"
        for variable in "${environment[@]}" "PYTHONPATH=$PYTHONPATH" \
            ${PDM_RL_ROLLOUT_PYTHON:+"PDM_RL_ROLLOUT_PYTHON=$PDM_RL_ROLLOUT_PYTHON"}; do
            printf '%s=%q ' "${variable%%=*}" "${variable#*=}"
        done
        printf '%q ' "${command[@]}"
        printf '\n'
    done
    ((nodes == 1)) || [[ -n $address ]] ||
        note "localhost stands for MASTER_ADDR, the first node's name; under Slurm it is found"
    exit 0
fi

# ---- run it -----------------------------------------------------------------------------------

if ((nodes > 1)); then
    [[ -n $address ]] || fail "expected MASTER_ADDR, the name or address of the first of $nodes nodes"
    [[ -n ${NODE_RANK:-} ]] || fail "expected NODE_RANK, 0 to $((nodes - 1)), on each of $nodes nodes"
fi
((node >= 0 && node < nodes)) || fail "NODE_RANK is $node; expected 0 to $((nodes - 1))"

if [[ $model == runs/tiny-model && -z ${MODEL:-} ]]; then
    "$python" tools/make_tiny_model.py --out "$model"
fi
if ((node == 0)); then
    # On a cluster the log records what was there; at a terminal only what is wrong matters.
    shown=()
    [[ $device != cpu ]] || shown=(--errors-only)
    printf 'checking this machine\n'
    "${pdm_rl[@]}" doctor "${config[@]}" "${shown[@]}"
    if [[ $device != cpu && ${PLAN:-on} != off ]]; then
        "${pdm_rl[@]}" plan "${config[@]}" "${card[@]}" || {
            (($? == 1)) || exit $USAGE
            fail "the plan does not fit; PLAN=off starts all the same"
        }
    fi
fi
node_command "$node"
if [[ $device == cpu && -z ${PDM_RL_STOP_FILE:-} ]]; then
    exec "${command[@]}"
fi
[[ $device == cpu ]] && signalled=process || signalled=children
exec env "${environment[@]}" bash tools/supervise.sh "$signalled" "${command[@]}"
