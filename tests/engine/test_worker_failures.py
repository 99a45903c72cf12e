# SPDX-License-Identifier: Apache-2.0
"""What the client does when the process misbehaves, with a fake worker that starts at once."""

import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from megatron.rl.rollout.client import worker_handle
from megatron.rl.rollout.client.vllm_engine import VLLMEngine
from megatron.rl.rollout.client.worker_handle import last_error_line
from megatron.rl.rollout.errors import (
    EngineConfigError,
    EngineDied,
    EngineError,
    EngineRequestError,
    EngineStartError,
    EngineTimeout,
    RolloutDataError,
)
from megatron.rl.rollout.protocol import GenerationRequest, SamplingSettings
from megatron.rl.rollout.rollouts import FinishedSequences
from tests.engine.conftest import cpu_config, group_is_gone

FAKE_WORKER = Path(__file__).with_name("fake_worker.py")
REQUEST = GenerationRequest.from_lists([[1, 2]], 3, SamplingSettings(max_tokens=2, top_logprobs=4))


class FakeEngine(VLLMEngine):
    """VLLMEngine with the fake worker in place of the real one."""

    behaviour = "good"
    counter = ""

    def _worker_command(self) -> list[str]:
        return [sys.executable, str(FAKE_WORKER), self.behaviour, self.counter]


@pytest.fixture
def make_engine(checkpoint, tmp_path):
    made = []

    def make(behaviour: str, **changes) -> FakeEngine:
        changes = {"log_path": str(tmp_path / "engine.log"), "stall_timeout_s": 20, **changes}
        engine = FakeEngine(cpu_config(checkpoint.folder, **changes), on_event=events.append)
        engine.behaviour, engine.counter = behaviour, str(tmp_path / "starts")
        engine.events = events
        made.append(engine)
        return engine

    events: list[str] = []
    yield make
    for engine in made:
        engine.close()


def test_a_good_worker(make_engine, checkpoint):
    engine = make_engine("good")
    rollouts = engine.generate(REQUEST)  # starts by itself
    assert rollouts.num_sequences == 3
    pid = engine.pid
    assert os.getsid(pid) == pid, "Ctrl-C in the trainer's terminal must not reach the engine"
    engine.update_weights(checkpoint.tensors, 7)
    assert engine.generate(REQUEST).policy_version == 7
    engine.close()
    assert group_is_gone(pid)
    with pytest.raises(EngineError, match="closed"):
        engine.generate(REQUEST)


def test_a_thread_that_starts_the_engine_may_end(make_engine):
    """The kernel's death signal is tied to the starting thread, not to the process."""
    engine = make_engine("good")
    starter = threading.Thread(target=engine.start)
    starter.start()
    starter.join()
    time.sleep(0.3)
    assert engine.generate(REQUEST).num_sequences == 3
    assert engine.restarts == 0


def test_death_while_importing_is_a_start_error_with_the_reason(make_engine):
    engine = make_engine("die_before_connecting")
    started = time.monotonic()
    with pytest.raises(EngineStartError, match=r"status 3.*ImportError: libtorch.*engine\.log"):
        engine.wait_ready()
    assert time.monotonic() - started < 10
    assert engine.restarts == 0


def test_a_refused_start_carries_vllms_own_words(make_engine):
    with pytest.raises(EngineStartError, match="ValueError: no such dtype"):
        make_engine("refuse_start").wait_ready()


def test_a_refused_setting_is_a_value_error(make_engine):
    with pytest.raises(ValueError, match="no such dtype"):
        make_engine("refuse_setting").wait_ready()


def test_a_start_that_takes_too_long(make_engine):
    engine = make_engine("never_ready", start_timeout_s=1.0)
    engine.start()
    pid = engine.pid
    with pytest.raises(EngineStartError, match="start_timeout_s"):
        engine.wait_ready()
    assert group_is_gone(pid)


def test_a_python_that_does_not_exist(make_engine, monkeypatch):
    engine = make_engine("good")
    monkeypatch.setattr(engine, "_worker_command", lambda: ["/no/such/python"])
    with pytest.raises(EngineStartError, match="/no/such/python"):
        engine.start()


def test_k_above_the_limit_that_the_engine_reports(make_engine):
    with pytest.raises(EngineConfigError, match=r"top_logprobs=20 .* limit of 5"):
        make_engine("low_limit").wait_ready()


