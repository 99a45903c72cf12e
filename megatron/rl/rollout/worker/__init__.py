# SPDX-License-Identifier: Apache-2.0
"""What runs inside the engine's process: vLLM, its patches, and the receiving end of weights."""
