# SPDX-License-Identifier: Apache-2.0
"""What is read from a config.json, and which variants of the supported models are refused."""

from typing import Any

import pytest

from megatron.rl.errors import UserError
from megatron.rl.model.architecture import parse_architecture
from tests.checkpoints import LLAMA, QWEN3, QWEN3_MOE


def test_llama_has_no_norm_on_q_and_k() -> None:
    assert not parse_architecture(LLAMA).qk_norm
    assert parse_architecture(QWEN3).qk_norm and parse_architecture(QWEN3_MOE).qk_norm


def test_old_llama_configs_leave_out_what_follows_from_the_rest() -> None:
    left_out = ("head_dim", "num_key_value_heads", "rope_theta", "attention_bias", "mlp_bias")
    model = parse_architecture({k: v for k, v in LLAMA.items() if k not in left_out})
    assert model.head_dim == 64 // 4
    assert model.num_groups == model.num_heads == 4
    assert model.rope_theta == 10000.0


@pytest.mark.parametrize(
    ("config", "change", "key"),
    [
        (LLAMA, {"mlp_bias": True}, "mlp_bias"),
        (LLAMA, {"attention_bias": True}, "attention_bias"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act"),
        (QWEN3_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        (QWEN3_MOE, {"norm_topk_prob": False}, "norm_topk_prob"),
        (QWEN3, {"use_sliding_window": True}, "use_sliding_window"),
        (QWEN3, {"model_type": "gpt2"}, "model_type is 'gpt2', supported are .*llama"),
    ],
)
def test_variants_that_are_not_built_are_refused(
    config: dict[str, Any], change: dict[str, Any], key: str
) -> None:
    with pytest.raises(UserError, match=key):
        parse_architecture(config | change)
