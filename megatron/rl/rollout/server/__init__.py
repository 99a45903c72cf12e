# SPDX-License-Identifier: Apache-2.0
"""Rollouts and weight updates through a vLLM server that runs already."""
