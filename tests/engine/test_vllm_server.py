# SPDX-License-Identifier: Apache-2.0
"""A real vLLM server on this machine: the same rollouts as our own engine, and exact updates."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.rl.rollout.errors import (
    EngineConfigError,
    EngineRequestError,
    EngineStartError,
    WeightNamesError,
)
from megatron.rl.rollout.protocol import GenerationRequest, SamplingSettings
from megatron.rl.rollout.rollouts import Rollouts
from megatron.rl.rollout.server.engine import VLLMServerConfig, VLLMServerEngine
from tests.engine.conftest import MAX_MODEL_LEN, TinyCheckpoint, cpu_config, run_engine
from tests.engine.server_process import free_port, running_server
from tests.engine.tiny_model import perturbed

pytestmark = pytest.mark.slow

TOKEN = "hunter2-of-this-test"
K = 20
REQUEST = GenerationRequest.from_lists(
    [[3, 4, 5], [6, 7], [8] * 9],
    4,
    SamplingSettings(
        max_tokens=24, top_logprobs=K, topk_precision="float32", seed=5, stop_token_ids=(1,)
    ),
)
SCORED = [np.array([3, 4, 5, 6], dtype=np.int32), np.array([9, 1, 2], dtype=np.int32)]


@dataclass(frozen=True)
class Expected:
    """What our own engine says, with the checkpoint's weights and with others."""

    rollouts: Rollouts
    scores: list[np.ndarray]
    rollouts_perturbed: Rollouts


@pytest.fixture(scope="module")
def expected(
    checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Expected]:
    log = tmp_path_factory.mktemp("log") / "engine.log"
    for held in run_engine(cpu_config(checkpoint.folder, log_path=str(log))):
        engine = held.engine
        rollouts, scores = engine.generate(REQUEST), engine.score(SCORED)
        engine.update_weights(perturbed(checkpoint.tensors, 1), 1)
        result = Expected(rollouts, scores, engine.generate(REQUEST))
    yield result


def config_for(checkpoint: TinyCheckpoint, port: int) -> VLLMServerConfig:
    return VLLMServerConfig(
        f"http://127.0.0.1:{port}",
        str(checkpoint.folder),
        MAX_MODEL_LEN,
        token_variable="TEST_SERVER_TOKEN",
        top_logprobs=K,
        start_timeout_s=300,
        stall_timeout_s=120,
    )


@pytest.fixture(scope="module")
def server(
    checkpoint: TinyCheckpoint, expected: Expected, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VLLMServerConfig]:
    """Started after our own engine has ended: two at a time are too much for a small machine."""
    port = free_port()
    log = tmp_path_factory.mktemp("server") / "server.log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_SERVER_TOKEN", TOKEN)
        config = config_for(checkpoint, port)
        with running_server(config, port, log, {"VLLM_API_KEY": TOKEN}):
            yield config
    assert TOKEN not in log.read_text(errors="replace")


@pytest.fixture
def engine(server: VLLMServerConfig) -> Iterator[VLLMServerEngine]:
    with VLLMServerEngine(server) as engine:
        engine.wait_ready()
        yield engine


def assert_same(got: Rollouts, wanted: Rollouts) -> None:
    assert np.array_equal(got.response_tokens, wanted.response_tokens)
    assert np.array_equal(got.response_offsets, wanted.response_offsets)
    assert np.array_equal(got.finished, wanted.finished)
    assert np.array_equal(got.prompt_index, wanted.prompt_index)
    # Requests reach a server one by one, so that other rows share a step.
    assert np.abs(got.log_probs - wanted.log_probs).max() < 1e-5
    (ids, values), (wanted_ids, wanted_values) = got.topk.decode(), wanted.topk.decode()
    assert (ids == wanted_ids).mean() > 0.999  # equal but for ties
    assert np.abs(values - wanted_values).max() < 1e-5


def test_rollouts_and_scores_are_those_of_our_own_engine(
    engine: VLLMServerEngine, expected: Expected
) -> None:
    assert engine.info is not None
    assert engine.info.vllm_version.startswith("0.32")
    seen: list[int] = []
    rollouts = engine.generate(REQUEST, lambda part: seen.extend(part.index.tolist()))
    assert_same(rollouts, expected.rollouts)
    assert sorted(seen) == list(range(REQUEST.num_sequences))
    assert (rollouts.policy_versions == 0).all()
    assert not rollouts.aborted.any()
    for got, wanted in zip(engine.score(SCORED), expected.scores, strict=True):
        assert np.abs(got - wanted).max() < 1e-5


def test_an_update_and_back(
    engine: VLLMServerEngine, expected: Expected, checkpoint: TinyCheckpoint
) -> None:
    before = engine.generate(REQUEST)
    other = perturbed(checkpoint.tensors, 1)
    report = engine.update_weights(other, 7)
    assert report.digests_compared == report.tensors == len(checkpoint.tensors)
    assert report.digests_unmapped == ()
    changed = engine.generate(REQUEST)
    assert_same(changed, expected.rollouts_perturbed)
    assert (changed.policy_versions == 7).all()
    assert not np.array_equal(changed.log_probs, before.log_probs)
    engine.update_weights(iter(checkpoint.tensors.items()), 8)
    assert_same(engine.generate(REQUEST), expected.rollouts)


