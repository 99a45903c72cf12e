# SPDX-License-Identifier: Apache-2.0
"""``pdm-rl doctor``: what a run finds on this machine, one line a finding."""