@pytest.mark.parametrize("behaviour", ["die", "garbage", "fatal", "other_id", "hang"])
def test_failures_are_repaired_with_the_last_weights(make_engine, checkpoint, behaviour):
    engine = make_engine(f"{behaviour},good", stall_timeout_s=1.0)
    engine.update_weights(checkpoint.tensors, 5)
    rollouts = engine.generate(REQUEST)
    assert rollouts.policy_version == 5, "the new process must have received the last weights"
    assert engine.restarts == 1
    assert any("restart 1 of 2 during generate" in event for event in engine.events)
    engine.generate(REQUEST)


def test_restarts_are_counted_over_the_run_and_end(make_engine):
    engine = make_engine("die,die,die,good", max_restarts=2)
    with pytest.raises(EngineDied) as caught:
        engine.generate(REQUEST)
    text = str(caught.value)
    for part in (
        "after 2 restart(s)",
        "killed by SIGKILL",
        "CUDA error",
        "engine.log",
        "max_restarts=2",
    ):
        assert part in text
    assert "frame #12" not in text and len(text) < 1000, "one line of the log, not a screenful"
    with pytest.raises(EngineDied):
        engine.generate(REQUEST)


def test_a_start_that_fails_during_a_repair_uses_up_a_restart(make_engine):
    engine = make_engine("die,die_before_connecting,good", max_restarts=2)
    engine.generate(REQUEST)
    assert engine.restarts == 2


def test_a_hang_without_restarts_left_names_the_setting(make_engine):
    engine = make_engine("hang", max_restarts=0, stall_timeout_s=0.5)
    with pytest.raises(EngineDied, match="stall_timeout_s") as caught:
        engine.generate(REQUEST)
    assert isinstance(caught.value.__cause__, EngineTimeout)


def test_a_refusal_keeps_its_type_and_the_process(make_engine):
    engine = make_engine("refuse")
    with pytest.raises(RolloutDataError, match="NaN"):
        engine.generate(REQUEST)
    pid = engine.pid
    with pytest.raises(RolloutDataError):
        engine.generate(REQUEST)
    assert engine.pid == pid and engine.restarts == 0


@pytest.mark.parametrize("callback", [False, True])
def test_parts_are_put_in_order_and_delivered_as_they_come(make_engine, callback):
    parts: list[list[int]] = []
    on_finished = (lambda part: parts.append(part.index.tolist())) if callback else None
    rollouts = make_engine("good").generate(REQUEST, on_finished)
    np.testing.assert_array_equal(rollouts.response_tokens, [0, 1, 2])
    assert rollouts.generation_s == 0.5
    assert parts == ([[2], [0, 1]] if callback else [])


def test_a_death_in_the_middle_delivers_no_sequence_twice(make_engine):
    engine = make_engine("die_in_the_middle,good")
    parts: list[list[int]] = []
    rollouts = engine.generate(REQUEST, lambda part: parts.append(part.index.tolist()))
    assert engine.restarts == 1
    assert parts == [[2], [0, 1]]
    np.testing.assert_array_equal(rollouts.response_tokens, [0, 1, 2])


def test_an_abort_from_the_callback_returns_what_there_is(make_engine):
    engine = make_engine("wait_for_abort")
    parts: list[list[int]] = []

    def abort(part: FinishedSequences) -> None:
        parts.append(part.index.tolist())
        engine.abort()

    started = time.monotonic()
    rollouts = engine.generate(REQUEST, abort)
    assert time.monotonic() - started < 15
    assert parts == [[0]], "what did not end is not delivered as if it had"
    assert rollouts.aborted.tolist() == [False, True, True]
    assert rollouts.finished.tolist() == [True, False, False]
    assert engine.generate(REQUEST, abort).num_sequences == 3, "the engine stays usable"
    assert engine.restarts == 0


def test_an_abort_from_another_thread(make_engine):
    engine = make_engine("wait_for_abort")
    engine.abort()  # nothing runs: no effect, now or later
    seen = threading.Event()

    def abort() -> None:
        seen.wait(20)
        engine.abort()

    thread = threading.Thread(target=abort)
    thread.start()
    rollouts = engine.generate(REQUEST, lambda part: seen.set())
    thread.join()
    assert rollouts.aborted.tolist() == [False, True, True]


def test_a_process_that_dies_of_an_abort_is_not_asked_again(make_engine):
    engine = make_engine("wait_for_abort_and_die,good")
    rollouts = engine.generate(REQUEST, lambda part: engine.abort())
    assert rollouts.aborted.tolist() == [False, True, True]
    assert rollouts.lengths.tolist() == [1, 0, 0]
    assert engine.restarts == 1
    assert not engine.generate(REQUEST).aborted.any()


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("leave_one_out", "left out 1 of 3"),
        ("no_such_sequence", "of 3"),
        ("other_width", "top 5"),
    ],
)
def test_answers_to_something_else_are_refused(make_engine, behaviour, message):
    engine = make_engine(behaviour)
    for _ in range(2):  # the process has finished its answer, and can be asked again
        with pytest.raises(EngineError, match=message):
            engine.generate(REQUEST)
    assert engine.restarts == 0


