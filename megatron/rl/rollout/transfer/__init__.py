# SPDX-License-Identifier: Apache-2.0
"""Weights on their way to an engine: formats, buckets, transports, digests."""
