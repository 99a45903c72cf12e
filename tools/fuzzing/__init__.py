# SPDX-License-Identifier: Apache-2.0
"""Damaged, hostile and random input for everything that reads what others wrote; see ../fuzz.py."""
