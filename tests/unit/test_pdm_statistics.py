# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from pdm import BehaviorSupport, PolicyStatistics, VocabShard, policy_statistics
from tests.unit.pdm_cases import Case, random_case

INF = math.inf


def assert_matches_oracle(stats: PolicyStatistics, case: Case, log_pi: torch.Tensor) -> None:
    """Compare with sums over explicit token sets, in float64."""
    support = case.support
    for t in range(case.sampled.numel()):
        probs = log_pi[t].exp()
        kept = case.kept_ids(t)
        tail = [j for j in range(probs.numel()) if j not in kept]
        close = {"rtol": 1e-12, "atol": 1e-15}
        torch.testing.assert_close(stats.log_prob[t], log_pi[t, case.sampled[t]], **close)
        torch.testing.assert_close(stats.tail_prob[t], probs[tail].sum(), **close)
        torch.testing.assert_close(stats.sum_square[t], (probs**2).sum(), **close)
        torch.testing.assert_close(stats.tail_sum_square[t], (probs[tail] ** 2).sum(), **close)
        torch.testing.assert_close(stats.tail_max[t], probs[tail].max(), **close)
        torch.testing.assert_close(stats.entropy[t], -(probs * log_pi[t]).sum(), **close)
        for column, token_id in enumerate(support.token_ids[t].tolist()):
            value = stats.support_log_probs[t, column]
            if token_id < 0:
                assert value == -INF
            else:
                torch.testing.assert_close(value, log_pi[t, token_id], **close)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_values_against_float64_log_softmax(temperature: float) -> None:
    case = random_case(seed=1)
    stats = policy_statistics(case.logits, case.support, temperature=temperature)
    assert stats.vocab_size == 60
    assert_matches_oracle(stats, case, torch.log_softmax(case.logits / temperature, dim=-1))


def test_on_policy_ratio_is_one_at_a_temperature() -> None:
    # Raw behaviour log-probabilities against a tempered policy gave ratios of 2 on the first step.
    logits = random_case(seed=2).logits
    log_mu = torch.log_softmax(logits / 0.6, dim=-1)
    case = Case(logits, log_mu, log_mu.argmin(dim=-1), k=5)
    stats = policy_statistics(logits, case.support, temperature=0.6)
    torch.testing.assert_close(stats.log_prob, case.support.sampled_log_probs)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradient_of_log_prob_and_entropy(temperature: float) -> None:
    case = random_case(seed=3)
    weights = torch.randn(2, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits = case.logits.clone().requires_grad_()
    stats = policy_statistics(logits, case.support, temperature=temperature, entropy_gradient=True)
    (weights[0] * stats.log_prob + weights[1] * stats.entropy).sum().backward()

    plain = case.logits.clone().requires_grad_()
    log_pi = torch.log_softmax(plain / temperature, dim=-1)
    entropy = -(log_pi.exp() * log_pi).sum(dim=-1)
    picked = log_pi.gather(-1, case.sampled[:, None]).squeeze(-1)
    (weights[0] * picked + weights[1] * entropy).sum().backward()
    torch.testing.assert_close(logits.grad, plain.grad, rtol=1e-11, atol=1e-14)


def test_gradcheck() -> None:
    case = random_case(seed=4, tokens=3, vocab=9, k=2)
    shard = VocabShard(0, 11, 9)  # two padded columns
    logits = torch.cat([case.logits, torch.zeros(3, 2, dtype=torch.float64)], dim=-1)

    def outputs(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stats = policy_statistics(
            values, case.support, temperature=0.8, shard=shard, entropy_gradient=True
        )
        return stats.log_prob, stats.entropy

    assert torch.autograd.gradcheck(outputs, (logits.requires_grad_(),))


def test_only_log_prob_carries_a_gradient_unless_asked() -> None:
    case = random_case(seed=5)
    stats = policy_statistics(case.logits.requires_grad_(), case.support)
    carriers = [name for name, value in vars(stats).items() if getattr(value, "requires_grad", 0)]
    assert carriers == ["log_prob"]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        loss = stats.log_prob.square().sum()
        (grad,) = torch.autograd.grad(loss, case.logits, create_graph=True)
        grad.sum().backward()


def test_a_row_without_incoming_gradient_gets_zeros_even_from_nan_logits() -> None:
    case = random_case(seed=6)
    logits = case.logits.clone()
    logits[2] = math.nan
    logits.requires_grad_()
    stats = policy_statistics(logits, case.support)
    assert stats.log_prob[2].isnan()
    torch.where(torch.arange(7) == 2, 0.0, stats.log_prob).sum().backward()
    assert logits.grad is not None
    assert (logits.grad[2] == 0).all()
    assert logits.grad.isfinite().all()
    assert (logits.grad[0] != 0).any()


def test_padded_columns_take_no_part() -> None:
    case = random_case(seed=7)
    padding = torch.full((7, 4), 50.0, dtype=torch.float64)  # would win every maximum
    logits = torch.cat([case.logits, padding], dim=-1).requires_grad_()
    stats = policy_statistics(
        logits, case.support, shard=VocabShard(0, 64, 60), entropy_gradient=True
    )
    assert stats.vocab_size == 60
    assert_matches_oracle(stats, case, case.log_pi)
    (stats.log_prob.sum() + stats.entropy.sum()).backward()
    assert logits.grad is not None
    assert (logits.grad[:, 60:] == 0).all()


def test_tail_is_summed_not_subtracted() -> None:
    # Two head tokens at 0, a tail 28 nats below: mass 3.5e-11, which 1 - sum cannot hold in
    # float32.
    logits = torch.full((1, 100), -28.0)
    logits[0, :2] = 0.0
    support = BehaviorSupport(
        torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]]).log(), torch.tensor([0])
    )
    stats = policy_statistics(logits, support)
    expected = 98 * math.exp(-28) / (2 + 98 * math.exp(-28))
    assert stats.tail_prob.dtype == torch.float32
    assert stats.tail_prob.item() == pytest.approx(expected, rel=1e-5, abs=0)
    assert stats.tail_max.item() == pytest.approx(expected / 98, rel=1e-5, abs=0)
    assert stats.tail_sum_square.item() == pytest.approx(expected**2 / 98, rel=1e-5, abs=0)


