# SPDX-License-Identifier: Apache-2.0
"""Rollouts as Parquet files, for replay and analysis."""
