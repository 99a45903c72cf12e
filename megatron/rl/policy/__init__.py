# SPDX-License-Identifier: Apache-2.0
"""The policy being trained: the head on the last pipeline stage, and the optimizer step."""
