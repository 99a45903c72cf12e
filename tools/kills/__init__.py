# SPDX-License-Identifier: Apache-2.0
"""Kill runs at random moments, continue them, and compare what they end with; tools/chaos.py."""
