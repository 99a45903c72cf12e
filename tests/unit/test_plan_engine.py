# SPDX-License-Identifier: Apache-2.0
"""The engine's part of a plan: weights, KV cache, and bytes that travel to it."""

from pathlib import Path
from typing import Any

import pytest

from megatron.rl.config import Config, parse_config
from megatron.rl.errors import UserError
from megatron.rl.model.architecture import Architecture, parse_architecture
from megatron.rl.planning.engine_memory import checkpoint_bytes, engine_memory
from megatron.rl.weights.engine_layout import engine_bytes
from megatron.rl.weights.names import hf_shapes
from tests.checkpoints import QWEN3_30B, QWEN3_MOE, write_checkpoint
from tests.real_models import QWEN3_4B


def _config(quantization: str = "none", **rollout: Any) -> Config:
    return parse_config(
        {
            "run": {"device": "cuda"},
            "model": {"path": "absent"},
            "task": {"name": "reasoning_gym/chain_sum"},
            "bridge": {"quantization": quantization},
            "rollout": rollout,
        }
    )


@pytest.mark.parametrize("quantization", ["none", "block_fp8"])
@pytest.mark.parametrize("config", [QWEN3_4B, QWEN3_30B], ids=["4B", "30B"])
def test_one_gpu_holds_exactly_what_travels(config: dict[str, Any], quantization: Any) -> None:
    model, settings = parse_architecture(config), _config(quantization)
    by_tensor = sum(
        engine_bytes(name, shape, quantization).total
        for name, shape in hf_shapes(model).items()
        if name != "lm_head.weight" or not model.tied_embeddings
    )
    assert checkpoint_bytes(settings, model) == by_tensor
    assert engine_memory(settings, model).weights == by_tensor


def test_file_of_a_checkpoint_is_as_long(tmp_path: Path) -> None:
    """Real tensors, in float32, as an engine on CPU holds them."""
    write_checkpoint(tmp_path, QWEN3_MOE)
    config = parse_config(
        {
            "run": {"device": "cpu"},
            "model": {"path": str(tmp_path), "dtype": "float32"},
            "task": {"name": "reasoning_gym/chain_sum"},
        }
    )
    size = (tmp_path / "model.safetensors").stat().st_size
    weights = engine_memory(config, parse_architecture(QWEN3_MOE)).weights
    assert weights == pytest.approx(size, rel=0.01)  # the file has a header


def _model() -> Architecture:
    return parse_architecture(QWEN3_30B)


def test_kv_cache_by_hand() -> None:
    """48 layers, keys and values, 4 heads of 128, 2 bytes; a quarter with TP 4, no less with 8."""
    whole = 48 * 2 * 4 * 128 * 2
    for size, heads in ((1, 4), (2, 2), (4, 1), (8, 1)):
        arguments = {"tensor_parallel_size": size, "enable_expert_parallel": True}
        memory = engine_memory(_config(engine_args=arguments, max_num_seqs=10), _model())
        assert memory.kv_a_token == whole * heads // 4
        assert memory.kv_wanted == memory.kv_a_token * 10 * (2048 + 8192)
    narrow = _config(engine_args={"kv_cache_dtype": "fp8"})
    assert engine_memory(narrow, _model()).kv_a_token == whole // 2


def test_tensor_parallel_engines_share_all_but_norms_and_router() -> None:
    one = engine_memory(_config(), _model()).weights
    arguments = {"tensor_parallel_size": 4, "enable_expert_parallel": True}
    four = engine_memory(_config(engine_args=arguments), _model()).weights
    router_and_norms = 48 * (128 * 2048 + 2 * 2048 + 2 * 128) * 2
    assert four - one / 4 == pytest.approx(router_and_norms * 3 / 4, rel=0.01)


def test_key_value_heads_are_repeated_beyond_their_number() -> None:
    """With TP 8, 4 heads are on two GPUs each: k and v are divided by 4, everything else by 8."""
    one = engine_memory(_config(), _model()).weights
    arguments = {"tensor_parallel_size": 8, "enable_expert_parallel": True}
    eight = engine_memory(_config(engine_args=arguments), _model()).weights
    whole = 48 * (128 * 2048 + 2 * 2048 + 2 * 128) * 2 + 2048 * 2  # router and norms, everywhere
    keys_and_values = 48 * 2 * 512 * 2048 * 2
    expected = (one - whole - keys_and_values) // 8 + keys_and_values // 4 + whole
    assert eight == pytest.approx(expected, abs=8)


def test_an_engine_that_cuts_blocks_is_refused() -> None:
    arguments = {"tensor_parallel_size": 4}
    with pytest.raises(UserError, match=r"192 FFN columns.*possible sizes are 1, 2.*1, 2, 4, 8"):
        engine_memory(_config("block_fp8", engine_args=arguments), _model())
    with pytest.raises(UserError, match="pipeline_parallel_size is 5, which does not divide"):
        engine_memory(_config(engine_args={"pipeline_parallel_size": 5}), _model())
