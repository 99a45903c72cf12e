# SPDX-License-Identifier: Apache-2.0
"""What the rollout engine reported about the behaviour policy mu, per token.

The support K = TopK(mu) + {sampled token} is stored as ids and log-probabilities; everything
outside of it is one unseen *tail* of which only the mass is known.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

UNUSED_TOKEN = -1
"""Token id of a support column that holds nothing; its log-probability is -inf."""


@dataclass(frozen=True, eq=False)
class BehaviorSupport:
    """The support of the behaviour policy: top-K log-probabilities plus the sampled token.

    Support of a token: K = TopK(mu) + {sampled}, with tail mass mu_tail = 1 - sum_{i in K} mu_i.

    Shapes: ``token_ids`` [T, S] int64, ``log_probs`` [T, S] float32 or wider, ``sampled`` [T]
    int64 (token ids, not columns). Any leading shape may stand in place of [T].

    Gradient: none; the behaviour policy is a record of the past.

    Edge cases: a column whose id is negative is unused, whatever its log-probability. Ids of used
    columns are unique in a row; the constructors ``from_topk`` and ``from_sampled`` see to that.
    Only shapes and dtypes are checked, since looking at values would stall an accelerator: a NaN
    log-probability (garbage from the engine) is kept and makes every result of its token NaN. A
    log-probability of -inf on the sampled token means that the engine calls it impossible. Wrong
    shapes and dtypes raise ``ValueError``.

    Source: predictive divergence masks, section 2 (the reduced support of Eq. 5).
    """

    token_ids: Tensor
    log_probs: Tensor
    sampled: Tensor

    def __post_init__(self) -> None:
        _require_int64("token_ids", self.token_ids)
        _require_int64("sampled", self.sampled)
        _require_float("log_probs", self.log_probs)
        if self.log_probs.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"BehaviorSupport: log_probs must be float32 or float64, got {self.log_probs.dtype}"
            )
        if self.token_ids.dim() < 1 or self.token_ids.shape[-1] < 1:
            raise ValueError(
                "BehaviorSupport: token_ids must be [T, S] with S >= 1, got shape "
                f"{tuple(self.token_ids.shape)}"
            )
        _require_shape("log_probs", self.log_probs, tuple(self.token_ids.shape))
        _require_shape("sampled", self.sampled, tuple(self.token_ids.shape[:-1]))

    @classmethod
    def from_topk(
        cls,
        topk_ids: Tensor,
        topk_log_probs: Tensor,
        sampled_ids: Tensor,
        sampled_log_probs: Tensor,
    ) -> BehaviorSupport:
        """Join the K top entries and the sampled token, each token counted once.

        The result has S = K + 1 columns: the K entries in the order given, then the sampled token
        if it is not among them (otherwise that last column is unused).

        Shapes: ``topk_ids`` [T, K] of any integer dtype, ``topk_log_probs`` [T, K] of any float
        dtype, ``sampled_ids`` [T], ``sampled_log_probs`` [T]. Log-probabilities narrower than
        float32 are widened; float64 is kept.

        Gradient: none.

        Edge cases: an entry with a negative id or with log-probability -inf is padding and
        becomes an unused column. A repeated id keeps its first entry. Where the sampled token is
        among the top entries both log-probabilities must agree, since one engine reported both;
        the sampled one is stored. A negative sampled id means that there is no token (a prompt or
        padding position): nothing is added, and ``sampled_log_probs`` reads NaN. Wrong shapes and
        dtypes raise ``ValueError``; NaN is not looked for (see the class).

        Source: predictive divergence masks, section 2 (definition of the reduced support).
        """
        for name, ids in (("topk_ids", topk_ids), ("sampled_ids", sampled_ids)):
            _require_integer(name, ids)
        for name, values in (
            ("topk_log_probs", topk_log_probs),
            ("sampled_log_probs", sampled_log_probs),
        ):
            _require_float(name, values)
        if topk_ids.dim() < 1:
            raise ValueError("BehaviorSupport: topk_ids must be [T, K], got a scalar")
        _require_shape("topk_log_probs", topk_log_probs, tuple(topk_ids.shape))
        _require_shape("sampled_ids", sampled_ids, tuple(topk_ids.shape[:-1]))
        _require_shape("sampled_log_probs", sampled_log_probs, tuple(topk_ids.shape[:-1]))

        dtype = torch.promote_types(topk_log_probs.dtype, sampled_log_probs.dtype)
        dtype = torch.promote_types(dtype, torch.float32)
        sampled = sampled_ids.detach().long()
        sampled_values = sampled_log_probs.detach().to(dtype)
        values = topk_log_probs.detach().to(dtype)
        ids = topk_ids.detach().long()

        ids = torch.where((ids >= 0) & (values != -torch.inf), ids, UNUSED_TOKEN)
        ids = torch.where(_repeats_earlier_column(ids), UNUSED_TOKEN, ids)
        used = ids >= 0
        is_sampled = used & (ids == sampled.unsqueeze(-1))
        values = torch.where(used, values, -torch.inf)
        values = torch.where(is_sampled, sampled_values.unsqueeze(-1), values)

        add_sampled = (sampled >= 0) & ~is_sampled.any(dim=-1)
        extra_id = torch.where(add_sampled, sampled, UNUSED_TOKEN)
        extra_value = torch.where(add_sampled, sampled_values, -torch.inf)
        return cls(
            token_ids=torch.cat([ids, extra_id.unsqueeze(-1)], dim=-1),
            log_probs=torch.cat([values, extra_value.unsqueeze(-1)], dim=-1),
            sampled=sampled,
        )

    @classmethod
    def from_sampled(cls, sampled_ids: Tensor, sampled_log_probs: Tensor) -> BehaviorSupport:
        """Build the binary support {sampled token, everything else}, one column wide.

        Shapes: ``sampled_ids`` [T] of any integer dtype, ``sampled_log_probs`` [T] of any float
        dtype.

        Gradient: none.

        Edge cases and errors: those of ``from_topk`` with K = 0.

        Source: predictive divergence masks, Appendix C, Eq. 28.
        """
        no_ids = sampled_ids.new_empty((*sampled_ids.shape, 0))
        no_values = sampled_log_probs.new_empty((*sampled_log_probs.shape, 0))
        return cls.from_topk(no_ids, no_values, sampled_ids, sampled_log_probs)

    @property
    def valid(self) -> Tensor:
        """Which columns hold a token: [T, S] bool."""
        return self.token_ids >= 0

    @property
    def is_sampled(self) -> Tensor:
        """Which column holds the sampled token: [T, S] bool, at most one a row."""
        return self.valid & (self.token_ids == self.sampled.unsqueeze(-1))

    @property
    def topk_floor(self) -> Tensor:
        """A log-probability that no unseen token exceeds, 0 where the support tells of none: [T].

        The smallest of the columns *other than the sampled token's*. Those are top-K entries, and
        what is not among the top K is no likelier than any of them. The sampled token proves
        nothing: it may be in the support only because it was sampled, and then tokens outside can
        be likelier. Engines that list it beside the K others hide which of both it is, so it
        is left out even where it belongs to the top K.
        """
        others = self.valid & ~self.is_sampled
        lowest = torch.where(others, self.log_probs, torch.inf).amin(dim=-1)
        return torch.where(lowest == torch.inf, 0.0, lowest)

    @property
    def sampled_column(self) -> Tensor:
        """Column of the sampled token, or -1 where the support does not hold it: [T] int64."""
        found = self.is_sampled
        return torch.where(found.any(dim=-1), found.to(torch.uint8).argmax(dim=-1), -1)

    @property
    def sampled_log_probs(self) -> Tensor:
        """log mu of the sampled token, NaN where the support does not hold it: [T].

        Never the log-probability of another column: a token that is absent must not read as
        somebody else.
        """
        return self.gather_sampled(self.log_probs)

    @property
    def tail_prob(self) -> Tensor:
        """mu_tail = 1 - sum_{i in K} mu_i, within [0, 1]: [T].

        Written as (1 - mu_max) - (the rest of the support) so that a tail far below the float
        resolution of 1 survives when one token holds almost all of the mass.
        """
        log_probs = torch.where(self.valid, self.log_probs.double(), -torch.inf)
        top = log_probs.argmax(dim=-1, keepdim=True)
        others = log_probs.exp().scatter(-1, top, 0.0).sum(dim=-1)
        tail = -torch.expm1(log_probs.gather(-1, top).squeeze(-1)) - others
        return tail.clamp(0.0, 1.0).to(self.log_probs.dtype)

    def gather_sampled(self, values: Tensor) -> Tensor:
        """Pick the sampled token's entry of ``values`` [T, S], NaN where it is absent: [T]."""
        column = self.sampled_column
        picked = values.gather(-1, column.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        return torch.where(column >= 0, picked, torch.nan)


def _repeats_earlier_column(ids: Tensor) -> Tensor:
    """Mark the columns of ``ids`` [T, K] whose id stands in an earlier column: [T, K] bool."""
    ordered, order = ids.sort(dim=-1, stable=True)
    repeated = torch.zeros_like(ids, dtype=torch.bool)
    repeated[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    return torch.zeros_like(repeated).scatter(-1, order, repeated)


def _require_int64(name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.int64:
        raise ValueError(f"BehaviorSupport: {name} must be int64, got {tensor.dtype}")


def _require_integer(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"BehaviorSupport: {name} must be an integer tensor, got {tensor.dtype}")


def _require_float(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        raise ValueError(f"BehaviorSupport: {name} must be floating point, got {tensor.dtype}")


def _require_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise ValueError(
            f"BehaviorSupport: {name} must have shape {expected}, got {tuple(tensor.shape)}"
        )
