# SPDX-License-Identifier: Apache-2.0
"""What Megatron's training loop finds here says that it is not built, and pretends nothing."""

import pytest

from megatron.rl import rl_profiling, rl_utils

PROMISED = {
    rl_utils: [
        "get_grpo_data_iterator",
        "evaluate_and_print_results_rl",
        "rl_inference_interface_shutdown",
        "_maybe_prefetch_separate_inference_model_weights",
        "get_sequence_packing_tensorboard_metrics",
        "get_sequence_packing_log_info",
        "log_rl_throughput_metrics",
        "get_iteration_sequence_count",
    ],
    rl_profiling: ["initialize_rl_profiler", "log_iteration_profile", "shutdown_rl_profiler"],
}


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in PROMISED.items() for name in names]
)
def test_unbuilt_functions_say_so(module, name: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(NotImplementedError, match=f"{name} is not built.*pdm-rl train"):
        getattr(module, name)(1, keyword=2)


def test_timer_names_are_a_list() -> None:
    assert rl_profiling.RL_LOGGABLE_TIMER_NAMES == []
