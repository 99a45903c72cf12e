# SPDX-License-Identifier: Apache-2.0
"""Everything is declared in pyproject.toml; this file serves tools that still look for it."""

from setuptools import setup

setup()
