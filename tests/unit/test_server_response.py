# SPDX-License-Identifier: Apache-2.0
"""Answers of a real vLLM 0.32 server, recorded, as rollouts; and answers that are none."""

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from megatron.rl.rollout.errors import EngineError, RolloutDataError
from megatron.rl.rollout.protocol import GenerationRequest, SamplingSettings
from megatron.rl.rollout.server.response import (
    generate_body,
    read_generated,
    read_scores,
    score_body,
    wanted_logprobs,
)
from megatron.rl.rollout.worker.vllm_sequences import join_sequences

VOCAB_SIZE = 128
# K = 4, so 5 were asked for; prompt 3 4 5, seed 123. The second token is not among them.
GENERATED = json.loads(
    '{"request_id":"generate-tokens-abc","choices":[{"index":0,"finish_reason":"length",'
    '"stop_reason":null,"token_ids":[123,79,97],"weight_versions":[{"version":"default",'
    '"start":0,"end":3}],"logprobs":{"content":[{"token_id":123,"logprob":-2.1333889961242676,'
    '"rank":1,"top_logprobs":[{"token_id":123,"logprob":-2.1333889961242676,"rank":1},'
    '{"token_id":6,"logprob":-2.900757074356079,"rank":2},{"token_id":45,'
    '"logprob":-3.1230297088623047,"rank":3},{"token_id":73,"logprob":-3.2907238006591797,'
    '"rank":4},{"token_id":54,"logprob":-3.3327269554138184,"rank":5}]},{"token_id":79,'
    '"logprob":-5.931694030761719,"rank":88,"top_logprobs":[{"token_id":79,'
    '"logprob":-5.931694030761719,"rank":88},{"token_id":123,"logprob":-2.239529609680176,'
    '"rank":1},{"token_id":61,"logprob":-3.0645625591278076,"rank":2},{"token_id":45,'
    '"logprob":-3.162283420562744,"rank":3},{"token_id":47,"logprob":-3.4558115005493164,'
    '"rank":4}]},{"token_id":97,"logprob":-3.080575466156006,"rank":3,"top_logprobs":['
    '{"token_id":97,"logprob":-3.080575466156006,"rank":3},{"token_id":123,'
    '"logprob":-2.4852137565612793,"rank":1},{"token_id":61,"logprob":-3.066572427749634,'
    '"rank":2},{"token_id":27,"logprob":-3.0845155715942383,"rank":4},{"token_id":56,'
    '"logprob":-3.22269606590271,"rank":5}]}]}}]}'
)
# The same request with top_p 0.1: one token is left, the others have no log-prob.
CUT = json.loads(
    '{"choices":[{"index":0,"finish_reason":"stop","token_ids":[123],"weight_versions":'
    '[{"version":"default","start":0,"end":1}],"logprobs":{"content":[{"token_id":123,'
    '"logprob":0.0,"rank":1,"top_logprobs":[{"token_id":123,"logprob":0.0,"rank":1},'
    '{"token_id":86,"logprob":-9999.0,"rank":2},{"token_id":85,"logprob":-9999.0,"rank":3},'
    '{"token_id":84,"logprob":-9999.0,"rank":4},{"token_id":87,"logprob":-9999.0,"rank":5}]}]}}]}'
)
SCORED = json.loads(
    '{"prompt_logprobs":[null,{"4":{"logprob":-3.8180460929870605,"rank":11}},'
    '{"5":{"logprob":-5.4832892417907715,"rank":65}},{"6":{"logprob":-2.900757074356079,'
    '"rank":2}}]}'
)
SETTINGS = SamplingSettings(max_tokens=3, top_logprobs=4, topk_precision="float32", seed=123)
EVALUATION = SamplingSettings(max_tokens=3, top_logprobs=4, top_p=0.1, training=False)


def read(answer: Any, settings: SamplingSettings = SETTINGS, label: str = "default") -> Any:
    return read_generated(answer, 7, settings, VOCAB_SIZE, label)


def test_a_recorded_answer_becomes_columns() -> None:
    sequence = read(GENERATED)
    assert (sequence.index, sequence.finished, sequence.aborted) == (7, False, False)
    assert sequence.tokens.tolist() == [123, 79, 97]
    expected = np.array([-2.1333889961242676, -5.931694030761719, -3.080575466156006], np.float32)
    assert np.array_equal(sequence.log_probs, expected)  # float32 survives JSON
    ids, values = sequence.topk.decode()
    assert ids.tolist() == [[123, 6, 45, 73], [123, 61, 45, 47], [123, 61, 97, 27]]
    assert values[1, 3] == np.float32(-3.4558115005493164)
    assert values[2, 2] == np.float32(-3.080575466156006)


