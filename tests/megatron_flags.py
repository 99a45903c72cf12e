# SPDX-License-Identifier: Apache-2.0
"""What a Megatron user types for a model and a layout."""

from collections.abc import Mapping

from megatron.rl.model.architecture import Architecture


def model_flags(model: Architecture, *, seq_length: int) -> list[str]:
    """Flags of a Qwen3-MoE."""
    text = (
        f"--num-layers {model.num_layers} --hidden-size {model.hidden_size} "
        f"--ffn-hidden-size {model.ffn_hidden_size} --num-attention-heads {model.num_heads} "
        f"--group-query-attention --num-query-groups {model.num_groups} "
        f"--kv-channels {model.head_dim} --qk-layernorm --normalization RMSNorm "
        f"--norm-epsilon {model.norm_eps} --max-position-embeddings {model.max_positions} "
        f"--seq-length {seq_length} --rotary-base {int(model.rope_theta)} "
        f"--num-experts {model.num_experts} --moe-router-topk {model.experts_per_token} "
        f"--moe-ffn-hidden-size {model.moe_ffn_hidden_size} --moe-router-dtype fp32 "
        "--moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall "
        "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
        "--position-embedding-type rope --attention-dropout 0 --hidden-dropout 0"
    )
    return text.split()


def layout_flags(layout: Mapping[str, int]) -> list[str]:
    """Flags of a layout, with the keys of ``ParallelConfig``; the data-parallel size follows."""
    tensor = layout.get("tensor", 1)
    flags = [
        *("--tensor-model-parallel-size", str(tensor)),
        *("--pipeline-model-parallel-size", str(layout.get("pipeline", 1))),
        *("--expert-model-parallel-size", str(layout.get("expert", 1))),
        *("--expert-tensor-parallel-size", "1"),
        "--use-distributed-optimizer",
    ]
    if "virtual" in layout:
        flags += ["--num-virtual-stages-per-pipeline-rank", str(layout["virtual"])]
    if tensor > 1:
        flags.append("--sequence-parallel")
    return flags
