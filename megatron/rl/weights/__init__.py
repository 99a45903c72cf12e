# SPDX-License-Identifier: Apache-2.0
"""Weights between Megatron's sharded parameters and Hugging Face's whole tensors."""
