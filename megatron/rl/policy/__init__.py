# SPDX-License-Identifier: Apache-2.0
"""The policy's side of the loss path: the head on the last pipeline stage, and its schedule glue."""
