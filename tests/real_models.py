# SPDX-License-Identifier: Apache-2.0
"""The architectures of the recipes' models, as their published config.json files have them."""

from typing import Any

from tests.checkpoints import QWEN3, QWEN3_30B

QWEN3_4B: dict[str, Any] = QWEN3 | {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
QWEN3_8B: dict[str, Any] = QWEN3_4B | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}
RECIPE_MODELS = {
    "qwen3_4b": QWEN3_4B,
    "qwen3_8b": QWEN3_8B,
    "qwen3_30b_fp8_rollout": QWEN3_30B,
    "qwen3_30b_fp8_e2e": QWEN3_30B,
    "trm_qwen3_8b": QWEN3_8B,
}
