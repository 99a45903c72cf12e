# SPDX-License-Identifier: Apache-2.0
"""A worker without vLLM that misbehaves on demand. Run as a script by test_worker_failures.

Usage: fake_worker.py BEHAVIOUR COUNTER --socket ... COUNTER is a file that counts the starts.
BEHAVIOUR is comma-separated, one word per start; the last one repeats.
"""

import argparse
import os
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np

from megatron.rl.rollout.wire import Channel, Message
from megatron.rl.rollout.worker import _die_with_parent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("behaviour")
    parser.add_argument("counter")
    parser.add_argument("--socket")
    parser.add_argument("--config-json")
    parser.add_argument("--parent-pid")
    options = parser.parse_args()
    _die_with_parent(int(options.parent_pid))
    counter = Path(options.counter)
    starts = int(counter.read_text()) if counter.exists() else 0
    counter.write_text(str(starts + 1))
    words = options.behaviour.split(",")
    serve(words[min(starts, len(words) - 1)], options.socket)


def serve(behaviour: str, path: str) -> None:
    if behaviour == "die_before_connecting":
        print("ImportError: libtorch.so.9 cannot be found", file=sys.stderr)
        sys.exit(3)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(path)
    channel = Channel(sock)
    if behaviour == "never_ready":
        time.sleep(60)
    if behaviour in ("refuse_start", "refuse_setting"):
        fields = {"id": None, "type": "ValueError", "message": "no such dtype", "fatal": True}
        channel.send(Message("error", {**fields, "configuration": behaviour == "refuse_setting"}))
        sys.exit(1)
    limits = {"vllm_version": "0", "max_logprobs": 20, "vocab_size": 128, "max_model_len": 256}
    if behaviour == "low_limit":
        limits["max_logprobs"] = 5
    about = {"dtype": "float32", "device": "cpu", "pid": os.getpid(), "start_s": 0.0}
    channel.send(Message("ready", {**limits, **about}))
    version = 0
    while True:
        message = channel.receive()
        request_id = message.fields["id"]
        if message.kind == "shutdown":
            if behaviour == "ignore_shutdown":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(60)
            sys.exit(0)
        if message.kind == "update_weights":
            version = message.fields["version"]
            channel.send(Message("updated", {"id": request_id, "tensors": 0, "seconds": 0.0}))
        else:
            generate(behaviour, channel, sock, message, version)


def generate(
    behaviour: str, channel: Channel, sock: socket.socket, message: Message, version: int
) -> None:
    request_id = message.fields["id"]
    if behaviour == "die":
        print("RuntimeError: CUDA error: an illegal memory access", file=sys.stderr, flush=True)
        print("frame #12: some native symbol", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "hang":
        time.sleep(60)
    if behaviour == "garbage":
        sock.sendall(b"HTTP/1.1 200 OK, and more bytes")
        time.sleep(60)
    if behaviour == "fatal":
        fields = {"type": "RuntimeError", "message": "out of blocks", "fatal": True}
        channel.send(Message("error", {"id": request_id, **fields}))
        sys.exit(1)
    if behaviour == "refuse":
        fields = {"type": "RolloutDataError", "message": "NaN log-probs", "fatal": False}
        channel.send(Message("error", {"id": request_id, **fields}))
        return
    if behaviour == "other_id":
        request_id += 1
    prompts = len(message.arrays["prompt_offsets"]) - 1
    count = prompts * message.fields["samples_per_prompt"]
    width = message.fields["settings"]["top_logprobs"]
    channel.send(Message("progress", {"id": request_id, "sequences_done": 0}))
    channel.send(
        Message(
            "rollouts",
            {
                "id": request_id,
                "policy_version": version + (behaviour == "old_version"),
                "generation_s": 0.0,
            },
            {
                "prompt_index": np.zeros(count, dtype=np.int32),
                "response_tokens": np.ones(count, dtype=np.int32),
                "response_offsets": np.arange(count + 1, dtype=np.int64),
                "log_probs": np.full(count, -1, dtype=np.float32),
                "topk_ids": np.full((count, width), -1, dtype=np.int32),
                "topk_log_probs": np.full((count, width), -np.inf, dtype=np.float32),
                "finished": np.ones(count, dtype=np.bool_),
            },
        )
    )


if __name__ == "__main__":
    main()
