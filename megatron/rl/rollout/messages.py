# SPDX-License-Identifier: Apache-2.0
"""Requests and rollouts as the fields and arrays of a message, and back."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from numpy.typing import NDArray

from .errors import RolloutDataError
from .protocol import GenerationRequest, SamplingSettings
from .rollouts import FinishedSequences, Rollouts
from .wire import Message

_INDEX = "index"


def request_fields(request: GenerationRequest) -> dict[str, Any]:
    """What of a request is no array, as JSON can carry it."""
    settings = asdict(request.settings)
    settings["stop_token_ids"] = list(request.settings.stop_token_ids)
    return {
        "settings": settings,
        "samples_per_prompt": request.samples_per_prompt,
        "first_sequence_index": request.first_sequence_index,
    }


def request_arrays(request: GenerationRequest) -> dict[str, NDArray[Any]]:
    """The arrays of a request."""
    arrays: dict[str, NDArray[Any] | None] = {
        "prompt_tokens": request.prompt_tokens,
        "prompt_offsets": request.prompt_offsets,
        "own_max_tokens": request.own_max_tokens,
        "own_seeds": request.own_seeds,
    }
    return {name: array for name, array in arrays.items() if array is not None}


def request_from_message(message: Message) -> GenerationRequest:
    """The request that the client put into a `generate` message."""
    settings = dict(message.fields["settings"])
    settings["stop_token_ids"] = tuple(settings["stop_token_ids"])
    return GenerationRequest(
        **message.arrays,
        samples_per_prompt=message.fields["samples_per_prompt"],
        settings=SamplingSettings(**settings),
        first_sequence_index=message.fields["first_sequence_index"],
    )


def sequences_message(request_id: Any, sequences: FinishedSequences) -> Message:
    """A part of an answer, sent while the rest is still being sampled."""
    arrays = {_INDEX: sequences.index, **sequences.rollouts.arrays()}
    return Message("sequences", {"id": request_id}, arrays)


def sequences_from_arrays(arrays: Mapping[str, NDArray[Any]]) -> FinishedSequences:
    """Undo `sequences_message`; raise RolloutDataError for arrays that are no sequences."""
    rest = dict(arrays)
    index = rest.pop(_INDEX, None)
    rollouts = Rollouts.from_arrays(rest, generation_s=0.0)
    if index is None or index.shape != rollouts.prompt_index.shape:
        raise RolloutDataError(f"sequences without their numbers: {sorted(arrays)}")
    return FinishedSequences(index, rollouts)
