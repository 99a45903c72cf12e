# SPDX-License-Identifier: Apache-2.0
"""Prompts as token ids: tokenizer, batches, and a stream that resumes where it stopped."""