def test_log_prob_next_to_zero_is_not_rounded_to_zero() -> None:
    logits = torch.tensor([[30.0, 0.0, 1.0]])
    support = BehaviorSupport.from_sampled(torch.tensor([0]), torch.tensor([-1e-9]))
    stats = policy_statistics(logits, support)
    expected = -math.log1p(math.exp(-30) + math.exp(-29))
    assert stats.log_prob.item() == pytest.approx(expected, rel=1e-5, abs=0)


def test_equal_maxima_are_all_counted() -> None:
    support = BehaviorSupport.from_sampled(torch.tensor([3]), torch.tensor([-1.0]))
    stats = policy_statistics(torch.full((1, 8), 2.0), support)
    assert stats.log_prob.item() == pytest.approx(-math.log(8))
    assert stats.entropy.item() == pytest.approx(math.log(8))
    assert stats.tail_prob.item() == pytest.approx(7 / 8)


@pytest.mark.parametrize("shift", [0.0, 3e4, -3e4])
def test_extreme_magnitudes(shift: float) -> None:
    logits = torch.tensor([[shift, shift - 1.0, shift - 200.0, -INF]], requires_grad=True)
    support = BehaviorSupport(
        torch.tensor([[1, 2]]), torch.tensor([[0.5, 0.1]]).log(), torch.tensor([1])
    )
    stats = policy_statistics(logits, support, entropy_gradient=True)
    prob = 1 / (1 + math.e)
    assert stats.log_prob.item() == pytest.approx(math.log(prob), rel=1e-6)
    assert stats.support_log_probs[0, 1].item() == pytest.approx(-200 - math.log1p(math.exp(-1)))
    assert stats.tail_prob.item() == pytest.approx(1 - prob, rel=1e-6)
    (stats.log_prob + stats.entropy).sum().backward()
    entropy = -prob * math.log(prob) - (1 - prob) * math.log(1 - prob)
    slope = -prob * (math.log(prob) + entropy)
    assert logits.grad is not None
    expected = [-(1 - prob) - slope, 1 - prob + slope, 0.0, 0.0]
    assert logits.grad[0].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_impossible_sampled_token() -> None:
    support = BehaviorSupport.from_sampled(torch.tensor([1]), torch.tensor([-1.0]))
    stats = policy_statistics(torch.tensor([[0.0, -INF]]), support)
    assert stats.log_prob.item() == -INF
    assert stats.entropy.item() == 0.0
    assert stats.tail_prob.item() == 1.0


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_garbage_logits_make_nan_statistics(bad: float) -> None:
    support = BehaviorSupport.from_sampled(torch.tensor([1]), torch.tensor([-1.0]))
    stats = policy_statistics(torch.tensor([[0.0, 1.0, bad]]), support)
    for name in ("log_prob", "tail_prob", "sum_square", "tail_sum_square", "entropy"):
        assert getattr(stats, name).isnan().all(), name


