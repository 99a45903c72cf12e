# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: saved and published whole or not at all, loaded in any layout."""
