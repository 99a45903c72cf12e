# SPDX-License-Identifier: Apache-2.0
"""A rollout engine that repeats what another run recorded, bit for bit, without a model.

The run that replays asks for its batches as if an engine sampled them. Its prompts and sampling
settings, seeds included, must be those of the record; how the batch is split over owners, and all
that comes after sampling (loss, masks, minibatches, layout), may differ.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron.rl.errors import UserError
from megatron.rl.rollout.errors import EngineRequestError
from megatron.rl.rollout.protocol import GenerationRequest, OnFinished, WeightsReport
from megatron.rl.rollout.records.record import Purpose, Record, RecordInfo
from megatron.rl.rollout.records.record_folder import RecordFolder
from megatron.rl.rollout.rollouts import FinishedSequences, Rollouts

if TYPE_CHECKING:
    import torch


class ReplayEngine:
    """A `RolloutEngine` on the records in a folder.

    Training batches are taken in order, and held-out batches likewise. Each owner makes its own
    engine; a request's ``first_sequence_index`` says which sequences of the batch are asked for.
    A batch that dynamic sampling has refilled is replayed as it was trained on: its prompts, which
    are not neighbours in the stream, are those of :meth:`prompt_ids`.
    """

    def __init__(self, folder: str | Path) -> None:
        """List the records.

        Raises:
            UserError: there are none.
        """
        self._records = RecordFolder(folder)
        self._version = 0
        self._done = 0
        self._left: dict[Purpose, list[int]] = {
            "train": self._records.numbers("train"),
            "heldout": self._records.numbers("heldout"),
        }

    def skip(self, batches: int, evaluated: int | None = None) -> None:
        """Go on behind so many training batches, and the evaluations made before the last of them.

        Args:
            batches: from the first on; never fewer than are done already.
            evaluated: the training batches before the newest evaluation that was made, -1 for none;
                by default, so many that an evaluation behind the last batch is to come.
        """
        evaluated = batches - 1 if evaluated is None else evaluated
        self._done = batches
        self._left["train"] = [n for n in self._left["train"] if n > batches]
        self._left["heldout"] = [n for n in self._left["heldout"] if n > evaluated]

    def prompt_ids(self, number: int) -> NDArray[np.int64]:
        """Return the prompts of training batch ``number``, the next one; one id a group, or none.

        Raises:
            UserError: there is no such batch.
        """
        found = self._next("train")
        if found != number:
            raise UserError(
                f"rollout.replay_from: the next batch of {self._records.folder} is {found}, this "
                f"run asks for {number}"
            )
        return self._records.prompt_ids("train", number)

    def generate(
        self, request: GenerationRequest, on_finished: OnFinished | None = None
    ) -> Rollouts:
        """Return the recorded responses to the request.

        Raises:
            UserError: there is no further batch, or it answers another request than this one.
        """
        purpose: Purpose = "train" if request.settings.training else "heldout"
        number = self._next(purpose)
        self._check_settings(self._records.info(purpose, number), request)
        start = request.first_sequence_index
        record = self._records.sequences(purpose, number, start, start + request.num_sequences)
        self._check_prompts(record, request)
        rollouts = record.rollouts
        if rollouts.policy_version > self._version:
            raise self._refusal(
                record.info,
                f"was sampled with policy version {rollouts.policy_version}, this run is at "
                f"{self._version}",
            )
        self._left[purpose].pop(0)
        if purpose == "train":
            self._done = number
        ended = np.flatnonzero(~rollouts.aborted)
        if on_finished is not None and len(ended):
            on_finished(FinishedSequences(ended, rollouts.select(ended)))
        return rollouts

    def wait_ready(self) -> None:
        """Records need no start."""

    def abort(self) -> None:
        """Nothing is ever under way."""

    def update_weights(
        self,
        tensors: "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]",
        version: int,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> WeightsReport:
        """Note the version, which never falls; the tensors are not looked at."""
        if version < self._version:
            raise EngineRequestError(
                f"policy version {version} after {self._version}: versions never fall"
            )
        self._version = version
        return WeightsReport(version, 0, 0, 0.0, 0, ())

    def weight_slot(self, name: str, shape: Sequence[int]) -> "torch.Tensor | None":
        """Nothing reads the tensors: they may be assembled anywhere."""
        return None

    def score(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """Refused: there is no model.

        Raises:
            EngineRequestError: always.
        """
        raise EngineRequestError(
            "rollout.engine replay has no weights, and no log-probs of other tokens than recorded"
        )

    def sleep(self, level: int = 1) -> None:
        """Nothing: records need no memory of a GPU."""

    def wake(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing to end."""

    def _next(self, purpose: Purpose) -> int:
        """Return the number of the next batch."""
        train = self._left["train"]
        if train and train[0] != self._done + 1:
            raise UserError(
                f"rollout.replay_from: {self._records.folder} has no train batch {self._done + 1}, "
                f"the next one there is {train[0]}; records.keep of the recorded run removes the "
                "first ones"
            )
        if not self._left[purpose]:
            raise UserError(
                f"rollout.replay_from: {self._records.folder} has no further {purpose} batch "
                f"(recorded: {len(self._records.numbers(purpose))}); lower train.rollouts"
                + (", or evaluate as often as the recorded run" if purpose == "heldout" else "")
            )
        return self._left[purpose][0]

    def _check_settings(self, info: RecordInfo, request: GenerationRequest) -> None:
        for field in dataclasses.fields(request.settings):
            recorded = getattr(info.settings, field.name)
            asked = getattr(request.settings, field.name)
            if recorded != asked:
                hint = " (it follows from run.seed)" if field.name == "seed" else ""
                raise self._refusal(
                    info,
                    f"was sampled with {field.name} {recorded}, this run asks for {asked}{hint}",
                )
        if info.samples_per_prompt != request.samples_per_prompt:
            raise self._refusal(
                info,
                f"has {info.samples_per_prompt} responses to a prompt, this run asks for "
                f"{request.samples_per_prompt}",
            )

    def _check_prompts(self, record: Record, request: GenerationRequest) -> None:
        samples = request.samples_per_prompt
        for place in range(request.num_prompts):
            if not np.array_equal(record.prompt(place * samples), request.prompt(place)):
                sequence = record.info.first_sequence + place * samples
                raise self._refusal(
                    record.info,
                    f"answers another prompt at sequence {sequence} than this run asks: task, "
                    "tokenizer, run.seed, rollout.prompts and rollout.refill_rounds must be those "
                    "of the recorded run",
                )

    def _refusal(self, info: RecordInfo, reason: str) -> UserError:
        return UserError(
            f"rollout.replay_from: {info.purpose} batch {info.number} of {self._records.folder} "
            f"{reason}"
        )
