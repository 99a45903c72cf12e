# SPDX-License-Identifier: Apache-2.0
"""The names of the files in a checkpoint, beside its manifest and Megatron's own.

run.json               RunState
policy.json            steps of the optimizer and of the schedule
random-00000.json      generators of rank 0, and so on
extra/…                what owners of the run gave, under their names
__0_0.distcp …         tensors, a file a rank; .metadata is their index
metadata.json          the format, as Megatron wants it
manifest.json          sizes and digests of all of these
"""

RUN_NAME = "run.json"
POLICY_NAME = "policy.json"
FORMAT_NAME = "metadata.json"
EXTRA_FOLDER = "extra"


def random_name(rank: int) -> str:
    return f"random-{rank:05d}.json"
