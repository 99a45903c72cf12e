# SPDX-License-Identifier: Apache-2.0
"""A run that samples from a vLLM server, which somebody started, instead of its own engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.rl.rollout.server.start import VLLMServerConfig
from tests.e2e.runs import Run, start
from tests.engine.server_process import free_port, running_server

TOKEN = "hunter2-of-this-test"
# Those of runs.py: the longest prompt and response, and the default K.
MAX_MODEL_LEN = 64 + 12
TOP_LOGPROBS = 20
RUN_TIMEOUT_S = 400.0


@pytest.mark.slow
def test_a_run_on_a_server(
    tmp_path: Path, model: Path, finished: tuple[Run, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It samples what the run with its own engine has sampled, and proves every update."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    config = VLLMServerConfig(url, str(model), MAX_MODEL_LEN, top_logprobs=TOP_LOGPROBS)
    monkeypatch.setenv("TEST_SERVER_TOKEN", TOKEN)
    with running_server(config, port, tmp_path / "server.log", {"VLLM_API_KEY": TOKEN}):
        overrides = [
            "rollout.engine=vllm_server",
            f"rollout.server_url={url}",
            "rollout.server_token_variable=TEST_SERVER_TOKEN",
            f"rollout.max_num_seqs={config.max_num_seqs}",
        ]
        run = start(tmp_path / "run", model, overrides)
        code, output = run.wait(RUN_TIMEOUT_S)
    assert code == 0, output
    first, second = run.metrics("rollout")
    own, _ = finished[0].metrics("rollout")
    assert first["reward"] == own["reward"]
    assert first["response_tokens"] == own["response_tokens"]
    assert (first["policy_version"], second["policy_version"]) == (0, 1)
    for metrics in (first, second):
        assert metrics["bridge/digests_compared"] > 0
        assert metrics["bridge/digests_unmapped"] == 0
        assert metrics["bridge/probe_mean"] < 1e-5
    for path in run.run_folder.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path
