# SPDX-License-Identifier: Apache-2.0
"""The local step of the fused head: what one rank computes of one chunk, without the others.

``reference`` is the readable specification; ``tiled`` (CPU) and ``triton_step`` (GPU) are faster.
All take hidden states and this rank's rows of the head, and know nothing of masks or ranks.
"""
