# SPDX-License-Identifier: Apache-2.0
"""Tasks: where prompts come from, and how responses to them are scored."""
