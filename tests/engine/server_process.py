# SPDX-License-Identifier: Apache-2.0
"""A real vLLM server on the loopback interface, for as long as a test needs it."""

import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from megatron.rl.rollout.checkpoint_index import read_checkpoint_index
from megatron.rl.rollout.client.engine_config import VLLMEngineConfig, worker_environment
from megatron.rl.rollout.server.start import VLLMServerConfig, server_arguments

STOP_TIMEOUT_S = 30.0


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def running_server(
    config: VLLMServerConfig, port: int, log: Path, environment: Mapping[str, str]
) -> Iterator[None]:
    """Start a float32 server on CPU as our error messages advise; it loads for half a minute."""
    command = [sys.executable, "-P", "-m"]
    command += server_arguments(config, read_checkpoint_index(config.model_path))
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enforce-eager", "--no-enable-chunked-prefill"]
    command += ["--max-num-batched-tokens", "8192", "--kv-cache-memory-bytes", str(100 << 20)]
    engine = VLLMEngineConfig(config.model_path, dtype="float32", device="cpu", threads=1)
    variables = worker_environment(engine) | {"VLLM_SERVER_DEV_MODE": "1"} | dict(environment)
    with open(log, "wb") as stream:
        process = subprocess.Popen(
            command, env=variables, stdout=stream, stderr=subprocess.STDOUT, cwd=log.parent
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
