#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Stands in for an environment's Python where only what launch scripts do is tested.

It notes how it was called in the file that STUB_LOG names, one JSON object a call, and answers as
the program would: `show` with STUB_SHOW, `doctor` and `plan` with a code of STUB_CODES, torchrun by
starting one rank. A run ends at once, or with STUB_RUN=wait at SIGTERM, which it notes.
"""

import json
import os
import signal
import subprocess
import sys
import time
from types import FrameType
from typing import Any

NOTED = ("NODE_RANK", "NNODES", "MASTER_ADDR", "MASTER_PORT", "RUN", "CUDA_DEVICE_MAX_CONNECTIONS",
         "PYTHONPATH", "PDM_RL_ROLLOUT_PYTHON", "GPUS_PER_NODE", "LOCAL_WORLD_SIZE")  # fmt: skip
RUN_LIMIT_S = 60.0


def main(arguments: list[str]) -> int:
    note(what=arguments, environment={k: os.environ[k] for k in NOTED if k in os.environ})
    if arguments[:1] != ["-m"]:  # a tool by its path
        return 0
    module, command = arguments[1], arguments[2]
    if module == "torch.distributed.run":
        rank = arguments[arguments.index("megatron.rl.cli") - 1 :]
        return subprocess.run([sys.executable, __file__, *rank]).returncode
    if command == "show":
        print(os.environ["STUB_SHOW"])
        return 0
    if command == "train" and "--dry-run" not in arguments:
        return run()
    return int(json.loads(os.environ.get("STUB_CODES", "{}")).get(command, 0))


def run() -> int:
    if os.environ.get("STUB_RUN") == "wait":

        def save(signum: int, frame: FrameType | None) -> None:
            note(saved=True)
            sys.exit(int(os.environ.get("STUB_SAVE_CODE", "0")))

        signal.signal(signal.SIGTERM, save)
        note(waits=True)
        time.sleep(RUN_LIMIT_S)
    return int(os.environ.get("STUB_RUN_CODE", "0"))


def note(**fields: Any) -> None:
    line = json.dumps({"pid": os.getpid(), "folder": os.getcwd(), **fields}) + "\n"
    with open(os.environ["STUB_LOG"], "a") as log:
        log.write(line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
