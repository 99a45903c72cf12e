# SPDX-License-Identifier: Apache-2.0
"""A task whose responses say how they are scored: as a number, or as Python that scores."""

import time

from megatron.rl.rewards.task import Prompt

CODE = "py:"


def prompt(index: int = 0, **entry: object) -> Prompt:
    return Prompt("question", "train", index, entry)


class ScriptedTask:
    name = "scripted"

    def __init__(self, load_s: float = 0.0, load: str = "") -> None:
        time.sleep(load_s)
        exec(load)

    def prompt(self, split: str, seed: int, index: int) -> Prompt:
        return prompt(index)

    def reward(self, response_text: str, prompt: Prompt) -> object:
        if not response_text.startswith(CODE):
            return float(response_text)
        scope = {"prompt": prompt, "score": 0.5}
        exec(response_text.removeprefix(CODE), scope)
        return scope["score"]

    def answer(self, response_text: str) -> object:
        if response_text == "1":
            return None
        return 5 if response_text == "0.125" else response_text[:6]


def length_reward(response_text: str, prompt: Prompt) -> float:
    return min(len(response_text) / int(prompt.entry["full"]), 1.0)


NOT_CALLABLE = 3
