# SPDX-License-Identifier: Apache-2.0
"""The worker's side of a weight update: the client's messages become vLLM's native calls.

    init_transfer  {init_info}                       -> done   once per process and memory
    start_update   names                             -> done | error: names, nothing touched
    update_bucket  update_info                       -> done   any number of times
    finish_update  {version, digests: bool}          -> done, digests

Names are checked here as well, since a receiver would skip a missing tensor in silence.
"""

from collections.abc import Callable
from typing import Any

from ..checkpoint_index import SCALE_SUFFIX, CheckpointIndex, check_names, some_names
from ..json_array import json_array, read_json_array
from ..wire import Message


class EngineWeights:
    """What the engine's weights are, and the update that is under way. Worker process only."""

    def __init__(self, llm: Any, index: CheckpointIndex) -> None:
        self._llm = llm
        self._index = index
        self._waiting: set[str] | None = None  # names that are still to come; None: no update
        self._names: list[str] = []  # everything that came, scales included
        self.version = 0
        self._commands: dict[str, Callable[[Message], Message]] = {
            "init_transfer": self._init_transfer,
            "start_update": self._start_update,
            "update_bucket": self._update_bucket,
            "finish_update": self._finish_update,
        }

    def knows(self, kind: str) -> bool:
        """Whether a message of this kind is for this class."""
        return kind in self._commands

    def answer(self, message: Message) -> Message:
        """Obey a message. What it raises after `start_update` leaves the weights unusable."""
        return self._commands[message.kind](message)

    def reset_prefix_cache(self) -> None:
        """Forget the keys and values of earlier prompts."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM did not reset its prefix cache (requests still hold blocks); generating now "
                "would mix keys and values of old weights into new responses"
            )

    def _init_transfer(self, message: Message) -> Message:
        self._call("init_weight_transfer_engine", message.fields["init_info"])
        return Message("done")

    def _start_update(self, message: Message) -> Message:
        names: list[str] = read_json_array(message.arrays["names"])
        check_names(names, self._index)
        self._waiting, self._names = set(names), []
        self._call("start_weight_update")
        return Message("done")

    def _update_bucket(self, message: Message) -> Message:
        if self._waiting is None:
            raise RuntimeError("a bucket of weights came outside an update")
        update_info: dict[str, Any] = read_json_array(message.arrays["update_info"])
        for name in update_info["names"]:
            scale_of_sent = name.endswith(SCALE_SUFFIX) and name not in self._index.tensors
            if name not in self._waiting and not scale_of_sent:
                raise RuntimeError(f"{name} came twice, or was not announced")
            self._waiting.discard(name)
            self._names.append(name)
        self._call("update_weights", update_info)
        return Message("done")

    def _finish_update(self, message: Message) -> Message:
        if self._waiting is None or self._waiting:
            raise RuntimeError(f"an update ends without {some_names(self._waiting or ['a start'])}")
        self._call("finish_weight_update")
        self._waiting = None
        # It holds keys and values of the old weights.
        self.reset_prefix_cache()
        self.version = message.fields["version"]
        arrays = {}
        if message.fields["digests"]:
            arrays["digests"] = json_array(self._call("rollout_digests", self._names))
        return Message("done", {}, arrays)

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all vLLM workers."""
        answers: list[Any] = self._llm.collective_rpc(method, args=arguments)
        return answers
