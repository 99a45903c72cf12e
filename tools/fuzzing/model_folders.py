# SPDX-License-Identifier: Apache-2.0
"""Hugging Face model folders: ``config.json`` and the headers of safetensors files."""

import json
import random
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron.rl.errors import UserError
from megatron.rl.model.architecture import read_architecture
from megatron.rl.rollout.checkpoint_index import read_checkpoint_index
from megatron.rl.rollout.errors import EngineConfigError
from megatron.rl.weights.hf_files import HFTensors
from tools.fuzzing.mutations import ODD_VALUES, damaged_bytes, damaged_text, damaged_tree

_DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 301,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
}
_EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
CONFIGS = (_DENSE, _DENSE | _EXPERTS, _DENSE | {"model_type": "llama", "mlp_bias": False})


class ModelFolders:
    """What a run reads of its starting policy before any process starts."""

    name = "hf_config"
    limit_s = 60.0

    def prepare(self, folder: Path) -> None:
        """Write a small model."""
        self._config, self._weights = folder / "config.json", folder / "model.safetensors"
        self._folder = folder
        self._index = folder / "model.safetensors.index.json"
        tensors = {"a.weight": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5).bfloat16()}
        save_file(tensors, self._weights, {"format": "pt"})
        self._good = self._weights.read_bytes()
        for config in CONFIGS:
            self._config.write_text(json.dumps(config))
            self._read()

    def attempt(self, rng: random.Random) -> bool:
        """Damage the config or the weights."""
        tree: Any = rng.choice(CONFIGS)
        weights = self._good
        self._weights.write_bytes(weights)
        self._index.unlink(missing_ok=True)
        match rng.randrange(7):
            case 0 | 1:
                tree = damaged_tree(rng, tree)
            case 2:
                tree = tree | {rng.choice(list(tree)): rng.choice(ODD_VALUES)}
            case 3:
                weights = damaged_bytes(rng, weights)
            case 4:
                weights = self._other_header(rng)
            case 5:
                index = {"metadata": {}, "weight_map": dict.fromkeys("ab", self._weights.name)}
                self._index.write_text(json.dumps(damaged_tree(rng, index)))
            case _:
                text = damaged_text(rng, json.dumps(tree)).encode("utf-8", "surrogatepass")
                self._config.write_bytes(damaged_bytes(rng, text) if rng.random() < 0.3 else text)
                return self._accepts()
        self._config.write_text(json.dumps(tree))
        self._weights.write_bytes(weights)
        return self._accepts()

    def close(self) -> None:
        """Nothing is open."""

    def _other_header(self, rng: random.Random) -> bytes:
        (length,) = struct.unpack("<Q", self._good[:8])
        header = json.dumps(damaged_tree(rng, json.loads(self._good[8 : 8 + length]))).encode()
        stated = rng.choice((len(header), len(header), len(header), 0, length, 2**40, 2**64 - 1))
        return struct.pack("<Q", stated) + header + self._good[8 + length :]

    def _accepts(self) -> bool:
        try:
            self._read()
        except (UserError, EngineConfigError):
            return False
        return True

    def _read(self) -> None:
        read_architecture(self._folder)
        read_checkpoint_index(self._folder)
        with HFTensors(self._folder) as tensors:
            for name in tensors.shapes():
                tensors.read(name)
