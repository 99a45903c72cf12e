# SPDX-License-Identifier: Apache-2.0
"""The fused head over vocabulary shards: values, gradients, and only the declared collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from pdm import PolicyLossConfig, VocabShard, fused_policy_loss, linear_policy_statistics
from tests.parallel.spawn import run_ranks
from tests.unit.test_pdm_fused import CONFIG, Head, assert_same, make_head, run_reference

# Rows of the head on each rank: even, uneven padding, a shard of padding only, an empty one.
LAYOUTS = {
    1: [[2512]],
    2: [[1256, 1256], [2512, 0]],
    4: [[628, 628, 628, 628], [1200, 1300, 12, 0], [0, 0, 2500, 12]],
}
CHUNK = 7
TOKENS = 23


def run_shards(
    rank: int,
    world_size: int,
    layouts: list[list[int]],
    config: PolicyLossConfig,
    impl: str,
    dtype: torch.dtype = torch.float64,
) -> list[dict[str, Any]]:
    """Run every layout on this rank; return its gradients and what it communicated."""
    outcomes = []
    for widths in layouts:
        head = make_head(dtype=dtype)
        start = sum(widths[:rank])
        shard = VocabShard(start, start + widths[rank], head.shard.vocab_size, dist.group.WORLD)
        outcomes.append(_run_shard(head, shard, config, impl))
    return outcomes


def _run_shard(
    head: Head, shard: VocabShard, config: PolicyLossConfig, impl: str
) -> dict[str, Any]:
    hidden = head.hidden.clone().requires_grad_()
    weight = head.weight[shard.start : shard.stop].clone().requires_grad_()
    counts = {"all_gather": 0, "floats": 0}
    original = dist.all_gather

    def counting(parts: Any, tensor: torch.Tensor, **kwargs: Any) -> Any:
        counts["all_gather"] += 1
        counts["floats"] += tensor.numel()
        return original(parts, tensor, **kwargs)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("an undeclared collective")

    patched = {"all_gather": counting, "all_reduce": refuse, "broadcast": refuse}
    saved = {name: getattr(dist, name) for name in patched}
    try:
        for name, function in patched.items():
            setattr(dist, name, function)
        fused = fused_policy_loss(
            hidden,
            weight,
            head.support,
            head.advantages,
            config,
            shard=shard,
            chunk_size=CHUNK,
            impl=impl,  # type: ignore[arg-type]
        )
        (3 * fused.result.loss).backward()
    finally:
        for name, function in saved.items():
            setattr(dist, name, function)
    assert hidden.grad is not None and weight.grad is not None
    # The caller's part: each rank holds a partial sum of the hidden gradient.
    dist.all_reduce(hidden.grad)
    linear = linear_policy_statistics(head.hidden, weight.detach(), head.support, shard=shard)
    return {
        "hidden": hidden.grad,
        "weight": weight.grad,
        "log_prob": fused.statistics.log_prob,
        "linear_log_prob": linear.log_prob,
        "keep": fused.result.mask.keep,
        "counts": counts,
        "support_columns": head.support.token_ids.shape[1],
    }


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("impl", ["tiled", "reference"])
def test_shards_equal_the_whole(world_size: int, impl: str) -> None:
    config = CONFIG
    expected = run_reference(make_head(), config)
    by_rank = run_ranks(run_shards, world_size, LAYOUTS[world_size], config, impl)
    for number in range(len(LAYOUTS[world_size])):
        ranks = [outcomes[number] for outcomes in by_rank]
        joined = {
            "hidden": ranks[0]["hidden"],
            "weight": torch.cat([rank["weight"] for rank in ranks]),
        }
        assert_same(joined, {name: expected[name] for name in joined}, tolerance=1e-11)
        for rank in ranks:
            log_prob = expected["PolicyStatistics.log_prob"]
            assert torch.allclose(rank["log_prob"], log_prob, rtol=1e-12, atol=1e-12)
            assert torch.allclose(rank["linear_log_prob"], log_prob, rtol=1e-12, atol=1e-12)
            # Decisions come from the same gathered numbers: no rank can disagree, bit for bit.
            assert torch.equal(rank["log_prob"], ranks[0]["log_prob"])
            assert torch.equal(rank["keep"], expected["MaskResult.keep"])
            chunks = -(-TOKENS // CHUNK)
            assert rank["counts"]["all_gather"] == chunks
            assert rank["counts"]["floats"] == TOKENS * (5 + rank["support_columns"])


@pytest.mark.parametrize("world_size", [2, 4])
def test_float32_shards_are_as_close_to_float64_as_plain_float32(world_size: int) -> None:
    """The three-way rule, for values and gradients."""
    exact = run_reference(make_head(), CONFIG)
    plain = run_reference(make_head(dtype=torch.float32), CONFIG)
    layout = LAYOUTS[world_size][:1]
    by_rank = run_ranks(run_shards, world_size, layout, CONFIG, "tiled", torch.float32)
    ranks = [outcomes[0] for outcomes in by_rank]
    names = {"hidden": "hidden", "weight": "weight", "log_prob": "PolicyStatistics.log_prob"}
    sharded = {
        "hidden": ranks[0]["hidden"],
        "weight": torch.cat([rank["weight"] for rank in ranks]),
        "log_prob": ranks[0]["log_prob"],
    }
    for name, reference in names.items():
        scale = exact[reference].norm()
        error = (sharded[name].double() - exact[reference]).norm() / scale
        allowed = (plain[reference].double() - exact[reference]).norm() / scale
        assert error <= 2 * allowed + 1e-7, f"{name}: {error:.2e}, plain {allowed:.2e}"
