# SPDX-License-Identifier: Apache-2.0
"""The bridge from the policy to the rollout engines: every update is sent, and proven."""

import time
from dataclasses import dataclass

import torch.distributed as dist

from megatron.rl.config import Config
from megatron.rl.policy.trained_model import TrainedModel
from megatron.rl.rollout.protocol import RolloutEngine
from megatron.rl.rollout.topology import Topology
from megatron.rl.weights.certificate import (
    DEFAULT_TOLERANCE,
    Probe,
    ProbeResult,
    default_tolerance,
    require_match,
)
from megatron.rl.weights.names import hf_shapes


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
        self._shapes = hf_shapes(policy.architecture)
        bridge = config.bridge
        self._probe: Probe | None = None
        self._last_probe: ProbeResult | None = None
        if bridge.certificate == "full" and config.rollout.engine != "replay":
            self._probe = Probe(
                policy,
                config.parallel,
                engines=len(topology.engines),
                sequences=bridge.probe_sequences,
                tokens=bridge.probe_tokens,
            )

    def update(self, version: int) -> BridgeReport:
        """Send the weights as ``version`` and prove that they arrived.

        Raises:
            WeightNamesError: what was gathered is not the engine's checkpoint; nothing was sent.
            WeightsMismatch: an engine holds something else than was sent, or than the policy.
        """
        started = time.perf_counter()
        engine = self._engine
        tensors = self._policy.hf_tensors(
            destinations=self._topology.owners,
            ranks_per_node=self._topology.ranks_per_node,
            allocate=engine.weight_slot if engine is not None else None,
        )
        report = None
        if engine is not None:
            shapes = {tensor.name: tensor.shape for tensor in self._policy.plan.tensors}
            report = engine.update_weights(tensors, version, shapes)
        for _ in tensors:  # ranks without an engine only take part in the gathering
            pass
        sent = time.perf_counter()
        probe = self._check(version)
        return BridgeReport(
            version=version,
            seconds=sent - started,
            probe_seconds=time.perf_counter() - sent,
            nbytes=report.nbytes if report is not None else 0,
            digests_compared=report.digests_compared if report is not None else 0,
            digests_unmapped=len(report.digests_unmapped) if report is not None else 0,
            probe=probe,
        )

    def check_start(self) -> ProbeResult | None:
        """Prove that the engines, which read the checkpoint themselves, hold what the policy does.

        Collective. FP8 rollouts begin with an update instead: engines start from BF16 weights.
        """
        return self._check(version=0)

    def _check(self, version: int) -> ProbeResult | None:
        if self._probe is None:
            return None
        scores = {}
        place = self._topology.engine_of(dist.get_rank())
        if self._engine is not None and place is not None:
            scores[place.number] = self._engine.score(self._probe.sequences)
        result = self._probe.compare(scores)
        require_match(result, self._tolerance(), version)
        self._last_probe = result
        return result

    def _tolerance(self) -> float:
        config = self._config
        if config.bridge.probe_tolerance is not None:
            return config.bridge.probe_tolerance
        precision: str = config.bridge.quantization
        if precision == "none":
            dtypes = {config.model.dtype, config.rollout.dtype} - {"same"}
            precision = max(dtypes, key=DEFAULT_TOLERANCE.__getitem__)
        return default_tolerance(precision, self._last_probe)
