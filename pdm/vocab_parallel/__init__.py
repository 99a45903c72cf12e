# SPDX-License-Identifier: Apache-2.0
"""The statistics over vocabulary shards; the only place of the package that communicates."""

from pdm.vocab_parallel.shard import VocabShard

__all__ = ["VocabShard"]
