# SPDX-License-Identifier: Apache-2.0
"""One tiny checkpoint and one running engine for all tests here; an engine takes ~10 s to start."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.rl.rollout.client.vllm_engine import VLLMEngine, VLLMEngineConfig
from megatron.rl.rollout.client.worker_handle import _group_lives
from tests.engine.tiny_model import Tensors, build_model, checkpoint_tensors, save_checkpoint

MAX_MODEL_LEN = 256


@dataclass(frozen=True)
class TinyCheckpoint:
    """The model, its folder, and its tensors under checkpoint names."""

    model: torch.nn.Module
    folder: Path
    tensors: Tensors


@dataclass
class Engine:
    """A running engine, what it reported, and a hook that a test can set."""

    engine: VLLMEngine
    events: list[str] = field(default_factory=list)
    on_progress: Callable[[Mapping[str, Any]], None] | None = None


def cpu_config(folder: Path, **changes: Any) -> VLLMEngineConfig:
    """Settings for a tiny float32 engine beside other work on a small machine."""
    config = VLLMEngineConfig(
        str(folder),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=64,
        top_logprobs=20,
        device="cpu",
        kv_cache_gib=0.1,
        threads=1,
        start_timeout_s=300,
        stall_timeout_s=120,
    )
    return replace(config, **changes)


def run_engine(config: VLLMEngineConfig) -> Iterator[Engine]:
    """Start an engine for a fixture, and end it afterwards."""

    def progress(fields: Mapping[str, Any]) -> None:
        if held.on_progress is not None:
            held.on_progress(fields)

    events: list[str] = []
    engine = VLLMEngine(config, on_event=events.append, on_progress=progress)
    held = Engine(engine, events)
    with engine:
        engine.wait_ready()
        yield held


def group_is_gone(pid: int) -> bool:
    """Whether no process of the engine's process group is left."""
    return not _group_lives(pid)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    model = build_model(seed=0)
    folder = save_checkpoint(model, tmp_path_factory.mktemp("tiny") / "moe")
    return TinyCheckpoint(model, folder, checkpoint_tensors(model))


@pytest.fixture(scope="session")
def shared_engine(
    checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    log = tmp_path_factory.mktemp("log") / "engine.log"
    yield from run_engine(cpu_config(checkpoint.folder, log_path=str(log)))


@pytest.fixture
def moe_engine(shared_engine: Engine, checkpoint: TinyCheckpoint) -> Engine:
    """The shared engine, with the checkpoint's own weights as version 0."""
    shared_engine.on_progress = None
    shared_engine.engine.update_weights(checkpoint.tensors, 0)
    return shared_engine
