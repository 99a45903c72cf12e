# SPDX-License-Identifier: Apache-2.0
"""The fused head against plain autograd over whole logits, in float64 and float32."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from pdm import (
    BehaviorSupport,
    PolicyLossConfig,
    VocabShard,
    accept_sequences,
    expand_to_tokens,
    fused_policy_loss,
    linear_policy_statistics,
    policy_loss,
    policy_statistics,
)
from pdm.functional.sequence_mask_config import SequenceMaskConfig

HIDDEN, TOP_K = 12, 5
CONFIG = PolicyLossConfig(threshold=0.5)


@dataclasses.dataclass(frozen=True)
class Head:
    """A random head and a batch whose tokens lie on tile borders, too."""

    hidden: Tensor
    weight: Tensor
    support: BehaviorSupport
    advantages: Tensor
    shard: VocabShard


def make_head(
    tokens: int = 23, vocab: int = 2500, padding: int = 12, dtype: torch.dtype = torch.float64
) -> Head:
    generator = torch.Generator().manual_seed(tokens * vocab)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    log_mu = (2 * randn(tokens, vocab)).log_softmax(-1)
    top = log_mu.topk(min(TOP_K, vocab)).indices
    sampled = torch.randint(0, vocab, (tokens,), generator=generator)
    sampled[::2] = top[::2, -1]
    if tokens > 3 and vocab > 1024:
        sampled[1], sampled[3] = 1023, 1024
        if vocab > 1256 and tokens > 7:  # the border of two shards
            sampled[5], sampled[7] = 1255, 1256
    support = BehaviorSupport.from_topk(
        top, log_mu.gather(1, top), sampled, log_mu.gather(1, sampled[:, None])[:, 0]
    )
    advantages = randn(tokens)
    advantages[2:3] = 0.0
    shard = VocabShard(0, vocab + padding, vocab)
    return Head(randn(tokens, HIDDEN), randn(vocab + padding, HIDDEN), support, advantages, shard)


def run_reference(head: Head, config: PolicyLossConfig, **settings: Any) -> dict[str, Tensor]:
    temperature = settings.get("temperature", 1.0)
    hidden, weight = (x.clone().requires_grad_() for x in (head.hidden, head.weight))
    stats = policy_statistics(
        hidden @ weight.T,
        head.support,
        temperature=temperature,
        shard=head.shard,
        entropy_gradient=config.entropy_coefficient != 0,
    )
    result = policy_loss(stats, head.support, head.advantages, config)
    (3 * result.loss).backward()
    return _outcome(hidden, weight, result, stats)


def run_fused(head: Head, config: PolicyLossConfig, **settings: Any) -> dict[str, Tensor]:
    hidden, weight = (x.clone().requires_grad_() for x in (head.hidden, head.weight))
    fused = fused_policy_loss(
        hidden, weight, head.support, head.advantages, config, shard=head.shard, **settings
    )
    (3 * fused.result.loss).backward()
    return _outcome(hidden, weight, fused.result, fused.statistics)


def _outcome(hidden: Tensor, weight: Tensor, result: Any, stats: Any) -> dict[str, Tensor]:
    assert hidden.grad is not None and weight.grad is not None
    outcome = {"hidden": hidden.grad, "weight": weight.grad}
    for item in (result, result.mask, stats):
        for field in dataclasses.fields(item):
            value = getattr(item, field.name)
            if isinstance(value, Tensor):
                outcome[f"{type(item).__name__}.{field.name}"] = value.detach()
    return outcome


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if value.dtype == torch.bool:
            assert torch.equal(actual[name], value), name
            continue
        unused = torch.isinf(value)
        assert torch.equal(torch.isinf(actual[name]), unused), name
        difference = (actual[name] - value)[~unused].double().norm()
        scale = value[~unused].double().norm().clamp_min(1e-12)
        assert difference <= tolerance * scale, f"{name}: {difference / scale:.2e}"


@pytest.mark.parametrize("impl", ["reference", "tiled"])
@pytest.mark.parametrize("chunk_size", [None, 1, 7])
@pytest.mark.parametrize(
    ("config", "temperature"),
    [
        (CONFIG, 1.0),
        (PolicyLossConfig(mask="none", ratio_cap=2.0), 0.7),
        (PolicyLossConfig(direction="certified", threshold=0.3), 1.0),
        (PolicyLossConfig(threshold=0.5, entropy_coefficient=0.01), 1.3),
        (PolicyLossConfig(divergence="binary_kl", direction="ratio"), 1.0),
    ],
)
def test_equals_plain_autograd(
    impl: str, chunk_size: int | None, config: PolicyLossConfig, temperature: float
) -> None:
    head = make_head()
    actual = run_fused(head, config, impl=impl, chunk_size=chunk_size, temperature=temperature)
    expected = run_reference(head, config, temperature=temperature)
    if config.mask != "none":
        assert 0 < int(expected["MaskResult.keep"].sum()) < len(head.advantages)
    assert_same(actual, expected, tolerance=1e-11)


@pytest.mark.parametrize(("tokens", "vocab"), [(1, 1), (5, 1024), (3, 1025), (0, 50), (40, 3)])
@pytest.mark.parametrize("impl", ["reference", "tiled"])
def test_ragged_shapes(tokens: int, vocab: int, impl: str) -> None:
    head = make_head(tokens, vocab, padding=3)
    assert_same(run_fused(head, CONFIG, impl=impl), run_reference(head, CONFIG), tolerance=1e-11)


@pytest.mark.parametrize("impl", ["reference", "tiled"])
def test_float32_is_as_close_to_float64_as_plain_float32(impl: str) -> None:
    """The three-way rule: error against float64 <= that of the plain path, with some room."""
    exact = run_reference(make_head(tokens=64), CONFIG)
    narrow = make_head(tokens=64, dtype=torch.float32)
    plain, fused = run_reference(narrow, CONFIG), run_fused(narrow, CONFIG, impl=impl)
    for name in ("hidden", "weight", "PolicyStatistics.log_prob", "PolicyStatistics.tail_prob"):
        scale = exact[name].norm()
        error = {k: (v[name].double() - exact[name]).norm() / scale for k, v in
                 (("plain", plain), ("fused", fused))}  # fmt: skip
        assert error["fused"] <= 2 * error["plain"] + 1e-7, f"{name}: {error}"


@pytest.mark.parametrize("impl", ["reference", "tiled"])
def test_rows_without_a_coefficient_are_never_looked_at(impl: str) -> None:
    """A row with A = 0 adds exact zeros to both gradients even if its hidden state is NaN."""
    head = make_head()
    head.hidden[2] = torch.nan
    outcome = run_fused(head, PolicyLossConfig(mask="none"), impl=impl)
    assert torch.isfinite(outcome["weight"]).all()
    assert outcome["hidden"][2].eq(0).all()
    assert outcome["hidden"].abs().sum(-1).ne(0).sum() == len(head.hidden) - 1


def test_inputs_are_unchanged_and_nothing_is_computed_without_gradients() -> None:
    head = make_head()
    before = [head.hidden.clone(), head.weight.clone(), head.advantages.clone()]
    with torch.no_grad():
        weight = head.weight.clone().requires_grad_()
        fused = fused_policy_loss(
            head.hidden, weight, head.support, head.advantages, CONFIG, shard=head.shard
        )
    assert not fused.result.loss.requires_grad
    run_fused(head, CONFIG)
    for now, then in zip((head.hidden, head.weight, head.advantages), before, strict=True):
        assert torch.equal(now, then)


def test_frozen_head_and_frozen_trunk() -> None:
    head = make_head()
    expected = run_reference(head, CONFIG)
    for frozen in ("hidden", "weight"):
        inputs = {"hidden": head.hidden.clone(), "weight": head.weight.clone()}
        trained = inputs["weight" if frozen == "hidden" else "hidden"].requires_grad_()
        fused = fused_policy_loss(
            inputs["hidden"], inputs["weight"], head.support, head.advantages, CONFIG,
            shard=head.shard,
        )  # fmt: skip
        (3 * fused.result.loss).backward()
        name = "weight" if frozen == "hidden" else "hidden"
        assert trained.grad is not None
        assert torch.allclose(trained.grad, expected[name], rtol=1e-9)
        assert inputs[frozen].grad is None


def test_megatron_main_grad_receives_the_gradient_in_backward() -> None:
    head = make_head(dtype=torch.float32)
    expected = run_reference(head, CONFIG)["weight"]
    weight = torch.nn.Parameter(head.weight.clone())
    weight.main_grad = torch.ones_like(head.weight)  # type: ignore[attr-defined]
    fused = fused_policy_loss(
        head.hidden, weight, head.support, head.advantages, CONFIG, shard=head.shard
    )
    assert weight.main_grad.eq(1).all(), "never written in forward"  # type: ignore[attr-defined]
    (3 * fused.result.loss).backward()
    assert weight.grad is not None and weight.grad.eq(0).all()
    assert weight.grad_added_to_main_grad  # type: ignore[attr-defined]
    added = weight.main_grad - 1  # type: ignore[attr-defined]
    assert (added - expected).norm() <= 1e-5 * expected.norm()


def test_linear_statistics_equal_those_of_whole_logits() -> None:
    head = make_head()
    grads = []
    for linear in (False, True):
        hidden, weight = (x.clone().requires_grad_() for x in (head.hidden, head.weight))
        kwargs: dict[str, Any] = {"shard": head.shard, "entropy_gradient": True}
        stats = (
            linear_policy_statistics(hidden, weight, head.support, chunk_size=5, **kwargs)
            if linear
            else policy_statistics(hidden @ weight.T, head.support, **kwargs)
        )
        upstream = torch.linspace(-1, 1, len(head.hidden), dtype=torch.float64)
        upstream[::3] = 0.0
        (stats.log_prob @ upstream + stats.entropy @ upstream.flip(0)).backward()
        grads.append((hidden.grad, weight.grad))
    for plain, linear_grad in zip(*grads, strict=True):
        assert torch.allclose(plain, linear_grad, rtol=1e-10, atol=1e-13)


def test_two_phases_of_a_sequence_mask() -> None:
    """Statistics of all rows, a verdict, and a backward that looks at accepted rows only."""
    head = make_head()
    ids = torch.arange(23) // 6
    mask = SequenceMaskConfig("max", divergence="topk_kl", max_threshold=2.0)
    config = dataclasses.replace(CONFIG, sequence_mask=mask)
    grads = []
    for linear in (False, True):
        hidden, weight = (x.clone().requires_grad_() for x in (head.hidden, head.weight))
        stats = (
            linear_policy_statistics(hidden, weight, head.support, shard=head.shard)
            if linear
            else policy_statistics(hidden @ weight.T, head.support, shard=head.shard)
        )
        verdict = accept_sequences(mask, stats, head.support, ids, 4)
        assert 0 < int(verdict.accept.sum()) < 4
        accepted = expand_to_tokens(verdict.accept, ids)
        result = policy_loss(stats, head.support, head.advantages, config, accepted=accepted)
        assert result.num_tokens == 23, "rejected tokens stay in the denominator"
        result.loss.backward()
        assert hidden.grad is not None
        assert hidden.grad[~accepted].eq(0).all()
        grads.append((hidden.grad, weight.grad))
    for plain, linear_grad in zip(*grads, strict=True):
        assert torch.allclose(plain, linear_grad, rtol=1e-10, atol=1e-13)


def test_a_sequence_mask_without_its_verdict_is_refused() -> None:
    head = make_head()
    config = dataclasses.replace(
        CONFIG, sequence_mask=SequenceMaskConfig("ser", ratio_threshold=1.0)
    )
    with pytest.raises(ValueError, match="accepted"):
        run_fused(head, config)
    full = SequenceMaskConfig("max", divergence="full_kl", max_threshold=1.0)
    stats = policy_statistics(head.hidden @ head.weight.T, head.support, shard=head.shard)
    with pytest.raises(ValueError, match="topk_kl"):
        accept_sequences(full, stats, head.support, torch.zeros(23, dtype=torch.int64), 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(23, 3)}, "hidden"),
        ({"weight": torch.zeros(5, HIDDEN)}, "rows of the head"),
        ({"temperature": 0.0}, "temperature"),
        ({"chunk_size": 0}, "chunk_size"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], message: str) -> None:
    head = make_head(dtype=torch.float32)
    arguments = {"hidden": head.hidden, "weight": head.weight} | change
    hidden, weight = arguments.pop("hidden"), arguments.pop("weight")
    with pytest.raises(ValueError, match=message):
        fused_policy_loss(
            hidden, weight, head.support, head.advantages, CONFIG, shard=head.shard, **arguments
        )


@pytest.mark.parametrize("impl", ["reference", "tiled"])
def test_gradcheck_of_linear_statistics(impl: str) -> None:
    head = make_head(tokens=3, vocab=11, padding=2)

    def statistics(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        stats = linear_policy_statistics(
            hidden,
            weight,
            head.support,
            shard=head.shard,
            temperature=0.8,
            entropy_gradient=True,
            impl=impl,  # type: ignore[arg-type]
        )
        return stats.log_prob, stats.entropy

    inputs = tuple(x.clone().requires_grad_() for x in (head.hidden, head.weight))
    assert torch.autograd.gradcheck(statistics, inputs)


@pytest.mark.parametrize("impl", ["reference", "tiled"])
def test_gradient_equals_finite_differences_of_the_loss(impl: str) -> None:
    """Without mask and cap the value r A is differentiable, and the gradient is its derivative."""
    head = make_head(tokens=5, vocab=30)
    config = PolicyLossConfig(mask="none", entropy_coefficient=0.1)
    gradients = run_fused(head, config, impl=impl)
    generator = torch.Generator().manual_seed(0)
    for name in ("hidden", "weight"):
        direction = torch.randn(getattr(head, name).shape, generator=generator, dtype=torch.float64)
        losses = []
        for step in (1e-6, -1e-6):
            moved = dataclasses.replace(head, **{name: getattr(head, name) + step * direction})
            fused = fused_policy_loss(
                moved.hidden, moved.weight, head.support, head.advantages, config, shard=head.shard
            )
            losses.append(fused.result.loss)
        slope = 3 * (losses[0] - losses[1]) / 2e-6
        assert torch.allclose(slope, (gradients[name] * direction).sum(), rtol=1e-6)


def test_a_second_backward_is_refused() -> None:
    head = make_head()
    hidden = head.hidden.clone().requires_grad_()
    fused = fused_policy_loss(
        hidden, head.weight, head.support, head.advantages, CONFIG, shard=head.shard
    )
    fused.result.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran already"):
        fused.result.loss.backward()
