# SPDX-License-Identifier: Apache-2.0
"""How far the policy of a step lies from the one that sampled, and what moved it there.

mu is the behavior policy that the engine reported, pi_0 the policy of the trainer at the weights
that sampled, pi the policy at the time of the step. Three parts, each with the same numbers:

- ``mismatch/total/*``: mu to pi, on every token
- ``mismatch/engine/*``: mu to pi_0, the same weights in two programs
- ``mismatch/update/*``: pi_0 to pi, what optimizer steps add

For a part from p to q, with l = log q - log p of a sampled token: ``kl`` = mean(-l); ``k3`` =
mean(e^l - 1 - l), ``k3_max``; ``log_ppl_diff`` = mean over sequences of mean(-l), the log of the
perplexity's growth; ``log_prob_mean`` and ``log_prob_max`` of abs(l); ``prob_mean`` and
``prob_max`` of abs(q - p); ``topk_kl`` and ``topk_kl_max``, of the divergence D from mu on the
recorded support, and for the update of D - D_0. Those of ``BUCKETED`` come by position in the
response and by entropy of the policy too; a bucket without tokens is absent.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.rl.metrics import sequence_means, to_floats
from megatron.rl.policy.head import TokenRecord

# Last position of each bucket, counted from 1, and largest entropy; the last bucket is open.
POSITION_EDGES = (16, 64, 256, 1024, 4096)
ENTROPY_EDGES_NATS = (0.01, 0.1, 0.5, 1.0, 2.0)
BUCKETED = ("kl", "k3", "log_ppl_diff", "prob_mean", "prob_max", "topk_kl")
# Means of what adds up token by token: the update is the difference of total and engine.
ADDITIVE = ("kl", "log_ppl_diff", "topk_kl")
# verl limits log ratios to this before it squares them.
CHI2_LOG_RATIO_LIMIT = 20.0
_POSITION_BITS = 32


@dataclass(frozen=True)
class _Part:
    """From one policy to another, on tokens ``[N]``, in float64."""

    before: Tensor
    after: Tensor
    topk_kl: Tensor

    @property
    def log_ratio(self) -> Tensor:
        return self.after - self.before

    @property
    def prob_difference(self) -> Tensor:
        return (self.after.exp() - self.before.exp()).abs()

    @property
    def k3(self) -> Tensor:
        return torch.expm1(self.log_ratio) - self.log_ratio


@dataclass(frozen=True)
class MismatchState:
    """What a :class:`MismatchSplit` has learnt, to go on with after a restart.

    Attributes:
        engine: metrics of the engine's part, without ``sampled_by``; None before the first step.
        sampled_by: see :class:`MismatchSplit`; in any order.
    """

    version: int
    steps_measured: int
    engine: dict[str, float] | None
    sampled_by: TokenRecord | None


class MismatchSplit:
    """The mismatch of the optimizer steps on one rollout batch, split into engine and updates.

    With ``sampled_by`` the split is exact: each step compares its own tokens with what the weights
    that sampled them gave. Without, it costs nothing: the first step has those weights and measures
    the engine on its minibatch, a random part of the batch; later steps repeat that, and of the
    update they report the means that add up (``ADDITIVE``), as total less engine.

    Tokens of earlier versions than the batch's (resumed responses) have no pi_0. They count in the
    total; in the engine part never, and in the update part only where that is a difference.
    """

    def __init__(self, version: int, sampled_by: TokenRecord | None = None) -> None:
        """Start a rollout batch.

        Args:
            version: of the weights that the policy has before the batch's first step.
            sampled_by: every token of the batch, scored with these weights.
        """
        self.version = version
        self.steps_measured = 0
        self._engine: dict[str, float] | None = None
        self._sampled_by = None if sampled_by is None else _TokenIndex(sampled_by)

    def state(self) -> MismatchState:
        """Return what :meth:`from_state` goes on from."""
        sampled_by = None if self._sampled_by is None else self._sampled_by.tokens
        return MismatchState(self.version, self.steps_measured, self._engine, sampled_by)

    @classmethod
    def from_state(cls, state: MismatchState) -> "MismatchSplit":
        """Go on within a rollout batch."""
        split = cls(state.version, state.sampled_by)
        split.steps_measured, split._engine = state.steps_measured, state.engine
        return split

    def measure(self, tokens: TokenRecord) -> dict[str, float]:
        """Return the metrics of the next step, whose tokens over all ranks these are."""
        self.steps_measured += 1
        if tokens.sequence.numel() == 0:
            return {}
        total = _Part(
            tokens.behavior_log_prob.double(),
            tokens.policy_log_prob.double(),
            tokens.topk_kl.double(),
        )
        totals = _part_metrics(total, tokens)
        metrics = _named("total", totals) | _bucket_shares(tokens) | _aliases(total, tokens)
        fresh = tokens.policy_version == self.version
        if self._sampled_by is not None:
            return metrics | self._exact(select(tokens, fresh))
        if self._engine is None:
            self._engine = _engine_metrics(_rows(total, fresh), select(tokens, fresh))
        metrics |= self._engine
        for name, value in totals.items():
            engine = self._engine.get(f"mismatch/engine/{name}")
            if engine is not None and name.split("/")[0] in ADDITIVE:
                metrics[f"mismatch/update/{name}"] = value - engine
        return metrics

    def _exact(self, tokens: TokenRecord) -> dict[str, float]:
        if tokens.sequence.numel() == 0:
            return {}
        assert self._sampled_by is not None
        sampled_by = self._sampled_by.find(tokens)
        log_pi_0, topk_kl_0 = sampled_by.policy_log_prob.double(), sampled_by.topk_kl.double()
        engine = _Part(tokens.behavior_log_prob.double(), log_pi_0, topk_kl_0)
        update = _Part(
            log_pi_0, tokens.policy_log_prob.double(), tokens.topk_kl.double() - topk_kl_0
        )
        return _engine_metrics(engine, tokens) | _named("update", _part_metrics(update, tokens))


class _TokenIndex:
    """Finds tokens of a rollout batch by sequence and position.

    Attributes:
        tokens: all of them.
    """

    def __init__(self, tokens: TokenRecord) -> None:
        keys, order = _keys(tokens).sort()
        self._keys, self.tokens = keys, select(tokens, order)

    def find(self, tokens: TokenRecord) -> TokenRecord:
        wanted = _keys(tokens)
        rows = torch.searchsorted(self._keys, wanted).clamp_max(max(len(self._keys) - 1, 0))
        if len(self._keys) == 0 or (self._keys[rows] != wanted).any():
            raise ValueError(
                "MismatchSplit: expected every token of a step among those that were scored before "
                "the first step; some are not, so sequence numbers or positions have changed"
            )
        return select(self.tokens, rows)


def _keys(tokens: TokenRecord) -> Tensor:
    return (tokens.sequence.long() << _POSITION_BITS) + tokens.position.long()


def select(tokens: TokenRecord, rows: Tensor) -> TokenRecord:
    """Return the given rows (indices or bool) of every field."""
    selected: dict[str, Any] = {}
    for field in dataclasses.fields(TokenRecord):
        column = getattr(tokens, field.name)
        selected[field.name] = None if column is None else column[rows]
    return TokenRecord(**selected)


def _rows(part: _Part, rows: Tensor) -> _Part:
    return _Part(part.before[rows], part.after[rows], part.topk_kl[rows])


def _named(part: str, metrics: dict[str, float]) -> dict[str, float]:
    return {f"mismatch/{part}/{name}": value for name, value in metrics.items()}


def _engine_metrics(part: _Part, tokens: TokenRecord) -> dict[str, float]:
    """The engine's part, and what others call its metrics: they measure at the sampling weights."""
    if tokens.sequence.numel() == 0:
        return {}
    difference = part.prob_difference
    aliases = {
        "training/rollout_probs_diff_max": difference.max(),
        "training/rollout_probs_diff_mean": difference.mean(),
        # The sample's deviation, as torch.std gives it; verl reports 0 for a single token.
        "training/rollout_probs_diff_std": difference.std(correction=int(len(difference) > 1)),
        "token_mult_prob_error": part.log_ratio.abs().exp().mean(),
        "gen_kl_error": part.k3.mean(),
    }
    return _named("engine", _part_metrics(part, tokens)) | to_floats(aliases)