def test_a_callback_cannot_use_the_engine(make_engine, checkpoint):
    engine = make_engine("good")
    for call in (
        lambda part: engine.generate(REQUEST),
        lambda part: engine.update_weights(checkpoint.tensors, 1),
    ):
        with pytest.raises(EngineError, match="callback"):
            engine.generate(REQUEST, call)
    assert engine.generate(REQUEST).num_sequences == 3


def test_rollouts_of_another_version_are_refused(make_engine):
    with pytest.raises(EngineError, match="version"):
        make_engine("old_version").generate(REQUEST)


def test_a_worker_that_ignores_everything_is_killed_on_close(make_engine, monkeypatch):
    monkeypatch.setattr("megatron.rl.rollout.client.worker_handle._POLITE_EXIT_S", 0.2)
    monkeypatch.setattr("megatron.rl.rollout.client.worker_handle._TERMINATE_S", 0.2)
    engine = make_engine("ignore_shutdown")
    engine.generate(REQUEST)
    pid = engine.pid
    engine.close()
    assert group_is_gone(pid)


def test_an_interrupt_does_not_leave_an_answer_for_the_next_request(make_engine):
    engine = make_engine("good")

    def interrupt(fields):
        raise KeyboardInterrupt

    engine._on_progress = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.generate(REQUEST)
    engine._on_progress = None
    assert engine.generate(REQUEST).num_sequences == 3
    assert engine.restarts == 0, "an interrupt is no failure of the engine"


def test_requests_that_the_engine_cannot_serve_are_refused_before_it_starts(make_engine):
    engine = make_engine("good")
    settings = SamplingSettings(max_tokens=2, top_logprobs=4)
    for prompts, changed, message in (
        ([[1]], SamplingSettings(max_tokens=2, top_logprobs=21), "top_logprobs=21"),
        ([[1]], SamplingSettings(max_tokens=256, top_logprobs=4), "max_model_len=256"),
        ([[128]], settings, "prompt token 128 is outside the vocabulary"),
        ([[-1]], settings, "prompt token -1"),
        ([[1]], SamplingSettings(max_tokens=2, stop_token_ids=(128,)), "stop token 128"),
    ):
        with pytest.raises(EngineRequestError, match=message):
            engine.generate(GenerationRequest.from_lists(prompts, 1, changed))
    assert engine.pid is None
    with pytest.raises(EngineRequestError, match="version"):
        engine.update_weights({}, -1)


def test_the_default_log_goes_away_unless_an_error_named_it(make_engine):
    engine = make_engine("good", log_path=None)
    engine.generate(REQUEST)
    assert os.path.exists(engine.log_path)
    engine.close()
    assert not os.path.exists(engine.log_path)
    failed = make_engine("die", log_path=None, max_restarts=0)
    failed.counter = failed.counter + "2"
    with pytest.raises(EngineDied):
        failed.generate(REQUEST)
    failed.close()
    assert os.path.exists(failed.log_path)
    os.remove(failed.log_path)


def test_last_error_line(tmp_path):
    log = tmp_path / "log"
    assert "no log" in last_error_line(str(log))
    log.write_text("")
    assert "empty" in last_error_line(str(log))
    log.write_text("ValueError: an earlier run\nloading\n")
    assert last_error_line(str(log)) == "ValueError: an earlier run"
    assert last_error_line(str(log), len("ValueError: an earlier run\n")) == "loading"
    log.write_text("RuntimeError: " + "x" * 5000)
    assert len(last_error_line(str(log))) < 400


def test_closing_during_a_call_ends_it_and_starts_nothing(make_engine, tmp_path, monkeypatch):
    """What happens at the end of the interpreter, which waits for no lock of a daemon thread."""
    monkeypatch.setattr(worker_handle, "_POLITE_EXIT_S", 0.1)
    engine, caught = make_engine("hang"), []

    def generate() -> None:
        try:
            engine.generate(REQUEST)
        except EngineError as error:
            caught.append(error)

    thread = threading.Thread(target=generate, daemon=True)
    engine.wait_ready()
    thread.start()
    time.sleep(0.3)
    engine._process.close()
    thread.join(10)
    assert not thread.is_alive()
    assert "closed" in str(caught[0])
    assert (tmp_path / "starts").read_text() == "1"
