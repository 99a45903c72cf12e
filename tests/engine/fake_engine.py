# SPDX-License-Identifier: Apache-2.0
"""VLLMEngine with a worker that starts at once and has no vLLM, see fake_worker.py."""

import sys
from pathlib import Path

from megatron.rl.rollout.client.vllm_engine import VLLMEngine

FAKE_WORKER = Path(__file__).with_name("fake_worker.py")


class GoodFakeEngine(VLLMEngine):
    """An engine whose worker does what it is told; `counter` is a file that counts the starts."""

    counter = ""

    def _worker_command(self) -> list[str]:
        return [sys.executable, str(FAKE_WORKER), "good", self.counter]
