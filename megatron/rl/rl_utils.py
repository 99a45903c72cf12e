# SPDX-License-Identifier: Apache-2.0
"""The names that ``megatron.training`` 0.19 imports from ``megatron.rl.rl_utils``.

``megatron/training/training.py`` (lines 195-206) swallows an ImportError of this module, so it must
import whatever else is installed. The stock training loop does not run this loss yet: every call
says so. Train with ``pdm-rl train``.
"""

from typing import Any, NoReturn


def _not_built(name: str) -> NoReturn:
    raise NotImplementedError(
        f"megatron.rl.rl_utils.{name} is not built: Megatron's pretrain() with --perform-rl-step "
        "cannot run this project's loss yet. Use `pdm-rl train CONFIG` instead"
    )


def get_grpo_data_iterator(*args: Any, **kwargs: Any) -> NoReturn:
    """Collect rollouts for the next iterations (training.py:3820)."""
    _not_built("get_grpo_data_iterator")


def evaluate_and_print_results_rl(*args: Any, **kwargs: Any) -> NoReturn:
    """Evaluate on held-out prompts (training.py:1474, 4031)."""
    _not_built("evaluate_and_print_results_rl")


def rl_inference_interface_shutdown(*args: Any, **kwargs: Any) -> NoReturn:
    """End the rollout engine (training.py:1522, 4154)."""
    _not_built("rl_inference_interface_shutdown")


def _maybe_prefetch_separate_inference_model_weights(*args: Any, **kwargs: Any) -> NoReturn:
    """Move a separate inference model's weights (training.py:1470, 4025)."""
    _not_built("_maybe_prefetch_separate_inference_model_weights")


def get_sequence_packing_tensorboard_metrics(*args: Any, **kwargs: Any) -> NoReturn:
    """Describe packing for TensorBoard (training.py:2699)."""
    _not_built("get_sequence_packing_tensorboard_metrics")


def get_sequence_packing_log_info(*args: Any, **kwargs: Any) -> NoReturn:
    """Describe packing for the log (training.py:2848)."""
    _not_built("get_sequence_packing_log_info")


def log_rl_throughput_metrics(*args: Any, **kwargs: Any) -> NoReturn:
    """Describe throughput for the log (training.py:2901)."""
    _not_built("log_rl_throughput_metrics")


def get_iteration_sequence_count(*args: Any, **kwargs: Any) -> NoReturn:
    """Count the sequences of an iteration (training.py:3929)."""
    _not_built("get_iteration_sequence_count")
