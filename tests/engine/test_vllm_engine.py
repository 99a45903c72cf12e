# SPDX-License-Identifier: Apache-2.0
"""The real engine: what it reports is true, updates are exact, and it survives being killed."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.transport_decisions import count_changes, pooled, recorded_tokens
from megatron.rl.rollout.errors import EngineDied, EngineRequestError, WeightNamesError
from megatron.rl.rollout.json_array import json_array
from megatron.rl.rollout.protocol import GenerationRequest, SamplingSettings
from megatron.rl.rollout.resume import merge_resumed, resume_request
from megatron.rl.rollout.rollouts import FinishedSequences, Rollouts
from megatron.rl.rollout.topk_columns import TopKColumns
from tests.engine.conftest import cpu_config, group_is_gone, run_engine
from tests.engine.tiny_model import VOCAB_SIZE, perturbed, save_checkpoint

K = 20
TOLERANCE = 1e-4
SETTINGS = SamplingSettings(max_tokens=12, top_logprobs=K, topk_precision="float32", seed=11)
# One prompt is longer than a block of the KV cache (128 tokens), so that it can be cached.
PROMPTS = [[5, 6, 7], [9], list(range(100, 20, -1)) * 2, [40, 41, 42, 43, 44]]


def make_request(settings: SamplingSettings = SETTINGS, samples: int = 4) -> GenerationRequest:
    return GenerationRequest.from_lists(PROMPTS, samples, settings)


def assert_identical(got: Rollouts, expected: Rollouts) -> None:
    """Bit for bit: tokens, every log-prob, every top-K entry."""
    left, right = got.arrays(), expected.arrays()
    for name in left.keys() - {"policy_versions"}:
        assert left[name].tobytes() == right[name].tobytes(), f"{name} differs"


@torch.no_grad()
def reference_log_probs(
    model: torch.nn.Module, request: GenerationRequest, rollouts: Rollouts, index: int
) -> torch.Tensor:
    """log_softmax(logits / T) [T, V] of one sequence's response tokens, by transformers."""
    prompt = request.prompt(int(rollouts.prompt_index[index]))
    response = rollouts.response(index)
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
    logits = model(ids).logits[0, len(prompt) - 1 : -1].double()
    return torch.log_softmax(logits / request.settings.temperature, dim=-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_transformers_at_this_temperature(
    moe_engine, checkpoint, temperature
):
    request = make_request(replace(SETTINGS, temperature=temperature))
    rollouts = moe_engine.engine.generate(request)
    topk_ids, topk_log_probs = rollouts.topk.decode()
    assert topk_ids.shape == (rollouts.num_tokens, K)
    np.testing.assert_array_equal(rollouts.prompt_index, np.repeat(np.arange(4), 4))
    outside = 0
    for index in range(rollouts.num_sequences):
        exact = reference_log_probs(checkpoint.model, request, rollouts, index)
        rows = slice(rollouts.response_offsets[index], rollouts.response_offsets[index + 1])
        sampled = torch.from_numpy(rollouts.response(index).astype(np.int64))[:, None]
        ids = torch.from_numpy(topk_ids[rows].astype(np.int64))
        got = torch.from_numpy(topk_log_probs[rows]).double()
        log_probs = torch.from_numpy(rollouts.log_probs[rows]).double()
        assert (log_probs - exact.gather(1, sampled)[:, 0]).abs().max() < TOLERANCE
        assert (got - exact.gather(1, ids)).abs().max() < TOLERANCE
        # They are the K largest: values agree with the true top K, wherever ties fell.
        assert (got - exact.topk(K).values).abs().max() < TOLERANCE
        assert all(len(set(row)) == K for row in ids.tolist())
        inside = (ids == sampled).any(dim=1)
        same = torch.where(ids == sampled, got, torch.nan).nan_to_num(nan=-torch.inf).amax(1)
        assert torch.equal(same[inside], log_probs[inside])
        assert (log_probs[~inside] <= got[~inside, -1]).all()
        outside += int((~inside).sum())
    assert outside > 0, "no sampled token outside the top K: the case was not tested"


def test_samples_follow_the_distribution(moe_engine, checkpoint):
    settings = SamplingSettings(max_tokens=1, top_logprobs=0, seed=2, temperature=0.7)
    request = GenerationRequest.from_lists([[5, 6, 7]], 2000, settings)
    rollouts = moe_engine.engine.generate(request)
    assert (len(rollouts.topk), rollouts.topk.k) == (2000, 0)
    exact = reference_log_probs(checkpoint.model, request, rollouts, 0)[0].exp().numpy()
    counts = np.bincount(rollouts.response_tokens, minlength=VOCAB_SIZE)
    chi_square = ((counts - 2000 * exact) ** 2 / (2000 * exact)).sum()
    # 127 degrees of freedom: mean 127, standard deviation 16.
    assert chi_square < 127 + 5 * 16


def test_a_seed_decides_everything_and_samples_differ(moe_engine):
    engine = moe_engine.engine
    first = engine.generate(make_request())
    assert_identical(engine.generate(make_request()), first)
    other = engine.generate(make_request(replace(SETTINGS, seed=12)))
    assert other.response_tokens.tobytes() != first.response_tokens.tobytes()
    samples = [first.response(i).tobytes() for i in range(first.num_sequences)]
    assert len(set(samples)) == len(samples)


def test_a_sequence_does_not_depend_on_its_batch(moe_engine):
    whole = moe_engine.engine.generate(make_request())
    part = GenerationRequest.from_lists(PROMPTS[1:3], 4, SETTINGS, first_sequence_index=4)
    rollouts = moe_engine.engine.generate(part)
    for index in range(8):
        np.testing.assert_array_equal(rollouts.response(index), whole.response(index + 4))


def test_stop_tokens_end_a_response_and_belong_to_it(moe_engine):
    stops = tuple(range(0, VOCAB_SIZE, 16))
    rollouts = moe_engine.engine.generate(make_request(replace(SETTINGS, stop_token_ids=stops)))
    assert rollouts.finished.any() and not rollouts.finished.all()
    for index in range(rollouts.num_sequences):
        response = rollouts.response(index)
        assert not np.isin(response[:-1], stops).any()
        assert np.isin(response[-1], stops) == rollouts.finished[index]
        assert rollouts.finished[index] or len(response) == SETTINGS.max_tokens


def test_nothing_but_stop_tokens_ends_a_response(moe_engine):
    settings = replace(SETTINGS, max_tokens=80)
    rollouts = moe_engine.engine.generate(make_request(settings, samples=8))
    assert (rollouts.response_tokens == 1).any(), "the checkpoint's own end token was not sampled"
    assert (rollouts.lengths == 80).all() and not rollouts.finished.any()


def test_evaluation_may_cut_the_support_and_absent_entries_are_marked(moe_engine):
    settings = SamplingSettings(max_tokens=4, top_k=3, top_logprobs=5, training=False, seed=1)
    rollouts = moe_engine.engine.generate(make_request(settings))
    ids, log_probs = rollouts.topk.decode()
    assert (ids[:, 3:] == -1).all() and (ids[:, :3] >= 0).all()
    assert np.isneginf(log_probs[:, 3:]).all()
    np.testing.assert_allclose(np.exp(log_probs[:, :3]).sum(1), 1, atol=1e-4)
    greedy = replace(settings, temperature=0.0, top_k=0)
    rollouts = moe_engine.engine.generate(make_request(greedy))
    np.testing.assert_array_equal(rollouts.response_tokens, rollouts.topk.decode()[0][:, 0])


def test_compact_log_probs_are_the_engine_s_rounded_once(moe_engine):
    exact = moe_engine.engine.generate(make_request())
    compact = moe_engine.engine.generate(make_request(replace(SETTINGS, topk_precision="fp24")))
    ids, log_probs = exact.topk.decode()
    rounded = TopKColumns.encode(ids, log_probs, VOCAB_SIZE)
    assert compact.topk.log_probs.tobytes() == rounded.log_probs.tobytes()
    np.testing.assert_array_equal(compact.topk.decode()[0], ids)
    assert compact.log_probs.tobytes() == exact.log_probs.tobytes(), "the sampled one is exact"


def test_mask_decisions_on_recorded_rollouts_survive_storing(moe_engine, checkpoint):
    request = make_request(replace(SETTINGS, max_tokens=60), samples=16)
    rollouts = moe_engine.engine.generate(request)
    policy = type(checkpoint.model)(checkpoint.model.config).float().eval()
    policy.load_state_dict(perturbed(checkpoint.model.state_dict(), seed=3))
    counts = count_changes(recorded_tokens(policy, request, rollouts, seed=0))
    assert min(count.outside for count in counts.values()) > 200
    assert pooled(counts).share <= 1e-4


# Responses of many lengths, the last after about a second.
LONG = replace(SETTINGS, max_tokens=90, stop_token_ids=tuple(range(0, VOCAB_SIZE, 64)))


def test_finished_sequences_arrive_while_others_run(moe_engine):
    request = make_request(LONG, samples=40)
    whole = moe_engine.engine.generate(request)
    parts: list[FinishedSequences] = []
    streamed = moe_engine.engine.generate(request, parts.append)
    assert_identical(streamed, whole)
    assert len(parts) > 1, "all of it came at once"
    index = np.concatenate([part.index for part in parts])
    assert sorted(index) == list(range(request.num_sequences))
    for part in parts:
        assert_identical(part.rollouts, whole.select(part.index))
    first = parts[0].rollouts.lengths
    assert first.mean() < whole.lengths.mean(), "the short ones come first"


def test_aborted_rollouts_are_resumed_with_new_weights(moe_engine, fresh_engine, new_tensors):
    """Each token's version, and the new part's log-probs, by an engine that never had the old."""
    engine = moe_engine.engine
    request = make_request(LONG, samples=40)
    whole = engine.generate(request)
    partial = engine.generate(request, lambda part: engine.abort())
    assert partial.aborted.any() and partial.finished.any()
    assert not (partial.aborted & partial.finished).any()
    for index in range(partial.num_sequences):
        kept = partial.lengths[index]
        np.testing.assert_array_equal(partial.response(index), whole.response(index)[:kept])
        assert partial.aborted[index] or kept == whole.lengths[index]
    assert_identical(engine.generate(request), whole)

    engine.update_weights(new_tensors, 6)
    follow_up = resume_request(request, partial)
    resumed = engine.generate(follow_up)
    assert_identical(resumed, fresh_engine.engine.generate(follow_up))
    merged = merge_resumed(partial, resumed)
    assert merged.aborted.sum() == 0 and merged.policy_version == 6
    assert (merged.lengths <= LONG.max_tokens).all()
    for index in range(partial.num_sequences):
        rows = slice(*merged.response_offsets[index : index + 2])
        kept = partial.lengths[index]
        versions = merged.policy_versions[rows]
        np.testing.assert_array_equal(versions, [0] * kept + [6] * (len(versions) - kept))
        ended = merged.finished[index]
        assert ended or len(versions) == LONG.max_tokens
        assert np.isin(merged.response(index)[-1], LONG.stop_token_ids) == ended


def test_what_vllm_itself_refuses_leaves_the_engine_as_it_was(moe_engine):
    engine = moe_engine.engine
    start, pid = engine.generate(make_request()), engine.pid
    request = make_request()
    # Too long for the engine, past the client's own check of that.
    longer = replace(engine._limits, max_model_len=400)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_limits", longer)
        prompts = [*PROMPTS, [5] * 300]
        with pytest.raises(EngineRequestError, match="vLLM refuses the request"):
            engine.generate(GenerationRequest.from_lists(prompts, 2, SETTINGS))
    assert_identical(engine.generate(request), start)
    assert engine.pid == pid


@pytest.fixture(scope="session")
def fresh_engine(checkpoint, tmp_path_factory):
    """An engine that was started from perturbed weights and never updated."""
    model = type(checkpoint.model)(checkpoint.model.config).float().eval()
    model.load_state_dict(perturbed(checkpoint.model.state_dict(), seed=3))
    folder = save_checkpoint(model, tmp_path_factory.mktemp("fresh") / "moe")
    yield from run_engine(cpu_config(folder, max_restarts=0))


@pytest.fixture(scope="session")
def new_tensors(checkpoint):
    from tests.engine.tiny_model import checkpoint_tensors

    model = type(checkpoint.model)(checkpoint.model.config).float().eval()
    model.load_state_dict(perturbed(checkpoint.model.state_dict(), seed=3))
    return checkpoint_tensors(model)


def test_an_updated_engine_equals_a_fresh_one_bit_for_bit(moe_engine, fresh_engine, new_tensors):
    engine = moe_engine.engine
    before = engine.generate(make_request())
    engine.update_weights(iter(new_tensors.items()), 1)
    after = engine.generate(make_request())
    assert (before.policy_version, after.policy_version) == (0, 1)
    fresh = fresh_engine.engine.generate(make_request())
    assert_identical(after, fresh)
    assert after.log_probs.tobytes() != before.log_probs.tobytes()


def test_perturb_sync_restore_sync_is_the_start(moe_engine, checkpoint, new_tensors):
    engine = moe_engine.engine
    start = engine.generate(make_request())
    for version in (1, 3):
        engine.update_weights(new_tensors, version)
        assert engine.generate(make_request()).log_probs.tobytes() != start.log_probs.tobytes()
        engine.update_weights(checkpoint.tensors, version + 1)
        assert_identical(engine.generate(make_request()), start)


def test_every_tensor_has_an_effect(moe_engine, checkpoint, new_tensors):
    """A destination that is skipped would leave the rollouts as they were."""
    engine = moe_engine.engine
    start = engine.generate(make_request())
    for name in checkpoint.tensors:
        engine.update_weights({**checkpoint.tensors, name: new_tensors[name]}, 1)
        changed = engine.generate(make_request())
        assert changed.log_probs.tobytes() != start.log_probs.tobytes(), f"{name} has no effect"


def test_wrong_names_are_refused_and_change_nothing(moe_engine, checkpoint, new_tensors):
    engine = moe_engine.engine
    start = engine.generate(make_request())
    expert = "model.layers.1.mlp.experts.2.down_proj.weight"
    missing = {name: tensor for name, tensor in new_tensors.items() if name != expert}
    fused = "model.layers.1.mlp.experts.down_proj"
    for update, message in (
        (missing, expert),
        ({**missing, fused: torch.zeros(4, 64, 32)}, fused),
        ([*new_tensors.items(), (expert, new_tensors[expert])], "twice"),
        ({**new_tensors, expert: new_tensors[expert].t().contiguous()}, "shape"),
    ):
        with pytest.raises(WeightNamesError, match=message):
            engine.update_weights(update, 9)
        again = engine.generate(make_request())
        assert_identical(again, start)
        assert again.policy_version == 0


def test_the_worker_checks_names_for_itself(moe_engine, new_tensors):
    """The second line: an update that did not come from this client's checks."""
    engine = moe_engine.engine
    start = engine.generate(make_request())
    names = json_array(list(new_tensors)[:-1])
    with pytest.raises(WeightNamesError, match="missing"):
        engine._process.handle.call("start_update", {}, {"names": names}, 60)
    assert_identical(engine.generate(make_request()), start)


def test_a_killed_engine_comes_back_with_the_last_weights(moe_engine, new_tensors):
    engine = moe_engine.engine
    engine.update_weights(new_tensors, 4)
    long = make_request(replace(SETTINGS, max_tokens=90), samples=40)
    expected = engine.generate(long)
    killed = []

    def kill_once(fields):
        if not killed:
            assert 0 <= fields["sequences_done"] < fields["sequences"] == 160
            killed.append(engine.pid)
            os.kill(engine.pid, signal.SIGKILL)

    moe_engine.on_progress = kill_once
    got = engine.generate(long)
    assert killed and engine.pid != killed[0] and engine.restarts == 1
    assert group_is_gone(killed[0])
    assert got.policy_version == 4
    assert_identical(got, expected)
    assert any("restart 1 of 2" in event and "SIGKILL" in event for event in moe_engine.events)


PARENT = """
import sys
from pathlib import Path
from megatron.rl.rollout.protocol import GenerationRequest, SamplingSettings
from megatron.rl.rollout.client.vllm_engine import VLLMEngine
from tests.engine.conftest import cpu_config
from tests.engine.tiny_model import build_model, checkpoint_tensors

config = cpu_config(Path(sys.argv[1]), log_path=sys.argv[2])
engine = VLLMEngine(config, on_progress=lambda fields: print("busy", flush=True))
engine.start()
print(engine.pid, flush=True)
engine.update_weights(checkpoint_tensors(build_model()), 1)
settings = SamplingSettings(max_tokens=200, seed=1)
while True:
    engine.generate(GenerationRequest.from_lists([[5, 6, 7]], 500, settings))
"""


def test_a_killed_trainer_takes_the_engine_along(checkpoint, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment["TMPDIR"] = str(tmp_path)
    log = tmp_path / "engine.log"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(checkpoint.folder), str(log)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    pid = int(parent.stdout.readline())
    assert parent.stdout.readline() == "busy\n"
    assert not group_is_gone(pid)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while not group_is_gone(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert group_is_gone(pid)
    assert [path.name for path in tmp_path.glob("rollout-*")] == []


def test_a_death_without_restarts_is_reported_at_once(fresh_engine):
    """Last, since the engine is gone afterwards."""
    engine = fresh_engine.engine
    engine.wait_ready()
    pid = engine.pid
    fresh_engine.on_progress = lambda fields: os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(EngineDied, match=r"max_restarts=0: .*killed by SIGKILL.*log:") as caught:
        engine.generate(make_request(replace(SETTINGS, max_tokens=90), samples=60))
    assert time.monotonic() - started < 30
    assert "\n" not in str(caught.value)
    assert group_is_gone(pid)
    with pytest.raises(EngineDied):
        engine.generate(make_request())
    engine.close()
    os.remove(engine.log_path)
