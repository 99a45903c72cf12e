# SPDX-License-Identifier: Apache-2.0
"""Statistics, loss and gradients over vocabulary shards against an unsharded float64 oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pdm import BehaviorSupport, PolicyLossConfig, VocabShard, policy_loss, policy_statistics
from tests.parallel.spawn import run_ranks

FIELDS = (
    "log_prob",
    "support_log_probs",
    "tail_prob",
    "sum_square",
    "tail_sum_square",
    "tail_max",
    "entropy",
)


@dataclass(frozen=True)
class Layout:
    """A vocabulary of ``vocab`` tokens padded to ``padded`` columns."""

    vocab: int
    padded: int
    tokens: int = 9
    temperature: float = 1.0
    dtype: torch.dtype = torch.float64


LAYOUTS = {
    "even": Layout(vocab=64, padded=64),
    "padded": Layout(vocab=61, padded=64, temperature=0.7),
    # 4 ranks of 6: [18, 24) is padding only; 2 ranks of 12: [12, 24) is mostly padding.
    "padding_only_shard": Layout(vocab=17, padded=24),
    "no_tokens": Layout(vocab=64, padded=64, tokens=0),
    "float32": Layout(vocab=61, padded=64, dtype=torch.float32),
}
EMPTY_SHARD = "empty_shard"
"""Uneven split by hand: rank 0 holds no column at all, the last holds what is left."""


@dataclass(frozen=True, eq=False)
class Inputs:
    logits: Tensor  # [T, padded]
    log_mu: Tensor  # [T, vocab]
    support: BehaviorSupport
    cotangents: Tensor  # [2, T]
    advantages: Tensor  # [T]


def make_inputs(layout: Layout) -> Inputs:
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    t, v = layout.tokens, layout.vocab
    behavior = 2 * normal(t, v)
    # Padded columns would win every maximum if they counted.
    logits = torch.cat(
        [behavior + normal(t, v), torch.full((t, layout.padded - v), 40.0).double()], dim=-1
    ).to(layout.dtype)
    log_mu = torch.log_softmax(behavior, dim=-1)
    values, ids = log_mu.topk(4, dim=-1)
    sampled = torch.randint(v, (t,), generator=generator)
    if t:
        # First and last tokens of shards of 2 and 4 ranks, and of the vocabulary.
        half, quarter = layout.padded // 2, layout.padded // 4
        borders = [0, quarter - 1, quarter, half - 1, half, v - 1]
        sampled[: len(borders)] = torch.tensor(borders).clamp_max(v - 1)
        ids[0] = torch.tensor(borders[1:5]).clamp_max(v - 1)
        values[0] = log_mu[0, ids[0]]
    sampled_values = log_mu.gather(-1, sampled[:, None]).squeeze(-1)
    return Inputs(
        logits=logits,
        log_mu=log_mu,
        support=BehaviorSupport.from_topk(ids, values, sampled, sampled_values),
        cotangents=normal(2, t),
        advantages=normal(t),
    )


def shard_of(name: str, rank: int, world_size: int) -> VocabShard:
    group = dist.group.WORLD
    if name == EMPTY_SHARD:
        layout = LAYOUTS["padded"]
        width = layout.padded // max(world_size - 1, 1)
        start = max(rank - 1, 0) * width
        stop = layout.padded if rank == world_size - 1 else rank * width
        return VocabShard(start, stop, layout.vocab, group)
    layout = LAYOUTS[name]
    return VocabShard.for_rank(layout.vocab, layout.padded, rank, world_size, group)


def run_layouts(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """Everything a rank can report about each layout; runs in a child process."""
    operations: list[dist.ReduceOp.RedOpType] = []
    real_all_reduce = dist.all_reduce

    def counting_all_reduce(tensor: Tensor, op: Any, group: Any) -> None:
        operations.append(op)
        real_all_reduce(tensor, op=op, group=group)

    dist.all_reduce = counting_all_reduce
    results = {}
    for name in [*LAYOUTS, EMPTY_SHARD]:
        layout = LAYOUTS.get(name, LAYOUTS["padded"])
        inputs = make_inputs(layout)
        shard = shard_of(name, rank, world_size)
        local = inputs.logits[:, shard.start : shard.stop].clone().requires_grad_()
        operations.clear()
        stats = policy_statistics(
            local,
            inputs.support,
            temperature=layout.temperature,
            shard=shard,
            entropy_gradient=True,
        )
        forward = [str(op) for op in operations]
        value = (inputs.cotangents[0] * stats.log_prob + inputs.cotangents[1] * stats.entropy).sum()
        (gradient,) = torch.autograd.grad(value, local, retain_graph=True)
        loss = policy_loss(
            stats, inputs.support, inputs.advantages, PolicyLossConfig(threshold=0.3)
        )
        (loss_gradient,) = torch.autograd.grad(loss.loss, local)
        results[name] = {
            "range": (shard.start, shard.stop),
            "forward": forward,
            "backward": [str(op) for op in operations[len(forward) :]],
            "vocab_size": stats.vocab_size,
            "stats": {field: getattr(stats, field).detach() for field in FIELDS},
            "gradient": gradient,
            "loss": loss.loss.detach(),
            "keep": loss.mask.keep,
            "loss_gradient": loss_gradient,
        }
    return results


def oracle(layout: Layout, inputs: Inputs) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Statistics by float64 log_softmax over the true columns, and two gradients by autograd."""
    v = layout.vocab
    logits = inputs.logits.double().requires_grad_()
    log_pi = torch.log_softmax(logits[:, :v] / layout.temperature, dim=-1)
    pi = log_pi.exp()
    ids, used = inputs.support.token_ids, inputs.support.valid
    in_tail = torch.ones_like(pi, dtype=torch.bool)
    for t in range(layout.tokens):
        in_tail[t, ids[t][used[t]]] = False
    log_prob = log_pi.gather(-1, inputs.support.sampled[:, None]).squeeze(-1)
    entropy = -(pi * log_pi).sum(dim=-1)
    expected = {
        "log_prob": log_prob,
        "support_log_probs": torch.where(used, log_pi.gather(-1, ids.clamp_min(0)), -torch.inf),
        "tail_prob": (pi * in_tail).sum(dim=-1),
        "sum_square": pi.square().sum(dim=-1),
        "tail_sum_square": (pi * in_tail).square().sum(dim=-1),
        "tail_max": (pi * in_tail).amax(dim=-1),
        "entropy": entropy,
    }
    value = (inputs.cotangents[0] * log_prob + inputs.cotangents[1] * entropy).sum()
    (gradient,) = torch.autograd.grad(value, logits, retain_graph=True)
    log_mu = inputs.log_mu.gather(-1, inputs.support.sampled[:, None]).squeeze(-1)
    factor = (torch.exp(log_prob - log_mu) * inputs.advantages).detach()
    # Unmasked; the test multiplies rows by the mask that the ranks agreed on.
    (loss_gradient,) = torch.autograd.grad(-(factor * log_prob).sum(), logits)
    return {key: x.detach() for key, x in expected.items()}, gradient, loss_gradient