def test_a_new_run_gets_the_checkpoints_weights(
    server: VLLMServerConfig, expected: Expected, checkpoint: TinyCheckpoint
) -> None:
    """The server still holds what another run left there."""
    with VLLMServerEngine(server) as first:
        first.wait_ready()
        first.update_weights(perturbed(checkpoint.tensors, 2), 3)
        events: list[str] = []
        with VLLMServerEngine(server, on_event=events.append) as second:
            second.wait_ready()
            assert any("weights of the model folder" in event for event in events)
            assert_same(second.generate(REQUEST), expected.rollouts)
            with pytest.raises(Exception, match="somebody else updates it"):
                first.generate(REQUEST)


def test_wrong_names_change_nothing(engine: VLLMServerEngine, checkpoint: TinyCheckpoint) -> None:
    before = engine.generate(REQUEST)
    tensors = dict(checkpoint.tensors)
    tensors.pop("model.norm.weight")
    with pytest.raises(WeightNamesError, match="missing"):
        engine.update_weights(tensors, 1)
    assert np.array_equal(engine.generate(REQUEST).log_probs, before.log_probs)


def test_requests_that_would_end_the_server_do_not_reach_it(engine: VLLMServerEngine) -> None:
    settings = SamplingSettings(max_tokens=4)
    for prompt, match in (([3, 128], "outside the vocabulary"), ([3] * 300, "max_model_len")):
        with pytest.raises(EngineRequestError, match=match):
            engine.generate(GenerationRequest.from_lists([prompt], 1, settings))
    with pytest.raises(EngineRequestError, match="outside the vocabulary"):
        engine.score([np.array([1, 128], dtype=np.int32)])


def test_abort(engine: VLLMServerEngine) -> None:
    settings = replace(REQUEST.settings, max_tokens=MAX_MODEL_LEN - 10, stop_token_ids=())
    # More than the server runs at once (64): the last ones have not begun when it comes.
    request = GenerationRequest.from_lists([[3, 4, 5]], 128, settings)

    def abort() -> None:
        time.sleep(0.5)
        engine.abort()

    thread = threading.Thread(target=abort)
    thread.start()
    rollouts = engine.generate(request)
    thread.join()
    assert rollouts.num_sequences == 128
    assert rollouts.aborted.any()
    assert (rollouts.lengths[~rollouts.aborted] == MAX_MODEL_LEN - 10).all()
    engine.generate(REQUEST)  # the next one is not aborted


def test_a_wrong_token(server: VLLMServerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WRONG_TOKEN", "not-it-at-all")
    for variable in ("WRONG_TOKEN", None):
        engine = VLLMServerEngine(replace(server, token_variable=variable))
        with pytest.raises(EngineConfigError, match="server_token_variable") as caught:
            engine.wait_ready()
        assert "not-it-at-all" not in str(caught.value)


def test_servers_that_do_not_fit(server: VLLMServerConfig, tmp_path: Path) -> None:
    for changes, match in (
        ({"top_logprobs": 40}, "at most 21 log-probs"),
        ({"max_model_len": 512}, "context of 256 tokens"),
        ({"sleep": True}, "start it with --enable-sleep-mode"),
        ({"transport": "nccl"}, "takes weights by 'pdm_shared_memory', expected 'nccl'"),
    ):
        engine = VLLMServerEngine(replace(server, **changes))  # type: ignore[arg-type]
        with pytest.raises(EngineConfigError, match=match):
            engine.wait_ready()
    with pytest.raises(EngineConfigError, match="not for servers"):
        replace(server, transport="cuda_ipc")


def test_sleep_is_refused_where_the_server_cannot(engine: VLLMServerEngine) -> None:
    with pytest.raises(EngineConfigError, match="--enable-sleep-mode"):
        engine.sleep(1)
    with pytest.raises(EngineRequestError, match="level 2"):
        engine.sleep(2)
    engine.wake()  # it is awake


def test_no_server(checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_SERVER_TOKEN", TOKEN)
    config = replace(config_for(checkpoint, free_port()), start_timeout_s=0.1)
    with pytest.raises(EngineStartError, match="ConnectionRefused"):
        VLLMServerEngine(config).wait_ready()


def test_an_fp8_update_is_the_dequantised_one(
    server: VLLMServerConfig, checkpoint: TinyCheckpoint
) -> None:
    from megatron.rl.weights.block_fp8 import (
        BlockFP8,
        dequantize_weight,
        is_quantized,
        quantize_weight,
    )

    fmt = BlockFP8()
    dequantized = {}
    for name, tensor in checkpoint.tensors.items():
        dequantized[name] = tensor
        if is_quantized(name):
            quantized = quantize_weight(tensor, fmt)
            dequantized[name] = dequantize_weight(
                quantized.data, quantized.scale_inv, torch.float32
            )
    with VLLMServerEngine(server) as plain:
        plain.wait_ready()
        plain.update_weights(dequantized, 1)
        wanted = plain.generate(REQUEST)
    with VLLMServerEngine(replace(server, quantization="block_fp8")) as engine:
        engine.wait_ready()
        engine.update_weights(checkpoint.tensors, 1)
        got = engine.generate(REQUEST)
    assert_same(got, wanted)
