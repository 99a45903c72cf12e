# SPDX-License-Identifier: Apache-2.0
"""Sleep and wake as the client sees them, with a fake worker; vLLM itself sleeps on CUDA only."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.rl.rollout.client.engine_config import llm_arguments
from megatron.rl.rollout.client.vllm_engine import VLLMEngine
from megatron.rl.rollout.errors import EngineConfigError, EngineRequestError
from megatron.rl.rollout.protocol import GenerationRequest, SamplingSettings
from tests.engine.conftest import TinyCheckpoint, cpu_config
from tests.engine.fake_engine import GoodFakeEngine

REQUEST = GenerationRequest.from_lists([[1, 2]], 3, SamplingSettings(max_tokens=2, top_logprobs=4))


@pytest.fixture
def engine(
    checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[GoodFakeEngine]:
    monkeypatch.setattr(GoodFakeEngine, "counter", str(tmp_path / "starts"))
    config = cpu_config(
        checkpoint.folder, device="cuda", threads=None, sleep=True, log_path=str(tmp_path / "log")
    )
    with GoodFakeEngine(config) as engine:
        yield engine


def test_an_engine_sleeps_and_wakes(engine: GoodFakeEngine) -> None:
    engine.wake()  # it is awake
    first = engine.generate(REQUEST)
    engine.sleep()
    engine.sleep()  # as good as once
    for call in (lambda: engine.generate(REQUEST), lambda: engine.update_weights({}, 1)):
        with pytest.raises(EngineRequestError, match="sleeps"):
            call()
    engine.wake()
    assert engine.generate(REQUEST).response_tokens.tolist() == first.response_tokens.tolist()


def test_a_process_that_died_asleep_is_replaced_by_one_awake(engine: GoodFakeEngine) -> None:
    engine.wait_ready()
    engine.sleep()
    pid = engine.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    engine.wake()
    assert engine.generate(REQUEST).num_sequences == 3
    assert engine.restarts == 1
    assert engine.pid != pid


@pytest.mark.parametrize("level", [0, 2, 3])
def test_only_level_one(engine: GoodFakeEngine, level: int) -> None:
    with pytest.raises(EngineRequestError, match=f"level {level} is refused, expected 1"):
        engine.sleep(level)


def test_sleep_is_set_beforehand_and_on_cuda_only(checkpoint: TinyCheckpoint) -> None:
    with pytest.raises(EngineConfigError, match=r"set rollout\.sleep to false"):
        cpu_config(checkpoint.folder, sleep=True)
    with pytest.raises(EngineConfigError, match=r"set rollout\.sleep"):
        VLLMEngine(cpu_config(checkpoint.folder)).sleep()
    for sleep in (False, True):
        config = cpu_config(checkpoint.folder, device="cuda", threads=None, sleep=sleep)
        assert llm_arguments(config)["enable_sleep_mode"] is sleep


@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
def test_transports_between_gpus_need_gpus(checkpoint: TinyCheckpoint, transport: str) -> None:
    with pytest.raises(EngineConfigError, match=r"set bridge\.transport to auto"):
        cpu_config(checkpoint.folder, transport=transport)
