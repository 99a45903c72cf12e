# SPDX-License-Identifier: Apache-2.0
"""Small seeded Hugging Face checkpoints for tests, without transformers in the loop."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 301,  # not a multiple of anything: the vocabulary is padded
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
}
QWEN3_MOE: dict[str, Any] = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
LLAMA: dict[str, Any] = QWEN3 | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "mlp_bias": False,
}

# The real models, as their config.json has them.
QWEN3_30B: dict[str, Any] = QWEN3_MOE | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
QWEN3_235B: dict[str, Any] = QWEN3_30B | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "moe_intermediate_size": 1536,
}

# Merge into either: every projection has sides that are whole FP8 blocks, as vLLM wants them.
WHOLE_BLOCKS: dict[str, Any] = {
    "hidden_size": 128,
    "head_dim": 64,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
}


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a Qwen3, Qwen3-MoE or Llama checkpoint."""
    hidden, head = config["hidden_size"], config["head_dim"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        attention = {
            "q_proj": (heads * head, hidden),
            "k_proj": (groups * head, hidden),
            "v_proj": (groups * head, hidden),
            "o_proj": (hidden, heads * head),
        }
        if config["model_type"] != "llama":
            attention |= {"q_norm": (head,), "k_norm": (head,)}
        names = {f"self_attn.{name}": shape for name, shape in attention.items()}
        names |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        if config["model_type"] == "qwen3_moe":
            names["mlp.gate"] = (config["num_experts"], hidden)
            for expert in range(config["num_experts"]):
                names |= _mlp(f"mlp.experts.{expert}.", hidden, config["moe_intermediate_size"])
        else:
            names |= _mlp("mlp.", hidden, config["intermediate_size"])
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in names.items()}
    return shapes


def _mlp(prefix: str, hidden: int, intermediate: int) -> dict[str, tuple[int, ...]]:
    return {
        prefix + "gate_proj": (intermediate, hidden),
        prefix + "up_proj": (intermediate, hidden),
        prefix + "down_proj": (hidden, intermediate),
    }


def random_tensors(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Seeded weights, large enough that attention and routing are far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.1 * noise if len(shape) == 1 else 0.15 * noise
    return tensors


def write_checkpoint(folder: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """Write config.json and model.safetensors; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(config, seed), folder / "model.safetensors", {"format": "pt"})
    return folder