def _aliases(total: _Part, tokens: TokenRecord) -> dict[str, float]:
    """What other trainers measure with the policy of the step, under their names."""
    log_ratio, k3 = total.log_ratio, total.k3
    policy_log_ppl = -sequence_means(total.after, tokens.sequence)
    behavior_log_ppl = -sequence_means(total.before, tokens.sequence)
    log_ppl_diff = policy_log_ppl - behavior_log_ppl
    lengths = torch.unique(tokens.sequence, return_counts=True)[1]
    limit = CHI2_LOG_RATIO_LIMIT
    metrics = {
        "rollout_corr/kl": -log_ratio.mean(),
        "rollout_corr/k3_kl": k3.mean(),
        "rollout_corr/training_ppl": policy_log_ppl.exp().mean(),
        "rollout_corr/training_log_ppl": policy_log_ppl.mean(),
        "rollout_corr/rollout_ppl": behavior_log_ppl.exp().mean(),
        "rollout_corr/rollout_log_ppl": behavior_log_ppl.mean(),
        "rollout_corr/log_ppl_diff": log_ppl_diff.mean(),
        "rollout_corr/log_ppl_abs_diff": log_ppl_diff.abs().mean(),
        "rollout_corr/log_ppl_diff_max": log_ppl_diff.max(),
        "rollout_corr/log_ppl_diff_min": log_ppl_diff.min(),
        "rollout_corr/ppl_ratio": log_ppl_diff.exp().mean(),
        "rollout_corr/chi2_token": (2 * log_ratio.clamp(-limit, limit)).exp().mean() - 1,
        "rollout_corr/chi2_seq": (2 * (-log_ppl_diff * lengths).clamp(-limit, limit)).exp().mean()
        - 1,
        "mismatch_kl/mean": k3.mean(),
        "mismatch_kl/max": k3.max(),
        "actor/topk_kl_mean": total.topk_kl.mean(),
        "actor/topk_kl_max": total.topk_kl.max(),
    }
    return to_floats(metrics)