def test_ids_beyond_the_vocabulary_read_nan() -> None:
    # id == vocab_size passed a bound check written with `>` once, and lands on a padded column.
    support = BehaviorSupport(
        torch.tensor([[0, 5]]), torch.tensor([[0.5, 0.2]]).log(), torch.tensor([5])
    )
    stats = policy_statistics(torch.zeros(1, 8), support, shard=VocabShard(0, 8, 5))
    assert stats.log_prob.isnan().all()
    assert stats.support_log_probs[0, 0].item() == pytest.approx(-math.log(5))
    assert stats.support_log_probs[0, 1].isnan()


def test_low_precision_logits_are_widened_first() -> None:
    # A log-softmax within bf16 is off by 0.07 nats here.
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(2, 151_936, generator=generator)).bfloat16()
    sampled = torch.tensor([5, 151_935])
    support = BehaviorSupport.from_sampled(sampled, torch.tensor([-9.0, -9.0]))
    stats = policy_statistics(logits.requires_grad_(), support)
    exact = torch.log_softmax(logits.detach().double(), dim=-1).gather(-1, sampled[:, None])
    assert stats.log_prob.dtype == torch.float32
    torch.testing.assert_close(stats.log_prob.double(), exact.squeeze(-1), rtol=0, atol=1e-5)
    stats.log_prob.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_no_tokens_and_leading_shapes() -> None:
    none = BehaviorSupport.from_sampled(torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    logits = torch.zeros(0, 6, requires_grad=True)
    stats = policy_statistics(logits, none)
    stats.log_prob.sum().backward()
    assert stats.log_prob.shape == stats.tail_max.shape == (0,)
    assert logits.grad is not None

    case = random_case(seed=8, tokens=6)
    flat = policy_statistics(case.logits, case.support)
    ids, log_probs = (x.view(2, 3, -1) for x in (case.support.token_ids, case.support.log_probs))
    folded = policy_statistics(
        case.logits.view(2, 3, -1), BehaviorSupport(ids, log_probs, case.sampled.view(2, 3))
    )
    for name in ("log_prob", "tail_prob", "tail_max", "entropy"):
        assert torch.equal(getattr(flat, name).view(2, 3), getattr(folded, name))


def test_inputs_are_not_changed() -> None:
    case = random_case(seed=9)
    support, logits = case.support, case.logits.clone()
    before = support.token_ids.clone()
    policy_statistics(logits, support, shard=VocabShard(0, 60, 55))
    assert torch.equal(logits, case.logits)
    assert torch.equal(support.token_ids, before)


def test_errors_say_what_arrived() -> None:
    case = random_case(seed=10)
    with pytest.raises(ValueError, match="holds 30 columns, got logits with 60"):
        policy_statistics(case.logits, case.support, shard=VocabShard(0, 30, 30))
    with pytest.raises(ValueError, match=r"shape \(5,\), got a support for \(7,\)"):
        policy_statistics(case.logits[:5], case.support)
    for temperature in (0.0, -1.0, math.nan, INF):
        with pytest.raises(ValueError, match="temperature must be finite and above 0"):
            policy_statistics(case.logits, case.support, temperature=temperature)
    with pytest.raises(ValueError, match="floating-point"):
        policy_statistics(case.logits.long(), case.support)
