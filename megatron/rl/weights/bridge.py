# SPDX-License-Identifier: Apache-2.0
"""The bridge from the policy to the rollout engines: every update is sent, and proven."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron.rl.config import Config
from megatron.rl.policy.trained_model import TrainedModel
from megatron.rl.rollout.errors import WeightsLost
from megatron.rl.rollout.protocol import RolloutEngine, WeightsReport
from megatron.rl.rollout.topology import Topology
from megatron.rl.weights.certificate import (
    DEFAULT_TOLERANCE,
    Probe,
    ProbeResult,
    default_tolerance,
    require_match,
)


@dataclass(frozen=True)
class BridgeReport:
    """An update that every engine holds.

    Attributes:
        version: of the weights.
        seconds: from the first tensor gathered to the last engine that answered.
        probe_seconds: the probe's, on top.
        nbytes: sent to the engine of this rank; 0 on ranks that own none.
        digests_compared, digests_unmapped: tensors whose loaded parameters were compared, and
            those that the engine holds in a form that does not map back, on this rank.
        probe: log-probs of engines and policy on fixed tokens; None where it was not asked for.
    """

    version: int
    seconds: float
    probe_seconds: float
    nbytes: int
    digests_compared: int
    digests_unmapped: int
    probe: ProbeResult | None

    def metrics(self) -> dict[str, float]:
        """Return it under the names of ``metrics.jsonl``."""
        metrics: dict[str, float] = {
            "bridge/version": self.version,
            "bridge/seconds": self.seconds,
            "bridge/bytes": self.nbytes,
            "bridge/digests_compared": self.digests_compared,
            "bridge/digests_unmapped": self.digests_unmapped,
        }
        if self.probe is not None:
            metrics |= {
                "bridge/probe_seconds": self.probe_seconds,
                "bridge/probe_mean": self.probe.mean,
                "bridge/probe_max": self.probe.max,
            }
        return metrics


EngineScores = dict[int, Sequence[NDArray[np.float32]]]


@dataclass(frozen=True)
class _Attempt:
    """An update on this rank: what its engine reported, when, and the probe's scores."""

    report: WeightsReport | None
    sent: float
    scores: EngineScores


class WeightBridge:
    """Gives the policy's weights to every engine. Every rank holds one; updates are collective.

    Args:
        policy: this rank's part.
        topology: says which ranks own an engine.
        engine: of this rank, or None.
    """

    def __init__(
        self,
        config: Config,
        policy: TrainedModel,
        topology: Topology,
        engine: RolloutEngine | None,
    ) -> None:
        self._config = config
        self._policy = policy
        self._topology = topology
        self._engine = engine
        bridge = config.bridge
        self._probe: Probe | None = None
        self._last_probe: ProbeResult | None = None
        self._replays = config.rollout.engine == "replay"
        if bridge.certificate == "full" and not self._replays:
            self._probe = Probe(
                policy,
                config.parallel,
                engines=len(topology.engines),
                sequences=bridge.probe_sequences,
                tokens=bridge.probe_tokens,
            )

    def update(self, version: int) -> BridgeReport:
        """Send the weights as ``version`` and prove that they arrived.

        All of it is repeated, by all ranks, when an engine was replaced meanwhile that cannot be
        given them again by its owner alone; how often is limited by ``rollout.max_restarts``.

        Raises:
            WeightNamesError: what was gathered is not the engine's checkpoint; nothing was sent.
            WeightsMismatch: an engine holds something else than was sent, or than the policy.
        """
        started = time.perf_counter()
        while True:
            attempt = self._attempt(version)
            lost = torch.tensor(int(attempt is None))
            dist.all_reduce(lost)
            if attempt is not None and not lost:
                break
        report = attempt.report
        probe = self._compare(attempt.scores, version)
        return BridgeReport(
            version=version,
            seconds=attempt.sent - started,
            probe_seconds=time.perf_counter() - attempt.sent,
            nbytes=report.nbytes if report is not None else 0,
            digests_compared=report.digests_compared if report is not None else 0,
            digests_unmapped=len(report.digests_unmapped) if report is not None else 0,
            probe=probe,
        )

    def check_start(self) -> ProbeResult | None:
        """Prove that the engines, which read the checkpoint themselves, hold what the policy does.

        Collective. FP8 rollouts begin with an update instead: engines start from BF16 weights.
        """
        return self._compare(self._scores(), version=0)

    def _attempt(self, version: int) -> _Attempt | None:
        """Send all tensors and score the probe; None where this rank's engine lost them."""
        engine = self._engine
        tensors = self._policy.hf_tensors(
            # Records take no weights, only the version: nothing has to move.
            destinations=() if self._replays else self._topology.owners,
            ranks_per_node=self._topology.ranks_per_node,
            allocate=engine.weight_slot if engine is not None else None,
            bucket_bytes=self._config.bridge.bucket_mib << 20,
        )
        report = None
        try:
            if engine is not None:
                shapes = {tensor.name: tensor.shape for tensor in self._policy.plan.tensors}
                report = engine.update_weights(tensors, version, shapes)
            for _ in tensors:  # ranks without an engine only take part in the gathering
                pass
            return _Attempt(report, time.perf_counter(), self._scores())
        except WeightsLost:
            for _ in tensors:
                pass
            return None

    def _scores(self) -> EngineScores:
        """What the engine of this rank says of the probe, by its number."""
        place = self._topology.engine_of(dist.get_rank())
        if self._probe is None or self._engine is None or place is None:
            return {}
        return {place.number: self._engine.score(self._probe.sequences)}

    def _compare(self, scores: EngineScores, version: int) -> ProbeResult | None:
        if self._probe is None:
            return None
        result = self._probe.compare(scores)
        require_match(result, self._tolerance(), version)
        self._last_probe = result
        return result

    def _tolerance(self) -> float:
        config = self._config
        if config.bridge.probe_tolerance is not None:
            return config.bridge.probe_tolerance
        precision: str = config.bridge.quantization
        if precision == "none" and config.model.fp8 != "none":
            precision = "block_fp8"  # of the policy, then
        if precision == "none":
            dtypes = {config.model.dtype, config.rollout.dtype} - {"same"}
            precision = max(dtypes, key=DEFAULT_TOLERANCE.__getitem__)
        return default_tolerance(precision, self._last_probe)