def _part_metrics(part: _Part, tokens: TokenRecord) -> dict[str, float]:
    """The numbers of one part: over all tokens, then ``name/bucket`` for those of ``BUCKETED``."""
    log_ratio, k3, difference = part.log_ratio, part.k3, part.prob_difference
    metrics = {
        "k3_max": k3.max(),
        "log_prob_mean": log_ratio.abs().mean(),
        "log_prob_max": log_ratio.abs().max(),
        "topk_kl_max": part.topk_kl.max(),
    }
    columns = torch.stack([-log_ratio, k3, difference, part.topk_kl])
    for number, suffix in _each_bucketing(tokens):
        counts = torch.bincount(number, minlength=len(suffix))
        sums = columns.new_zeros(len(columns), len(suffix)).index_add_(1, number, columns)
        kl, k3_mean, prob_mean, topk_kl = sums / counts
        prob_max = columns.new_zeros(len(suffix)).scatter_reduce_(0, number, difference, "amax")
        table = {
            "kl": kl,
            "k3": k3_mean,
            "log_ppl_diff": _sequence_mean_of_means(
                -log_ratio, tokens.sequence, number, len(suffix)
            ),
            "prob_mean": prob_mean,
            "prob_max": prob_max,
            "topk_kl": topk_kl,
        }
        for bucket in counts.nonzero().flatten().tolist():
            metrics |= {f"{name}{suffix[bucket]}": table[name][bucket] for name in BUCKETED}
    return to_floats(metrics)


def _bucket_shares(tokens: TokenRecord) -> dict[str, float]:
    """The share of tokens in each bucket, to weigh the bucket's means by."""
    metrics: dict[str, float] = {}
    for number, suffix in _each_bucketing(tokens)[1:]:
        counts = torch.bincount(number, minlength=len(suffix)).tolist()
        metrics |= {
            f"mismatch/share{name}": count / len(number)
            for name, count in zip(suffix, counts, strict=True)
            if count
        }
    return metrics


def _each_bucketing(tokens: TokenRecord) -> list[tuple[Tensor, list[str]]]:
    """All tokens, by position, by entropy: each token's bucket, and the suffix of each bucket."""
    position = torch.bucketize(tokens.position + 1, tokens.position.new_tensor(POSITION_EDGES))
    entropy = tokens.entropy.double()
    by_entropy = torch.bucketize(entropy, entropy.new_tensor(ENTROPY_EDGES_NATS))
    starts = [1, *(edge + 1 for edge in POSITION_EDGES)]
    return [
        (torch.zeros_like(position), [""]),
        (position, _suffixes("position", starts, POSITION_EDGES)),
        (by_entropy, _suffixes("entropy", [0, *ENTROPY_EDGES_NATS], ENTROPY_EDGES_NATS)),
    ]


def _suffixes(kind: str, starts: Sequence[float], ends: Sequence[float]) -> list[str]:
    closed = [f"/{kind}_{low:g}_{high:g}" for low, high in zip(starts, ends, strict=False)]
    return [*closed, f"/{kind}_over_{ends[-1]:g}"]


def _sequence_mean_of_means(
    values: Tensor, sequence: Tensor, bucket: Tensor, buckets: int
) -> Tensor:
    """Per bucket, the mean over sequences of their tokens' mean there, ``[buckets]``."""
    numbers, index = torch.unique(sequence, return_inverse=True)
    cell = index * buckets + bucket
    counts = torch.bincount(cell, minlength=len(numbers) * buckets)
    sums = values.new_zeros(len(numbers) * buckets).index_add_(0, cell, values)
    present = (counts > 0).view(-1, buckets)
    means = torch.where(present, (sums / counts.clamp_min(1)).view(-1, buckets), 0.0)
    return means.sum(dim=0) / present.sum(dim=0)
