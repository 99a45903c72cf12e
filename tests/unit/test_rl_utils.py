# SPDX-License-Identifier: Apache-2.0
"""What Megatron's training loop calls, where no run is under way.

What it does in a run is in tests/e2e/test_megatron_training.py; that it has the names, parameters
and return types that Megatron uses, in test_megatron_contract.py.
"""

import argparse
import subprocess
import sys
from typing import Any

import pytest

from megatron.rl import rl_profiling, rl_utils
from megatron.rl.errors import UserError

ARGUMENTS: dict[str, Any] = {
    "grpo_iterations": 1,
    "grpo_prompts_per_step": 4,
    "grpo_group_size": 4,
    "global_batch_size": 8,
    "sequence_packing": False,
    "buffered_rollouts": None,
    "is_correction": False,
    "optimizer_is_on_cpu": False,
}


@pytest.mark.parametrize("name", ["rl_utils", "rl_profiling"])
def test_importing_it_brings_nothing_of_megatron_s(name: str) -> None:
    """training.py is half imported then, and would take an ImportError for a missing package."""
    code = (
        f"import sys, megatron.rl.{name}\n"
        "print([n for n in sys.modules if n.startswith(('megatron.core', 'megatron.training'))])\n"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split() == ["[]", "False"], result.stderr


@pytest.mark.parametrize("name", ["sequence_packing", "is_correction", "optimizer_is_on_cpu"])
def test_rollouts_of_another_kind_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} is True, expected None or False"):
        rl_utils.get_grpo_data_iterator([], None, None, 0, {}, **(ARGUMENTS | {name: True}))


def test_a_second_model_to_sample_from_is_refused() -> None:
    with pytest.raises(UserError, match=r"inference_model is .*: rollouts come from the engine"):
        rl_utils.get_grpo_data_iterator([], ["model"], None, 0, {}, **ARGUMENTS)
    with pytest.raises(UserError, match="training_model is "):
        rl_utils.evaluate_and_print_results_rl(
            None, [], None, 0, write_to_tensorboard=True, training_model=["model"]
        )
    with pytest.raises(UserError, match="no second model to sample from, got list"):
        rl_utils._maybe_prefetch_separate_inference_model_weights([], to_cpu=False)


def test_packing_is_not_megatron_s() -> None:
    args = argparse.Namespace(global_batch_size=8)
    assert rl_utils.get_sequence_packing_tensorboard_metrics(args) == {}
    assert rl_utils.get_sequence_packing_log_info(args) == ""
    assert rl_utils.get_iteration_sequence_count(args) == 8


def test_without_a_run_there_is_nothing_to_log_or_to_end() -> None:
    assert rl_utils.log_rl_throughput_metrics(argparse.Namespace(), 8, 1.0, 1, None) == ""
    rl_utils.rl_inference_interface_shutdown()
    rl_utils.rl_inference_interface_shutdown()
    rl_profiling.initialize_rl_profiler(
        output_dir="/nowhere", run_id="1", enabled=False, log_to_wandb=False,
        log_to_tensorboard=False,
    )  # fmt: skip
    rl_profiling.shutdown_rl_profiler()
