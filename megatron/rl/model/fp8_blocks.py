# SPDX-License-Identifier: Apache-2.0
"""Do trainer and engine round a weight in the same 128 x 128 blocks?

The trainer quantises its shard of a Megatron parameter, which may hold several Hugging Face tensors
(q, k and v; gate and up), from the shard's first row. The bridge quantises each Hugging Face tensor
from its own first row. The blocks are the same where every piece begins at a block of both and ends
at one, or at the end of both. For Qwen3-30B-A3B they are: heads are 128 wide, experts 6 x 128.
"""

from megatron.rl.model.architecture import Architecture
from megatron.rl.parallel import ParallelConfig
from megatron.rl.weights.block_fp8 import BLOCK, is_quantized
from megatron.rl.weights.joins import Part, Shard, cut
from megatron.rl.weights.names import Shape, layer_rules


def differing_blocks(model: Architecture, layout: ParallelConfig) -> tuple[str, ...]:
    """Return the weights that trainer and engine round in different blocks.

    Hugging Face names, with ``{layer}`` and ``{expert}`` left open; empty where all blocks agree.
    """
    padded = layout.padded_vocab_size(model.vocab_size)
    names = []
    for rule in layer_rules(model):
        if not any(is_quantized(name) for name in rule.hf):
            continue
        shards = cut(rule, model, 1 if rule.is_expert else layout.tensor, padded)
        names += [
            name
            for name, shape in rule.hf.items()
            if not all(
                _same_blocks(part, shard, shape)
                for shard in shards
                for part in shard.parts
                if part.name == name
            )
        ]
    return tuple(names)


def _same_blocks(part: Part, shard: Shard, shape: Shape) -> bool:
    source, target = part.source, part.target
    begins = (source.top, target.top, source.left, target.left)
    ends = (
        (source.bottom, target.bottom, shard.shape[0], shape[0]),
        (source.right, target.right, shard.shape[1], shape[1]),
    )
    return all(begin % BLOCK == 0 for begin in begins) and all(
        a % BLOCK == 0 or (a == whole_a and b == whole_b) for a, b, whole_a, whole_b in ends
    )
