# SPDX-License-Identifier: Apache-2.0
"""Any reasoning_gym data set as a task: generated questions, scored by the data set itself."""

import contextlib
import dataclasses
import difflib
import hashlib
import io
import warnings
from collections.abc import Mapping
from typing import Any

from megatron.rl.errors import UserError
from megatron.rl.rewards.reasoning_gym_scoring import score_answer
from megatron.rl.rewards.task import SPLITS, Prompt, Split

# Entries that a data set is asked for unless its params say otherwise. A few data sets build them
# all at once, a few cannot make as many; most make each on demand.
DEFAULT_SIZE = 100_000
# One question text in so many is held out, by a hash of the text.
HELDOUT_ONE_IN = 8
# Entries tried before a split counts as empty: 7/8 to this power is nothing.
MAX_TRIES = 1000


class ReasoningGymTask:
    """Prompts and rewards of one reasoning_gym data set.

    Entry i of a data set with seed s is often entry i+1 of seed s-1, so two data sets with
    neighbouring seeds share nearly everything and cannot serve as two splits. Here one data set is
    made, with a fixed seed, and each *question text* belongs to one split by its hash: the splits
    are disjoint for all seeds and sizes, also where the data set repeats itself. A prompt is found
    by drawing entries, from a hash of (split, seed, index), until one belongs to the split.

    Scores are the data set's own, partial credit included, but for what it gives to any text, see
    :mod:`~megatron.rl.rewards.reasoning_gym_scoring`; with `exact` a full score is 1 and everything
    else 0. White space around a response is dropped before it is scored.

    Args:
        dataset: name of a reasoning_gym data set, such as "spell_backward".
        params: fields of its config; `size` is the number of entries to draw from.
        exact: no partial credit.

    Raises:
        UserError: unknown data set or field, or values that the data set refuses.
    """

    def __init__(
        self, dataset: str, params: Mapping[str, Any] | None = None, *, exact: bool = False
    ) -> None:
        self._dataset = _make_dataset(dataset, dict(params or {}))
        self._size = len(self._dataset)
        self._exact = exact
        self._data_set_name = dataset
        self._name = f"reasoning_gym/{dataset}"

    @property
    def name(self) -> str:
        """``reasoning_gym/<data set>``."""
        return self._name

    def prompt(self, split: Split, seed: int, index: int) -> Prompt:
        """Return the prompt at `index` of the sequence that `split` and `seed` define."""
        if split not in SPLITS or index < 0:
            raise ValueError(f"expected a split of {SPLITS} and an index >= 0: {split!r}, {index}")
        for attempt in range(MAX_TRIES):
            draw = _hash(f"{split}/{seed}/{index}/{attempt}")
            entry = self._dataset[draw % self._size]
            if split_of(entry["question"]) == split:
                return Prompt(entry["question"], split, index, entry)
        raise UserError(
            f"{self._name}: none of {MAX_TRIES} entries belongs to the {split} split; the data set "
            "has too few different questions, widen task.params"
        )

    def reward(self, response_text: str, prompt: Prompt) -> float:
        """Score a response with the data set's own rule."""
        rule = self._dataset.score_answer
        score = score_answer(self._data_set_name, rule, response_text.strip(), prompt.entry)
        return float(score >= 1.0) if self._exact else score

    def reference_answer(self, prompt: Prompt) -> str:
        """Return the answer that the data set gives.

        Raises:
            UserError: the data set has no single answer, only a rule that judges one.
        """
        answer = prompt.entry["answer"]
        if answer is None:
            raise UserError(f"{self._name} has no reference answers to learn from")
        return str(answer)


def split_of(question: str) -> Split:
    """Return the split that a question text belongs to, for every seed and data set."""
    return "heldout" if _hash(question) % HELDOUT_ONE_IN == 0 else "train"


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _make_dataset(name: str, params: dict[str, Any]) -> Any:
    # Importing its hundred data sets compiles source that warns, and one library greets on stdout.
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            from reasoning_gym.factory import DATASETS, create_dataset
        except ImportError as error:
            raise UserError(
                f"task reasoning_gym/{name} needs the package reasoning-gym, which is not "
                f"installed ({error}); run tools/bootstrap.sh"
            ) from None
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {len(DATASETS)} others"
        raise UserError(f"task.name: reasoning_gym has no data set {name!r}; {hint}")
    known = sorted(f.name for f in dataclasses.fields(DATASETS[name][1]) if f.name != "seed")
    if "seed" in params:
        raise UserError("task.params.seed has no effect: prompts follow the seed of the run")
    unknown = sorted(params.keys() - set(known))
    if unknown:
        raise UserError(f"task.params.{unknown[0]}: {name} has only {', '.join(known)}")
    settings = {"size": DEFAULT_SIZE, "seed": 0} | params
    try:
        return create_dataset(name, **settings)
    except (AssertionError, ValueError, TypeError) as error:
        raise UserError(
            f"task.params: {name} refuses {params} with size {settings['size']}: "
            f"{error or type(error).__name__}"
        ) from None
