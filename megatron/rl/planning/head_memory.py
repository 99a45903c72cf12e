# SPDX-License-Identifier: Apache-2.0
"""Bytes that the policy head takes on the last pipeline stage.

The sizes are those of :func:`pdm.fused_policy_loss`, which walks the rows in chunks: scratch for
the chunks in flight, the gradient of the head's weight until backward, and a few tensors a row.
"""

from dataclasses import dataclass
from typing import Literal

from megatron.rl.model.architecture import Architecture
from megatron.rl.parallel import ParallelConfig
from megatron.rl.planning.precision import FLOAT32_BYTES, TrainingPrecision
from pdm.kernels.tiled import TILE_COLUMNS
from pdm.vocab_parallel.chunks import DEFAULT_CHUNK_BYTES, SINGLE_CHUNK_SLACK

# A row's bookkeeping for each support column: places, orders and log-probs, int64 mostly.
_SUPPORT_BYTES = 64


@dataclass(frozen=True)
class HeadBytes:
    """Of one rank of the last stage.

    Attributes:
        peak: while the loss is computed.
        kept: of it, what stays until the head's own backward.
    """

    peak: int
    kept: int


def head_bytes(
    model: Architecture,
    layout: ParallelConfig,
    precision: TrainingPrecision,
    *,
    kind: Literal["fused", "reference"],
    tokens: int,
    rows: int,
    support: int,
    scaled: bool,
    logits_bytes: int = FLOAT32_BYTES,
) -> HeadBytes:
    """Predict what the head allocates for one micro-batch.

    Args:
        tokens: of the micro-batch, on one context-parallel rank.
        rows: of them, those that predict a response token.
        support: columns of the behavior support.
        scaled: the temperature is not 1, so that hidden states are scaled.
        logits_bytes: an element of the reference head's logits.
    """
    hidden, width = model.hidden_size, precision.weight_bytes
    columns = layout.padded_vocab_size(model.vocab_size) // layout.tensor
    gathered = tokens * hidden * width if layout.sequence_parallel else 0
    picked = rows * hidden * width
    if kind == "reference":
        # Logits and their gradient, and float32 log-probs, exponentials, products and masks of
        # them, as a measured step has them at its peak.
        logits = int(rows * columns * (2 * logits_bytes + 4.5 * FLOAT32_BYTES))
        return HeadBytes(gathered + picked + logits, picked + logits // 2)
    gradients = FLOAT32_BYTES * hidden * (rows + columns)
    chunk = _chunk_rows(rows, columns, in_flight=1 if layout.tensor == 1 else 2)
    in_flight = 1 if layout.tensor == 1 or chunk >= rows else 2
    scratch = in_flight * chunk * columns * FLOAT32_BYTES
    if precision.modules == "local":
        step = chunk * min(TILE_COLUMNS, columns) * FLOAT32_BYTES
        step += chunk * hidden * FLOAT32_BYTES * (1 if scaled else 0)
    else:
        # The gradient of the logits, and its two products before they are added.
        step = chunk * columns * width + (chunk + columns) * hidden * FLOAT32_BYTES
    peak = gathered + picked + gradients + scratch + step + chunk * support * _SUPPORT_BYTES
    return HeadBytes(int(peak), gradients)


def _chunk_rows(rows: int, columns: int, in_flight: int) -> int:
    size = max(1, DEFAULT_CHUNK_BYTES // (in_flight * max(columns, 1) * FLOAT32_BYTES))
    if rows <= SINGLE_CHUNK_SLACK * size:
        return max(rows, 1)
    return -(-rows // -(-rows // size))
