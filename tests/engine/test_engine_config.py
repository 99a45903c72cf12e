# SPDX-License-Identifier: Apache-2.0
"""Settings that cannot work are refused before a process starts; the environment is clean."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest

from megatron.rl.rollout.checkpoint_index import read_checkpoint_index
from megatron.rl.rollout.client.engine_config import (
    RESERVED_ENGINE_ARGS,
    fp8_arguments,
    llm_arguments,
    worker_environment,
)
from megatron.rl.rollout.client.vllm_engine import VLLMEngine, VLLMEngineConfig
from megatron.rl.rollout.errors import EngineConfigError
from tests.engine.conftest import cpu_config
from tests.engine.tiny_model import VOCAB_SIZE

TRAINER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "TORCHELASTIC_RUN_ID"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS"),
    "VLLM_CPU_KVCACHE_SPACE",
)


def test_k_above_the_vocabulary_is_refused(checkpoint):
    with pytest.raises(ValueError, match=rf"top_logprobs={VOCAB_SIZE + 1} .* {VOCAB_SIZE} tokens"):
        VLLMEngine(cpu_config(checkpoint.folder, top_logprobs=VOCAB_SIZE + 1))
    VLLMEngine(cpu_config(checkpoint.folder, top_logprobs=VOCAB_SIZE))


def test_a_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 128}))
    (tmp_path / "training_args.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="no weights"):
        VLLMEngine(cpu_config(tmp_path))


def test_layouts_that_cannot_be_sharded_are_refused(checkpoint):
    with pytest.raises(EngineConfigError, match="tensor_parallel is 3"):
        VLLMEngine(cpu_config(checkpoint.folder, engine_args={"tensor_parallel_size": 3}))
    fp8 = {"device": "cuda", "threads": None, "quantization": "block_fp8"}
    # Experts of 32 columns over 2 GPUs: parts of no whole block.
    with pytest.raises(EngineConfigError, match="128"):
        arguments = {"tensor_parallel_size": 2}
        VLLMEngine(cpu_config(checkpoint.folder, **fp8, engine_args=arguments))


def test_an_fp8_engine_on_a_gpu_starts_empty_with_the_layout_of_fp8(checkpoint):
    config = VLLMEngineConfig(str(checkpoint.folder), device="cuda", quantization="block_fp8")
    index = read_checkpoint_index(checkpoint.folder)
    arguments = fp8_arguments(config, index)
    assert arguments["load_format"] == "dummy"
    quantization = arguments["hf_overrides"]["quantization_config"]
    assert quantization["weight_block_size"] == [128, 128]
    plain = quantization["modules_to_not_convert"]
    assert {"lm_head", "model.layers.1.mlp.gate"} <= set(plain)
    assert not [name for name in plain if name.endswith("_proj")]
    assert fp8_arguments(replace(config, quantization="none"), index) == {}


@pytest.mark.parametrize("name", sorted(RESERVED_ENGINE_ARGS))
def test_reserved_engine_arguments_are_refused(name):
    with pytest.raises(EngineConfigError, match=name):
        VLLMEngineConfig("model", engine_args={name: 1})


@pytest.mark.parametrize(
    "change",
    [
        {"device": "tpu"},
        {"max_model_len": 1},
        {"max_num_seqs": 0},
        {"top_logprobs": -1},
        {"max_restarts": -1},
        {"stall_timeout_s": 0.0},
        {"start_timeout_s": -1.0},
        {"kv_cache_gib": 0.0},
        {"threads": 0, "device": "cpu"},
        {"threads": 2, "device": "cuda"},
        {"visible_devices": "0", "device": "cpu"},
        {"engine_args": {"enable_chunked_prefill": True}, "device": "cpu"},
    ],
)
def test_impossible_settings_are_refused(change):
    with pytest.raises(EngineConfigError):
        VLLMEngineConfig("model", **change)


def test_arguments_for_vllm():
    engine_args = {"tensor_parallel_size": 2, "quantization": "fp8", "enforce_eager": False}
    gpu = llm_arguments(VLLMEngineConfig("model", top_logprobs=64, engine_args=engine_args))
    assert gpu["max_logprobs"] == 64 and gpu["logprobs_mode"] == "processed_logprobs"
    assert engine_args.items() <= gpu.items()
    assert "kv_cache_memory_bytes" not in gpu and gpu["generation_config"] == "vllm"
    cpu = llm_arguments(VLLMEngineConfig("model", device="cpu"))
    assert cpu["kv_cache_memory_bytes"] == 1 << 30 and cpu["enforce_eager"] is True
    json.dumps(gpu)


def test_the_environment_of_a_training_rank_does_not_reach_the_engine():
    inherited = {
        "PATH": "/bin",
        "HOME": "/root",
        "NCCL_SOCKET_IFNAME": "eth0",
        "PYTHONPATH": "/somewhere",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    rank = dict.fromkeys(TRAINER_VARIABLES, "1")
    gpu = worker_environment(VLLMEngineConfig("m", visible_devices="3"), {**inherited, **rank})
    assert not rank.keys() & gpu.keys()
    assert gpu["NCCL_SOCKET_IFNAME"] == "eth0" and gpu["CUDA_VISIBLE_DEVICES"] == "3"
    assert gpu["PYTHONPATH"].endswith(":/somewhere")
    for name in ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"):
        assert gpu[name] == "1"
    cpu = worker_environment(VLLMEngineConfig("m", device="cpu", threads=2), {**inherited, **rank})
    assert cpu["OMP_NUM_THREADS"] == "2" and cpu["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_any_vllm_of_this_environment_finds_our_transports(monkeypatch):
    """An installed entry point, which loads nothing but names until an engine asks for more."""
    (plugin,) = (p for p in entry_points(group="vllm.general_plugins") if p.name == "megatron_rl")
    registered = {}
    factory = SimpleNamespace(
        _registry={}, register_engine=lambda name, *where: registered.update({name: where})
    )
    module = SimpleNamespace(WeightTransferEngineFactory=factory)
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.factory", module)
    plugin.load()()
    assert registered["pdm_shared_memory"] == (
        "megatron.rl.rollout.worker.weight_receiver",
        "SharedMemoryReceiver",
    )


@pytest.mark.parametrize("module", ["protocol", "client.vllm_engine", "worker.process"])
def test_importing_the_client_or_the_worker_loads_no_heavy_library(module):
    code = (
        f"import sys, megatron.rl.rollout.{module}\n"
        "heavy = {'torch', 'vllm', 'megatron.core', 'transformers'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    environment = worker_environment(VLLMEngineConfig("m"))
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
