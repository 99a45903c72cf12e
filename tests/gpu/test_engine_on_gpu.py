# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine on a GPU: updates by every transport equal a fresh engine; sleep frees memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megatron.rl.rollout.client.vllm_engine import VLLMEngine, VLLMEngineConfig
from megatron.rl.rollout.protocol import GenerationRequest, SamplingSettings
from megatron.rl.rollout.rollouts import Rollouts
from tests.engine.tiny_model import (
    Tensors,
    build_model,
    checkpoint_tensors,
    perturbed,
    save_checkpoint,
)

K = 20
REQUEST = GenerationRequest.from_lists(
    [[3, 4, 5], [6, 7]], 4, SamplingSettings(max_tokens=32, top_logprobs=K, seed=3)
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    model = build_model(seed=0)
    folder = save_checkpoint(model, tmp_path_factory.mktemp("tiny") / "moe")
    return folder, checkpoint_tensors(model)


def config_for(folder: Path, **changes: Any) -> VLLMEngineConfig:
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": 256,
        "top_logprobs": K,
        "device": "cuda",
        "kv_cache_gib": 0.5,
        "bucket_mib": 1,
        "engine_args": {"enforce_eager": True},
    }
    return VLLMEngineConfig(str(folder), **(settings | changes))


def generate_fresh(folder: Path, tensors: Tensors) -> Rollouts:
    """Rollouts of an engine that has loaded these weights from a folder."""
    config = (folder / "config.json").read_text()
    fresh = folder.with_name("fresh")
    fresh.mkdir(exist_ok=True)
    (fresh / "config.json").write_text(config)
    save_file(tensors, fresh / "model.safetensors", {"format": "pt"})
    with VLLMEngine(config_for(fresh)) as engine:
        return engine.generate(REQUEST)


@pytest.fixture(scope="module")
def expected(checkpoint: tuple[Path, Tensors]) -> Iterator[Rollouts]:
    folder, tensors = checkpoint
    yield generate_fresh(folder, perturbed(tensors, 1))


@pytest.mark.parametrize("transport", ["shared_memory", "cuda_ipc", "nccl"])
def test_an_update_equals_a_fresh_engine_twice(
    transport: str, checkpoint: tuple[Path, Tensors], expected: Rollouts
) -> None:
    changes: dict[str, Any] = {"transport": transport}
    if transport == "nccl":
        if torch.cuda.device_count() < 2:
            pytest.skip("NCCL needs a GPU for the trainer and another one for the engine")
        changes["visible_devices"] = "1"
    torch.cuda.set_device(0)
    folder, tensors = checkpoint
    on_gpu = {name: tensor.cuda() for name, tensor in tensors.items()}
    other = {name: tensor.cuda() for name, tensor in perturbed(tensors, 1).items()}
    with VLLMEngine(config_for(folder, **changes)) as engine:
        start = engine.generate(REQUEST)
        for _ in range(2):
            report = engine.update_weights(other, 1)
            assert report.tensors == len(tensors)
            got = engine.generate(REQUEST)
            assert np.array_equal(got.response_tokens, expected.response_tokens)
            assert np.array_equal(got.log_probs, expected.log_probs)
            engine.update_weights(on_gpu, 2)
            back = engine.generate(REQUEST)
            assert np.array_equal(back.log_probs, start.log_probs)


def test_sleep_frees_memory_and_keeps_the_weights(checkpoint: tuple[Path, Tensors]) -> None:
    folder, tensors = checkpoint
    with VLLMEngine(config_for(folder, sleep=True, kv_cache_gib=2.0)) as engine:
        engine.update_weights(perturbed(tensors, 1), 1)
        before = engine.generate(REQUEST)
        free_awake, _ = torch.cuda.mem_get_info()
        engine.sleep()
        free_asleep, _ = torch.cuda.mem_get_info()
        assert free_asleep - free_awake > 1 << 30  # the KV cache at least
        engine.wake()
        after = engine.generate(REQUEST)
        assert np.array_equal(after.log_probs, before.log_probs)
        assert (after.policy_versions == 1).all()
        engine.sleep()
        engine.wake()
        engine.update_weights(tensors, 2)
        engine.generate(REQUEST)
