# SPDX-License-Identifier: Apache-2.0
"""Where trainer and engine round weights in the same blocks: the verdict against the bytes."""

from typing import Any

import pytest
import torch

from megatron.rl.model.architecture import Architecture, parse_architecture
from megatron.rl.model.fp8_blocks import differing_blocks
from megatron.rl.parallel import ParallelConfig
from megatron.rl.weights.block_fp8 import (
    BlockFP8,
    dequantize_weight,
    is_quantized,
    quantize_weight,
)
from megatron.rl.weights.joins import cut
from megatron.rl.weights.names import layer_rules
from tests.checkpoints import QWEN3, QWEN3_30B, QWEN3_235B, QWEN3_MOE, WHOLE_BLOCKS

# The proportions of Qwen3-30B-A3B with a narrower hidden state, which blocks do not depend on.
NARROW_30B: dict[str, Any] = QWEN3_30B | {"hidden_size": 256, "num_experts": 1}
# Any other amax shows in these scales; powers of two hide most.
FMT = BlockFP8("float32")
DRAWS = 8


def rounded(weight: torch.Tensor) -> torch.Tensor:
    quantized = quantize_weight(weight, FMT)
    return dequantize_weight(quantized.data, quantized.scale_inv)


def really_differing(model: Architecture, tensor: int, seed: int) -> set[str]:
    """Round every shard as the trainer does and every tensor as the bridge does, and compare.

    Rows and tensors have other sizes in each draw, so that each is the largest of its block in one
    and not in another.
    """
    generator = torch.Generator().manual_seed(seed)
    names = set()
    for rule in layer_rules(model):
        if not any(is_quantized(name) for name in rule.hf):
            continue
        tensors = {
            name: torch.randn(shape, generator=generator)
            * 10 ** torch.empty(shape[0], 1).uniform_(-2, 2, generator=generator)
            * 10 ** torch.empty(1, shape[1]).uniform_(-2, 2, generator=generator)
            * 10 ** torch.empty(1).uniform_(-2, 2, generator=generator)
            for name, shape in rule.hf.items()
        }
        of_engine = {name: rounded(weight) for name, weight in tensors.items()}
        for shard in cut(rule, model, 1 if rule.is_expert else tensor, 0):
            local = torch.zeros(shard.shape)
            for part in shard.parts:
                local[part.source.index(2)] = tensors[part.name][part.target.index(2)]
            of_trainer = rounded(local)
            names |= {
                part.name
                for part in shard.parts
                if not torch.equal(
                    of_trainer[part.source.index(2)], of_engine[part.name][part.target.index(2)]
                )
            }
    return names


CASES: list[tuple[dict[str, Any], int]] = [
    (NARROW_30B, 1),
    (NARROW_30B, 2),
    (NARROW_30B, 4),
    (NARROW_30B, 8),
    (QWEN3, 1),
    (QWEN3, 2),
    (QWEN3_MOE, 2),
    (QWEN3_MOE | WHOLE_BLOCKS, 1),
    (QWEN3_MOE | WHOLE_BLOCKS, 2),
    (QWEN3 | WHOLE_BLOCKS | {"head_dim": 128}, 2),
]


@pytest.mark.parametrize(("config", "tensor"), CASES)
def test_the_verdict_is_that_of_the_bytes(config: dict[str, Any], tensor: int) -> None:
    model = parse_architecture(config)
    verdict = differing_blocks(model, ParallelConfig(tensor=tensor))
    assert set(verdict) == set().union(
        *(really_differing(model, tensor, seed) for seed in range(DRAWS))
    )


@pytest.mark.parametrize("config", [QWEN3_30B, QWEN3_235B], ids=["30B", "235B"])
@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_real_models_agree(config: dict[str, Any], tensor: int) -> None:
    assert differing_blocks(parse_architecture(config), ParallelConfig(tensor=tensor)) == ()


def test_small_heads_and_experts_do_not() -> None:
    names = differing_blocks(parse_architecture(QWEN3_MOE), ParallelConfig())
    assert {name.split(".")[-2] for name in names} == {
        "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj",
    }  # fmt: skip
