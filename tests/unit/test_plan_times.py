# SPDX-License-Identifier: Apache-2.0
"""Predicted times: FLOPs by hand, and what a change of layout or hardware does to each phase."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megatron.rl.config import load_config
from megatron.rl.model.architecture import parse_architecture
from megatron.rl.planning.phase_times import PhaseTime, token_flops
from megatron.rl.planning.rates import GPUS, Assumptions, Cluster
from megatron.rl.planning.run_plan import RunPlan, make_plan
from tests.checkpoints import QWEN3_30B
from tests.real_models import QWEN3_8B

# Of the 8B and 30B recipes: 128 x 16 prompts of 256 tokens, and responses of 4096.
TOKENS = 128 * 16 * (256 + 4096)
RECIPES = Path(__file__).parents[2] / "examples" / "rl"


def _plan(
    *overrides: str,
    recipe: str = "qwen3_30b_fp8_e2e",
    model: dict[str, Any] = QWEN3_30B,
    gpu: dict[str, float] | None = None,
    response: int = 4096,
) -> RunPlan:
    config = load_config(RECIPES / f"{recipe}.yaml", overrides)
    card = dataclasses.replace(GPUS["h200"], **(gpu or {}))
    cluster = Cluster(config.parallel.world_size, 8, 140.0, card, Assumptions())
    return make_plan(config, parse_architecture(model), cluster, response)


def _phase(plan: RunPlan, name: str) -> PhaseTime:
    (found,) = [phase for phase in plan.times if phase.phase == name]
    return found


def test_flops_of_a_token_by_hand() -> None:
    """Two a parameter of a linear layer; 2 x 4096 x length a layer for causal attention."""
    layer = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 12288
    linear, attention = token_flops(parse_architecture(QWEN3_8B), tokens=3000, sequences=3)
    assert linear == 2 * 36 * layer
    assert attention == 36 * 2 * 4096 * 1000


def test_training_time_by_hand() -> None:
    """128 x 16 sequences of 256 + 4096 tokens, BF16 at 40 % of 989 TFLOP/s, 8 GPUs."""
    plan = _plan(recipe="qwen3_8b", model=QWEN3_8B)
    responses = 128 * 16 * 4096
    tokens = responses + 128 * 16 * 256
    linear, attention = token_flops(plan.model, tokens, 128 * 16)
    flops = 3 * (tokens * (linear + attention) + responses * 2 * 151936 * 4096)
    seconds = flops / (0.4 * 989e12) / 8
    assert _phase(plan, "train").shares["matrix products"] == pytest.approx(seconds)
    every = _plan("train.mismatch=every_token", recipe="qwen3_8b", model=QWEN3_8B)
    more = tokens * (linear + attention) / (0.4 * 989e12) / 8
    found = _phase(every, "train").shares["matrix products"]
    assert found == pytest.approx(seconds + more)


def test_full_recomputation_costs_a_third_more() -> None:
    def seconds(*overrides: str) -> float:
        plan = _plan(*overrides, recipe="qwen3_8b", model=QWEN3_8B)
        return _phase(plan, "train").shares["matrix products"]

    full = "{recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}"
    ratio = seconds(f"megatron.transformer={full}") / seconds()
    assert 1.25 < ratio < 4 / 3  # the head is not computed again


def test_recomputing_a_part_costs_its_forward_products() -> None:
    def seconds(*overrides: str) -> float:
        plan = _plan(*overrides, recipe="qwen3_8b", model=QWEN3_8B)
        return _phase(plan, "train").shares["matrix products"]

    selective = "{{recompute_granularity: selective, recompute_modules: [{}]}}"
    mlp = seconds(f"megatron.transformer={selective.format('mlp')}") - seconds()
    # 36 MLPs of three matrices, for the tokens of 2048 sequences, on 8 GPUs at 0.4 of the peak.
    flops = 2 * 36 * 3 * 4096 * 12288 * TOKENS
    assert mlp == pytest.approx(flops / (0.4 * 989e12) / 8)
    assert seconds(f"megatron.transformer={selective.format('layernorm')}") == seconds()
    attention = seconds(f"megatron.transformer={selective.format('core_attn')}")
    assert seconds() < attention < seconds() + mlp


def test_experts_across_nodes_take_the_network() -> None:
    inside = _phase(_plan(), "train").shares
    across = _phase(_plan("parallel.expert=16"), "train").shares
    assert "expert all-to-all: NVLink" in inside
    # As many bytes but for the share that stays: 15/16 against 7/8, at a ninth of the rate.
    ratio = across["expert all-to-all: network"] / inside["expert all-to-all: NVLink"]
    assert ratio == pytest.approx((15 / 16) / (7 / 8) * 450 / 50)


def test_a_pipeline_idles() -> None:
    plan = _plan("parallel.pipeline=4", "parallel.data=2")
    shares = _phase(plan, "train").shares
    micro_batches = 16 * 16 // 2  # two replicas; a micro-batch of 16384 tokens holds one sequence
    assert shares["pipeline idle"] == pytest.approx(3 / micro_batches * shares["matrix products"])


def test_decoding_reads_weights_and_cache() -> None:
    """At twice the bandwidth the reading takes half as long, and the rest as long as before."""
    slow, fast = _plan(), _plan(gpu={"memory_bytes": 9.6e12})
    before, after = _phase(slow, "sample").shares, _phase(fast, "sample").shares
    assert after["decoding: memory"] == pytest.approx(before["decoding: memory"] / 2)
    assert after["decoding: latency of steps"] == before["decoding: latency of steps"]


def test_no_response_outlasts_the_longest() -> None:
    """8192 steps at least, however short responses are on average."""
    plan = _plan(response=64)
    assert _phase(plan, "sample").seconds > 8192 * Assumptions().decode_step_s
    assert _phase(plan, "sample").limit == "longest response"


def test_the_host_is_slower_than_cuda_ipc() -> None:
    ipc = _phase(_plan(), "sync")
    host = _phase(_plan("bridge.transport=shared_memory"), "sync")
    assert ipc.seconds < host.seconds
    # 31.2 GB twice over PCIe 5.0 at 70 %.
    assert host.shares["hand over: PCIe"] == pytest.approx(2 * 31.1745e9 / (0.7 * 64e9), rel=1e-3)
