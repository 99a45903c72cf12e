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
from typing import Any

import numpy as np

from megatron.rl.rollout.json_array import json_array
from megatron.rl.rollout.messages import request_from_message, sequences_message
from megatron.rl.rollout.rollouts import FinishedSequences, Rollouts
from megatron.rl.rollout.topk_columns import TopKColumns
from megatron.rl.rollout.wire import Channel, Message
from megatron.rl.rollout.worker.process import _die_with_parent

VOCAB_SIZE = 128


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
        if message.kind == "abort":
            continue  # came too late
        request_id = message.fields["id"]
        if message.kind == "shutdown":
            if behaviour == "ignore_shutdown":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(60)
            sys.exit(0)
        if message.kind == "update_bucket" and behaviour == "die_in_an_update":
            os.kill(os.getpid(), signal.SIGKILL)
        if message.kind in ("init_transfer", "start_update", "update_bucket", "sleep", "wake"):
            channel.send(Message("done", {"id": request_id}))
        elif message.kind == "finish_update":
            version = message.fields["version"]
            digests = {"digests": json_array([])}
            channel.send(Message("done", {"id": request_id}, digests))
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
    request = request_from_message(message)
    count = request.num_sequences
    channel.send(Message("progress", {"id": request_id, "sequences_done": 0}))
    told = version + (behaviour == "old_version")

    def send(index: list[int], **changes: Any) -> None:
        part = sequences(np.array(index), request.settings.top_logprobs, told, **changes)
        channel.send(sequences_message(request_id, part))

    if behaviour == "die_in_the_middle":
        send([count - 1])
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "wait_for_abort":
        send([0])
        assert channel.receive(20).fields["request"] == request_id
        send(list(range(1, count)), aborted=True)
    elif behaviour == "wait_for_abort_and_die":
        send([0])
        assert channel.receive(20).kind == "abort"
        os.kill(os.getpid(), signal.SIGKILL)
    elif behaviour == "leave_one_out":
        send(list(range(1, count)))
    elif behaviour == "no_such_sequence":
        send([count])
        send(list(range(count)))
    elif behaviour == "other_width":
        part = sequences(np.arange(count), request.settings.top_logprobs + 1, told)
        channel.send(sequences_message(request_id, part))
    else:  # in two parts, the last sequence first
        send([count - 1])
        send(list(range(count - 1)))
    channel.send(Message("generated", {"id": request_id, "generation_s": 0.5}))


def sequences(
    index: np.ndarray, width: int, version: int, aborted: bool = False
) -> FinishedSequences:
    """One token a sequence: the sequence's number."""
    count = len(index)
    absent = np.full((count, width), -1), np.full((count, width), -np.inf)
    rollouts = Rollouts(
        prompt_index=np.zeros(count, dtype=np.int32),
        response_tokens=index.astype(np.int32),
        response_offsets=np.arange(count + 1, dtype=np.int64),
        log_probs=np.full(count, -1, dtype=np.float32),
        topk=TopKColumns.encode(*absent, vocab_size=VOCAB_SIZE),
        policy_versions=np.full(count, version, dtype=np.int32),
        finished=np.full(count, not aborted),
        aborted=np.full(count, aborted),
        generation_s=0.0,
    )
    return FinishedSequences(index.astype(np.int64), rollouts)


if __name__ == "__main__":
    main()
