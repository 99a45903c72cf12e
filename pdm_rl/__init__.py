# SPDX-License-Identifier: Apache-2.0
"""The command ``pdm-rl``: where it starts, and ``doctor``.

``megatron`` is a namespace that several folders share, so that another ``megatron.rl`` may hide
this project's. What has to work even then lives here, and imports nothing but the standard library.
"""
