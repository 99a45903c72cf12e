# SPDX-License-Identifier: Apache-2.0
"""What we add to each of vLLM's own workers, by its `worker_extension_cls`.

vLLM imports this module in every worker before it loads the model, mixes the class into its worker,
and calls its methods by name on every tensor-parallel rank.
"""

from typing import Any

from .vllm_plugin import register

register()


class RolloutWorkerExtension:
    """Mixed into vLLM's worker class, hence no state and no constructor."""

    def rollout_digests(self, names: list[str]) -> dict[str, Any]:
        """Digests of this worker's parameters, see `EngineDigests.as_json`.

        Args:
            names: the checkpoint's tensors that the last update brought.
        """
        from .loaded_parameters import digest_model

        worker: Any = self
        return digest_model(worker.model_runner.get_model(), frozenset(names)).as_json()