def test_fewer_tokens_than_k_are_absent_entries() -> None:
    sequence = read(CUT, EVALUATION)
    ids, values = sequence.topk.decode()
    assert sequence.finished
    assert ids.tolist() == [[123, -1, -1, -1]]
    assert values[0, 0] == 0.0
    assert np.isneginf(values[0, 1:]).all()


def test_only_the_sampled_token() -> None:
    settings = SamplingSettings(max_tokens=3, top_logprobs=0)
    sequence = read(GENERATED, settings)
    assert sequence.topk.k == 0
    assert len(sequence.log_probs) == 3


def test_an_aborted_sequence() -> None:
    answer = copy.deepcopy(GENERATED)
    answer["choices"][0]["finish_reason"] = "abort"
    assert read(answer).aborted
    nothing = {"finish_reason": "abort", "token_ids": [], "weight_versions": None, "logprobs": None}
    sequence = read({"choices": [nothing]})
    assert sequence.aborted
    assert len(sequence.tokens) == 0


def position(answer: Any, row: int) -> Any:
    return answer["choices"][0]["logprobs"]["content"][row]


BREAKAGES: dict[str, Callable[[Any], Any]] = {
    "a sampled token without a log-prob": lambda a: position(a, 0).update(
        logprob=-9999.0, top_logprobs=[]
    ),
    "null": lambda a: position(a, 0).update(logprob=None),
    "NaN": lambda a: position(a, 0).update(logprob=float("nan")),
    "the K-th is missing": lambda a: position(a, 1)["top_logprobs"].pop(),
    "no ranks": lambda a: [e.update(rank=None) for e in position(a, 0)["top_logprobs"]],
    "another token's log-prob": lambda a: position(a, 0).update(token_id=6),
    "two values of one token": lambda a: position(a, 2)["top_logprobs"][0].update(logprob=-3.07),
    "positions missing": lambda a: a["choices"][0]["logprobs"]["content"].pop(),
    "no log-probs": lambda a: a["choices"][0].update(logprobs=None),
    "two choices": lambda a: a["choices"].append(a["choices"][0]),
    "an id outside the vocabulary": lambda a: position(a, 0)["top_logprobs"][1].update(
        token_id=VOCAB_SIZE
    ),
    "another reason": lambda a: a["choices"][0].update(finish_reason="repetition"),
    "versions of fewer tokens": lambda a: a["choices"][0]["weight_versions"][0].update(end=2),
    "no versions": lambda a: a["choices"][0].update(weight_versions=None),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_what_cannot_be_rollouts_is_refused(breakage: str) -> None:
    answer = copy.deepcopy(GENERATED)
    BREAKAGES[breakage](answer)
    request = GenerationRequest.from_lists([[3, 4, 5]], 8, SETTINGS)
    with pytest.raises(RolloutDataError):
        join_sequences(request, [read(answer)], 0).rollouts.validate(VOCAB_SIZE)


def test_answers_of_something_else() -> None:
    for answer in (None, [], {}, {"choices": []}, {"choices": [{"text": "hello"}]}):
        with pytest.raises(RolloutDataError, match="inference/v1/generate"):
            read(answer)


def test_weights_of_somebody_else_are_noticed() -> None:
    with pytest.raises(EngineError, match=r"called 'default', expected 'a1:7'"):
        read(GENERATED, label="a1:7")


def test_scores() -> None:
    tokens = np.array([3, 4, 5, 6], dtype=np.int32)
    expected = np.array([-3.8180460929870605, -5.4832892417907715, -2.900757074356079], np.float32)
    assert np.array_equal(read_scores(SCORED, tokens), expected)
    for wrong in ([3, 4, 5], [3, 4, 5, 7]):
        with pytest.raises(RolloutDataError):
            read_scores(SCORED, np.array(wrong, dtype=np.int32))
    for value in (float("nan"), -9999.0, 0.5, None):
        answer = copy.deepcopy(SCORED)
        answer["prompt_logprobs"][2]["5"]["logprob"] = value
        with pytest.raises(RolloutDataError):
            read_scores(answer, tokens)


def test_what_is_asked_for() -> None:
    settings = SamplingSettings(max_tokens=5, top_logprobs=20, seed=9, stop_token_ids=(1, 2))
    request = GenerationRequest.from_lists([[3, 4], [5]], 2, settings)
    body = generate_body(request, 2, "id", VOCAB_SIZE)
    assert body["token_ids"] == [5]
    params = body["sampling_params"]
    seeds = request.seeds()
    assert seeds is not None
    assert params["seed"] == int(seeds[2])
    assert params["logprobs"] == 21
    assert (params["max_tokens"], params["stop_token_ids"]) == (5, [1, 2])
    assert params["ignore_eos"] is True
    json.dumps(body)
    json.dumps(score_body(np.array([1, 2], dtype=np.int32)))
    assert [wanted_logprobs(k, 128) for k in (0, 1, 127, 128)] == [0, 2, 128, 128]
