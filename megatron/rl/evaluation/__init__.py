# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: estimators over repeated samples, ``pdm-rl eval``, and evaluation during training."""
