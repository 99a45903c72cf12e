# SPDX-License-Identifier: Apache-2.0
"""Megatron's command line becomes the config that the same settings in a file would make."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from megatron.core.num_microbatches_calculator import (
    destroy_num_microbatches_calculator,
    get_num_microbatches,
)
from megatron.training import global_vars

from megatron.rl import cpu_training, megatron_arguments
from megatron.rl.config import Config, parse_config
from megatron.rl.errors import UserError
from megatron.rl.megatron_pretrain import plan_by_count

MODEL = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --max-position-embeddings 512 "
    "--seq-length 128 --transformer-impl local"
)
RUN = (
    "--perform-rl-step --micro-batch-size 2 --global-batch-size 8 --train-iters 5 --lr 1e-3 "
    "--grpo-prompts-per-step 4 --grpo-group-size 4 --grpo-iterations 1 "
    "--pdm-model-path MODEL --pdm-task-name reasoning_gym/spell_backward"
)
Read = Callable[[str], Config]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[Read]:
    """The config that a command line comes to, on one rank."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")

    def config_of(arguments: str, base: str = f"{MODEL} {RUN}") -> Config:
        monkeypatch.setattr("sys.argv", ["train_rl.py", *base.split(), *arguments.split()])
        _forget()
        args = megatron_arguments.parse_arguments()
        return megatron_arguments.config_from_arguments(args)

    yield config_of
    _forget()


def _forget() -> None:
    global_vars.unset_global_variables()
    destroy_num_microbatches_calculator()


def file_config(**sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "run": {"seed": 1234, "export": False},  # 1234: Megatron's default
        "model": {"path": "MODEL", "dtype": "float32"},
        "task": {"name": "reasoning_gym/spell_backward"},
        "parallel": {"sequence": False},
        "rollout": {"prompts": 4, "group_size": 4},
        "train": {
            "rollouts": 3,  # five steps of two each
            "minibatch_prompts": 2,
            "micro_batch_tokens": 256,
            "learning_rate": 1e-3,
        },
        "eval": {"prompts": 32},
    }
    for name, settings in sections.items():
        tree[name] = tree.get(name, {}) | settings
    return parse_config(tree)


def settings_of(schema: Any, prefix: str = "") -> set[str]:
    names = set()
    for field in dataclasses.fields(schema):
        default = field.default_factory() if callable(field.default_factory) else field.default
        inner = dataclasses.is_dataclass(default)
        names |= settings_of(default, f"{field.name}.") if inner else {prefix + field.name}
    return names


def test_what_was_not_typed_is_the_file_s_default(read: Read) -> None:
    assert read("") == file_config()


def test_every_setting_has_one_flag() -> None:
    own = {flag.setting for flag in megatron_arguments.flags()}
    theirs = set(megatron_arguments.FROM_MEGATRON)
    assert not own & theirs
    known = {
        name for name in settings_of(Config()) if name.split(".")[0] not in ("parallel", "megatron")
    }
    nested = {name for name in own if name.startswith("loss.sequence_mask.")}
    assert own - nested | theirs | {"loss.sequence_mask"} == known


def test_flags_reach_their_settings(read: Read) -> None:
    config = read(
        "--pdm-mask divergence --pdm-divergence topk_tv --pdm-direction exact --pdm-threshold 0.3 "
        "--pdm-top-k 7 --pdm-entropy-coefficient 0.01 --pdm-task-params {'max_word_len':5} "
        "--pdm-bridge-quantization block_fp8 --pdm-records-write true --pdm-eval-top-p 0.9 "
        "--rl-default-temperature 0.8 --seed 7"
    )
    assert config == file_config(
        run={"seed": 7},
        task={"params": {"max_word_len": 5}},
        rollout={"top_logprobs": 7, "temperature": 0.8},
        bridge={"quantization": "block_fp8"},
        records={"write": True},
        eval={"top_p": 0.9},
        loss={
            "divergence": "topk_tv",
            "direction": "exact",
            "threshold": 0.3,
            "entropy_coefficient": 0.01,
        },
    )


