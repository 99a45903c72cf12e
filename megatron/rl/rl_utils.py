# SPDX-License-Identifier: Apache-2.0
"""What ``megatron.training`` 0.19 calls of ``megatron.rl`` in a run with ``--perform-rl-step``.

Imported in the middle of ``training.py`` (lines 195-206), which swallows an ImportError: nothing is
imported here that needs Megatron's training package, or anything that may be missing, before a
function is called. The state is in ``stock_session.py``.
"""

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.rl.megatron_pretrain import MinibatchIterator


def get_grpo_data_iterator(
    model: list[Any],
    inference_model: Any,
    optimizer: Any,
    iteration: int,
    ref_state_dict: dict[str, Any],
    *,
    grpo_iterations: int,
    grpo_prompts_per_step: int,
    grpo_group_size: int,
    global_batch_size: int,
    sequence_packing: bool,
    buffered_rollouts: "MinibatchIterator | list[MinibatchIterator] | None",
    is_correction: bool,
    optimizer_is_on_cpu: bool,
) -> "MinibatchIterator | list[MinibatchIterator]":
    """Return the micro-batches of the next optimizer step (training.py:3820).

    Called before every iteration, on every rank. Where a rollout batch begins, the engines first
    get the policy's weights, proven by the bridge's certificate, and sample.

    Args:
        model: the chunks of this rank, in DistributedDataParallel.
        inference_model: None; rollouts come from the engine.
        ref_state_dict: of ``--pretrained-checkpoint``; not looked at.
        buffered_rollouts: what the call before returned, with what the loss saw since.

    Returns:
        One iterator, or one for each of several model chunks.

    Raises:
        UserError: an argument asks for rollouts or batches of another kind.
    """
    from megatron.rl.stock_session import require_own_engine, session_of

    require_own_engine(
        inference_model=inference_model,
        sequence_packing=sequence_packing,
        is_correction=is_correction,
        optimizer_is_on_cpu=optimizer_is_on_cpu,
    )
    session = session_of(model, optimizer, iteration)
    session.check(
        grpo_iterations=grpo_iterations,
        grpo_prompts_per_step=grpo_prompts_per_step,
        grpo_group_size=grpo_group_size,
        global_batch_size=global_batch_size,
    )
    session.settle(buffered_rollouts)
    return session.iterator(iteration, len(model))


def evaluate_and_print_results_rl(
    valid_data_iterator: Any,
    model: list[Any],
    optimizer: Any,
    iteration: int,
    *,
    write_to_tensorboard: bool,
    training_model: Any,
) -> None:
    """Print the reward on the held-out prompts of the newest weights (training.py:1474, 4031).

    Args:
        valid_data_iterator: None; the task has the prompts.
        training_model: None without a second model to sample from.
    """
    from megatron.training import get_args, print_rank_last

    from megatron.rl.stock_session import require_own_engine, session_of

    require_own_engine(training_model=training_model)
    metrics = session_of(model, optimizer, iteration).evaluate(
        iteration, write=write_to_tensorboard
    )
    print_rank_last(
        f" rl evaluation at iteration {iteration} | held-out reward: "
        f"{metrics['heldout_reward']:.6E} | standard error: "
        f"{metrics['heldout_reward_stderr']:.3E} | response length: "
        f"{metrics['heldout_response_length']:.1f} |"
    )
    # --eval-iters asks pretrain() for a test of language modelling as well, on data that a run on
    # rollouts does not have (training.py:1492).
    get_args().do_test = False


def rl_inference_interface_shutdown() -> None:
    """End the rollout engines (training.py:1522, 4154); pretrain() still has things to end."""
    from megatron.rl import stock_session

    session = stock_session.running_session()
    if session is not None:
        session.finish()
    stock_session.close()


def _maybe_prefetch_separate_inference_model_weights(model: Any, *, to_cpu: bool) -> None:
    """Refuse: there is no second model to sample from (training.py:1470, 4025)."""
    from megatron.rl.errors import UserError

    raise UserError(
        f"expected no second model to sample from, got {type(model).__name__}: rollouts come from "
        "the engine of --pdm-rollout-*; leave out --rl-inference-*"
    )


def get_sequence_packing_tensorboard_metrics(args: argparse.Namespace) -> dict[str, float]:
    """Return nothing (training.py:2699): --rl-use-sequence-packing is refused."""
    return {}


def get_sequence_packing_log_info(args: argparse.Namespace) -> str:
    """Return nothing (training.py:2848): --rl-use-sequence-packing is refused."""
    return ""


def log_rl_throughput_metrics(
    args: argparse.Namespace,
    batch_size: int,
    elapsed_s: float,
    iteration: int,
    wandb_writer: Any,
) -> str:
    """Return the end of Megatron's log line (training.py:2901): reward, loss and throughput.

    Megatron leaves numbers below zero out of its own part of the line.

    Args:
        elapsed_s: seconds an iteration since the last line.
    """
    from megatron.rl.stock_session import running_session

    session = running_session()
    if session is None:
        return ""
    summary = session.summary(elapsed_s)
    if wandb_writer:
        wandb_writer.log({f"rl/{name}": value for name, value in summary.items()}, iteration)
    return "".join(f" {name}: {value:.6E} |" for name, value in summary.items())


def get_iteration_sequence_count(args: argparse.Namespace) -> int:
    """Return the sequences of an iteration (training.py:3929)."""
    count: int = args.global_batch_size
    return count
