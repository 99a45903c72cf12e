# SPDX-License-Identifier: Apache-2.0
"""Tiny random models as Hugging Face folders, small enough to start an engine in seconds.

The sizes are the smallest that vLLM's CPU kernels take: head_dim 32, expert sizes divisible by 32.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCAB_SIZE = 128
NUM_EXPERTS = 4
Tensors = dict[str, torch.Tensor]


_COMMON: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "attn_implementation": "eager",
    "eos_token_id": 1,
    "bos_token_id": 0,
}


def build_model(seed: int = 0) -> torch.nn.Module:
    """A float32 model on CPU whose logits are spread enough for top-K tests to mean something."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **_COMMON,
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        intermediate_size=64,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        tie_word_embeddings=False,
        initializer_range=0.15,
    )
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(config).float().eval()


def build_dense_model(seed: int = 0, num_key_value_heads: int = 2) -> torch.nn.Module:
    """A tiny dense Qwen3 in float32 with a tied head, wide enough for whole blocks of 128."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        **_COMMON | {"num_key_value_heads": num_key_value_heads},
        vocab_size=VOCAB_SIZE + 2,
        hidden_size=128,
        intermediate_size=160,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config).float().eval()


def checkpoint_tensors(model: torch.nn.Module) -> Tensors:
    """The model's weights under the names of Hugging Face checkpoints: one tensor per expert.

    transformers 5 keeps the experts of a layer fused in memory; checkpoints and vLLM do not.
    """
    tensors: Tensors = {}
    for name, value in model.state_dict().items():
        stem, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            for expert in range(value.shape[0]):
                gate, up = value[expert].chunk(2, dim=0)
                tensors[f"{stem}.{expert}.gate_proj.weight"] = gate.clone()
                tensors[f"{stem}.{expert}.up_proj.weight"] = up.clone()
        elif leaf == "down_proj" and value.dim() == 3:
            for expert in range(value.shape[0]):
                tensors[f"{stem}.{expert}.down_proj.weight"] = value[expert].clone()
        elif name != "lm_head.weight" or not model.config.tie_word_embeddings:
            tensors[name] = value.clone()
    return tensors


def save_checkpoint(model: torch.nn.Module, folder: Path, tensors: Tensors | None = None) -> Path:
    """Write config.json and one safetensors file, of other tensors than the model's if given."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config.to_dict()
    config["architectures"] = [type(model).__name__]
    config["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors or checkpoint_tensors(model), folder / "model.safetensors", {"format": "pt"})
    return folder


def perturbed(tensors: Tensors, seed: int) -> Tensors:
    """Every tensor a little different, norms included, so that one left behind is noticed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: value
        + 0.1 * value.std().clamp_min(0.1) * torch.randn(value.shape, generator=generator)
        for name, value in tensors.items()
    }
