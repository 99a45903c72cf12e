# SPDX-License-Identifier: Apache-2.0
"""Engine and policy on the same GPUs: one works, the other has given its memory up."""

import torch.distributed as dist

from megatron.rl.policy.trained_model import TrainedModel
from megatron.rl.rollout.protocol import RolloutEngine


class SharedGpus:
    """Whose turn it is. All methods are collective; an engine may use the GPUs of several ranks.

    Args:
        engine: of this rank, if it has one; it is the first to work.
        shared: there are turns (``rollout.sleep``). Otherwise both have their memory all the time.
    """

    def __init__(self, policy: TrainedModel, engine: RolloutEngine | None, *, shared: bool) -> None:
        self._policy = policy
        self._engine = engine
        self._shared = shared
        self._engine_awake = True
        if shared:
            policy.offload()

    def to_engine(self) -> None:
        """Let the engine work."""
        if self._engine_awake:
            return
        self._policy.offload()
        dist.barrier()
        if self._engine is not None:
            self._engine.wake()
        self._engine_awake = True

    def to_policy(self) -> None:
        """Let the policy work."""
        if not self._shared or not self._engine_awake:
            return
        if self._engine is not None:
            self._engine.sleep()
        self._engine_awake = False
        dist.barrier()
        self._policy.restore()

    def end_engine(self) -> None:
        """End the engine for good, whatever it does, and let the policy work."""
        if self._engine is not None:
            self._engine.close()
        self._engine_awake = False
        dist.barrier()
        self._policy.restore()
