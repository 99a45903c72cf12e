# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning of language models on Megatron-Core, with trust regions that are right."""
