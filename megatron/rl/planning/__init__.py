# SPDX-License-Identifier: Apache-2.0
"""What a run would need: memory, traffic and time of a config on a cluster, by arithmetic alone."""