def test_a_section_within_the_loss(read: Read) -> None:
    flags = "--pdm-sequence-mask-criterion ser --pdm-sequence-mask-ratio-threshold 0.2"
    mask = read(flags).loss.sequence_mask
    assert mask is not None
    assert (mask.criterion, mask.ratio_threshold, mask.max_threshold) == ("ser", 0.2, None)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (
            "--pdm-mask none --pdm-direction exact",
            "--pdm-direction has no effect with --pdm-mask n",
        ),
        ("--pdm-mask ratio_clip --pdm-threshold 0.1", "--pdm-threshold has no effect"),
        ("--pdm-clip-low 0.1", "--pdm-clip-low has no effect with --pdm-mask divergence"),
        ("--pdm-kl-estimator k2", "--pdm-kl-estimator has no effect with --pdm-kl-coefficient 0"),
        ("--pdm-kl-coefficient 0.1", "loss.kl_coefficient: expected 0"),
        ("--pdm-rollout-refill-rounds 2", "--pdm-rollout-refill-policy is smaller, expected keep"),
        ("--pdm-threshold high", "loss.threshold"),
        ("--grpo-clamp-eps-lower 0.01", "--grpo-clamp-eps-lower has no effect.*--pdm-clip-low"),
        ("--grpo-clamp-eps-upper 0.2", "--grpo-clamp-eps-upper has no effect.*--pdm-clip-high"),
        ("--grpo-kl-beta 0", "--grpo-kl-beta has no effect"),
        ("--rl-use-sequence-packing", "--rl-use-sequence-packing has no effect"),
        ("--rl-partial-rollouts", "--rl-partial-rollouts has no effect"),
        ("--no-rl-partial-rollouts", "--rl-partial-rollouts has no effect"),
        ("--rl-inference-logprobs-is-correction", "is-correction has no effect"),
        ("--rl-inference-tensor-model-parallel-size 1", "vLLM engine"),
        ("--langrl-env-config x.yaml", "--pdm-task-name"),
        ("--skip-train", "--skip-train has no effect"),
        ("--ckpt-step 4", "--ckpt-step does not go with .*latest_checkpointed_iteration.txt"),
        ("--distributed-backend nccl", "--distributed-backend is nccl, expected cpu:gloo,cuda:nc"),
        ("--eval-iters 1 --eval-interval 3", "--eval-interval is 3, expected a multiple of 2"),
        ("--rl-default-top-p 0.9", "rollout.top_p is 0.9"),
        ("--global-batch-size 6", "--global-batch-size is 6, expected a multiple"),
        ("--grpo-prompts-per-step 5 --grpo-iterations 2", "does not divide a rollout batch"),
    ],
)
def test_contradictions_are_refused(read: Read, typed: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(typed)


def test_fp8_is_megatrons_own(read: Read) -> None:
    ends = "--num-layers-at-start-in-bf16 1 --num-layers-at-end-in-bf16 2"
    fp8 = "--bf16 --fp8-recipe blockwise"
    assert read(f"{fp8} {ends}").model.fp8 == "none", "Megatron has it on by the format"
    model = read(f"{fp8} {ends} --fp8-format hybrid").model
    assert (model.fp8, model.fp8_format, model.fp8_params) == ("blockwise", "hybrid", False)
    assert (model.fp8_skip_first, model.fp8_skip_last) == (0, 0)
    model = read(f"{fp8} {ends} --fp8-format e4m3 --first-last-layers-bf16").model
    assert (model.fp8_skip_first, model.fp8_skip_last) == (1, 2)


CPU_REFUSALS = [
    ("--moe-grouped-gemm", "--moe-grouped-gemm is True.*arguments.py:1339"),
    ("--transformer-impl transformer_engine", "--transformer-impl is 'transformer_engine'"),
    ("--bf16 --fp8-format e4m3", "--fp8-format is 'e4m3'.*fp8_utils.py:42"),
    ("--cuda-graph-impl local", "--cuda-graph-impl is 'local'"),
    ("--log-memory-to-tensorboard", "training.py:2744"),
    ("--log-straggler", "utils.py:1600"),
    ("--log-energy", "energy_monitor.py:40"),
    ("--gpu-sniff-test-interval 1", "gpu_sniff_test.py:59"),
    ("--record-memory-history", "training.py:2818"),
    ("--bf16 --fp4-format e2m1", "--fp4-format is 'e2m1'.*fp4_utils.py:31"),
    ("--optimizer-cuda-graph", "optimizer_cuda_graph.py:35"),
    ("--log-device-memory-used", "common_utils.py:327"),
    ("--use-torch-fsdp2", "torch_fully_sharded_data_parallel.py:81"),
    ("--use-megatron-fsdp", "mcore_fsdp_adapter.py:156"),
    ("--optimizer-cpu-offload", "hybrid_optimizer.py:120"),
    ("--profile", "--profile starts the CUDA profiler .training.py:3735"),
]


@pytest.mark.parametrize(("typed", "message"), CPU_REFUSALS)
def test_cuda_only_features_are_refused_on_cpu(
    read: Read, monkeypatch: pytest.MonkeyPatch, typed: str, message: str
) -> None:
    monkeypatch.setattr("sys.argv", ["train_rl.py", *f"{MODEL} {RUN} {typed}".split()])
    with pytest.raises(UserError, match=message):
        megatron_arguments.parse_arguments(cpu_training.set_defaults, cpu_training.refuse_cuda_only)


def test_every_cuda_only_feature_is_tried() -> None:
    tried = {option for typed, _ in CPU_REFUSALS for option in typed.split()}
    assert {cpu_training.flag_of(name) for name in cpu_training.CUDA_ONLY} <= tried


def test_a_cpu_run_has_what_it_needs(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train_rl.py", *f"{MODEL} {RUN}".split()])
    _forget()
    args = megatron_arguments.parse_arguments(
        cpu_training.set_defaults, cpu_training.refuse_cuda_only
    )
    assert (args.distributed_backend, args.use_cpu_initialization) == ("gloo", True)
    assert not args.gradient_accumulation_fusion
    assert cpu_training.CUDA_ONLY.keys() <= vars(args).keys()


def test_no_rl_step_is_refused(read: Read) -> None:
    with pytest.raises(UserError, match="--perform-rl-step is missing"):
        read("", f"{MODEL} {RUN.replace('--perform-rl-step', '')}")


def test_megatron_s_own_code_reads_its_defaults(read: Read) -> None:
    read("")
    args = global_vars.get_args()
    assert (args.rl_use_sequence_packing, args.rl_submission_granularity) == (False, "B")
    assert (args.grpo_kl_beta, args.skip_train, args.refit_method) == (0.001, False, "gloo")
    assert args.calculate_per_token_loss
    assert get_num_microbatches() == 4


def test_help_names_setting_and_default(read: Read, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read("--help")
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "loss.threshold of the config file, default 0.15." in shown


def test_plan_by_count_fills_every_rank_alike() -> None:
    lengths = np.array([9, 1, 5, 7, 3, 2, 8, 4, 6, 30, 0])
    members = np.array([0, 1, 2, 3, 4, 5, 6, 7])
    plan = plan_by_count(lengths, members, data_parallel=2, count=2, size=2)
    assert [[len(batch) for batch in rank] for rank in plan] == [[2, 2], [2, 2]]
    flat = [batch for rank in plan for batch in rank]
    assert sorted(np.concatenate(flat)) == members.tolist()
    # By hand: 9, 8, 7, 5 open the four; then 4, 3, 2, 1 each to the lightest with room.
    assert [int(lengths[batch].sum()) for batch in flat] == [10, 10, 10, 9]
    short = plan_by_count(lengths, members[:3], data_parallel=2, count=2, size=2)
    assert [[len(batch) for batch in rank] for rank in short] == [[1, 1], [1, 0]]
    with pytest.raises(ValueError, match="8 sequences do not fit into 1 x 3 micro-batches"):
        plan_by_count(lengths, members, data_parallel=1, count=3, size=2)