@pytest.fixture(scope="module", params=[1, 2, 4])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(run_layouts, request.param)


@pytest.mark.parametrize("name", [*LAYOUTS, EMPTY_SHARD])
def test_values_and_gradients_equal_the_unsharded_ones(
    ranks: list[dict[str, dict[str, Any]]], name: str
) -> None:
    layout = LAYOUTS.get(name, LAYOUTS["padded"])
    inputs = make_inputs(layout)
    stats, gradient, loss_gradient = oracle(layout, inputs)
    exact = layout.dtype == torch.float64
    close = {"rtol": 1e-11, "atol": 1e-14} if exact else {"rtol": 2e-5, "atol": 2e-6}
    columns = 0
    for results in ranks:
        result = results[name]
        start, stop = result["range"]
        columns += stop - start
        assert result["vocab_size"] == layout.vocab
        for field in FIELDS:
            assert result["stats"][field].dtype == layout.dtype
            torch.testing.assert_close(result["stats"][field].double(), stats[field], **close)
        assert result["gradient"].dtype == layout.dtype
        torch.testing.assert_close(result["gradient"].double(), gradient[:, start:stop], **close)
        keep = result["keep"][:, None]
        torch.testing.assert_close(
            result["loss_gradient"].double(), keep * loss_gradient[:, start:stop], **close
        )
        padding = result["loss_gradient"][:, max(layout.vocab - start, 0) :]
        assert (padding == 0).all()
    assert columns == layout.padded


@pytest.mark.parametrize("name", [*LAYOUTS, EMPTY_SHARD])
def test_one_max_and_one_sum_forward_and_nothing_backward(
    ranks: list[dict[str, dict[str, Any]]], name: str
) -> None:
    for results in ranks:
        assert results[name]["forward"] == ["RedOpType.MAX", "RedOpType.SUM"]
        assert results[name]["backward"] == []


def test_ranks_agree_to_the_bit(ranks: list[dict[str, dict[str, Any]]]) -> None:
    # Ranks that disagree on a mask would follow different gradients and drift apart.
    for name in ranks[0]:
        first = ranks[0][name]
        for results in ranks[1:]:
            assert torch.equal(results[name]["loss"], first["loss"])
            assert torch.equal(results[name]["keep"], first["keep"])
            for field in FIELDS:
                assert torch.equal(results[name]["stats"][field], first["stats"][field])


def test_the_layouts_exercise_what_they_promise(
    ranks: list[dict[str, dict[str, Any]]],
) -> None:
    assert 0 < (~ranks[0]["even"]["keep"]).sum() < 9
    if len(ranks) > 1:
        start, stop = ranks[0][EMPTY_SHARD]["range"]
        assert start == stop
    if len(ranks) == 4:
        assert ranks[3]["padding_only_shard"]["range"][0] >= LAYOUTS["padding_only_shard"].vocab
