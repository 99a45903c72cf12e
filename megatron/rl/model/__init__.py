# SPDX-License-Identifier: Apache-2.0
"""From a Hugging Face config to a Megatron-Core model."""
