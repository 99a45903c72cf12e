# SPDX-License-Identifier: Apache-2.0
"""Scoring in processes: one score a response, at its place, whatever another response does."""

import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.rl.errors import UserError
from megatron.rl.rewards.registry import TaskSpec
from megatron.rl.rewards.score import Outcome, Score
from megatron.rl.rewards.scoring_limits import ScoringLimits
from megatron.rl.rewards.scoring_pool import ScoringFailed, ScoringPool
from megatron.rl.rewards.scoring_wire import (
    MAX_ANSWER_BYTES,
    MAX_RESPONSE_BYTES,
    WireViolation,
    encode_text,
    pack_request,
    pack_result,
    read_request,
    take_result,
)
from tests.unit.scripted_task import prompt

ROOT = Path(__file__).parents[2]
SPEC = TaskSpec("tests.unit.scripted_task:ScriptedTask")
LIMITS = ScoringLimits(workers=2, timeout_s=4.0, memory_mib=256)
PROMPT = prompt()
SLEEP = "py:import time; time.sleep(60)"
PID = "py:import os; score = os.getpid() % 100_000 / 100_000"
# Scores that a process has not been asked for, as they would have to look.
FORGED = (
    "py:import os, struct\nfor fd in range(3, 20):\n  for ticket in range(3):\n    try:\n"
    "      os.write(fd, struct.pack('<QBdiH', ticket, 0, 1.0, -1, 0))\n    except OSError: pass"
)

HANGING = ("py:while True: pass", SLEEP, "py:10 ** 10 ** 10")
HOSTILE = {
    "exits": ("py:import sys; sys.exit()", "raised"),
    "exits at once": ("py:import os; os._exit(3)", "died"),
    "is interrupted": ("py:raise KeyboardInterrupt", "raised"),
    "kills itself": ("py:import os; os.kill(os.getpid(), 9)", "died"),
    "kills its parent": ("py:import os; os.kill(os.getppid(), 9)", "raised"),
    "kills everybody": ("py:import os; os.kill(-1, 9)", "raised"),
    "crashes": ("py:import ctypes; ctypes.string_at(0)", "died"),
    "recurses": ("py:f = lambda: f()\nf()", "raised"),
    "takes 10 GB": ("py:bytearray(10 << 30)", "died"),
    "grows": ("py:x = []\nwhile True: x.append('x' * (1 << 24))", "died"),
    "opens a socket": ("py:import socket; socket.socket()", "raised"),
    "writes a file": ("py:open('/tmp/scoring-pool-test', 'w')", "raised"),
    "forks": ("py:import os\nwhile True: os.fork()", "raised"),
    "starts a program": ("py:import subprocess; subprocess.run(['true'])", "raised"),
    "starts a thread": ("py:import threading; threading.Thread(target=int).start()", "raised"),
    "closes its descriptors": ("py:import os; os.closerange(0, 100)", "died"),
    "floods its descriptors": ("py:import os\nfor i in range(64): os.write(3, b'x')", "raised"),
    "forges scores": (FORGED, "died"),
    "raises": ("py:raise KeyError('no answer found')", "raised"),
    "cannot be shown": (
        "py:class E(Exception):\n  def __str__(self): return 1 / 0\nraise E", "raised",
    ),
    "scores a hostile number": (
        "py:class F(float):\n  def __float__(self): return 1 / 0\nscore = F()", "invalid",
    ),
    "scores nan": ("py:score = float('nan')", "invalid"),
    "scores inf": ("py:score = float('inf')", "invalid"),
    "scores 2": ("2.0", "invalid"),
    "scores -0.5": ("-0.5", "invalid"),
    "scores a huge integer": ("py:score = 10 ** 400", "invalid"),
    "scores a text": ("py:score = '1'", "invalid"),
    "scores None": ("py:score = None", "invalid"),
    "scores an endless repr": (
        "py:class T:\n  def __repr__(self): return 'x' * (1 << 20)\nscore = T()", "invalid",
    ),
    "finds no text as its answer": ("0.125", "invalid"),
    "says nothing": ("", "raised"),
    "is too long": ("1" * (MAX_RESPONSE_BYTES + 1), "invalid"),
}  # fmt: skip
COUNTERS = ("raised", "invalid", "timed_out", "died")


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid):
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(c) for task in tasks for c in (task / "children").read_text().split()]
    except OSError:
        return []
    return [*children, *(below for child in children for below in descendants(child))]


def eventually(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def pool():
    with ScoringPool(SPEC, LIMITS) as pool:
        if not pool.start().complete:
            pytest.skip(f"no sandbox here: {pool.start().missing}")
        yield pool


def score(pool, *responses):
    return pool.score(responses, [PROMPT] * len(responses))


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_response_costs_itself_only(pool, what, capfd):
    response, counter = HOSTILE[what]
    result = score(pool, "0.25", response, "0.75", "1", "0.5")
    np.testing.assert_array_equal(result.scores, [0.25, 0, 0.75, 1, 0.5])
    assert result.answers == ("0.25", None, "0.75", None, "0.5")
    assert {name: getattr(result, name) for name in COUNTERS} == {
        name: int(name == counter) for name in COUNTERS
    }, result.first_error
    assert result.first_error is not None and "(response 1, " in result.first_error
    assert len(result.first_error) < 1000
    assert capfd.readouterr() == ("", "")
    assert not Path("/tmp/scoring-pool-test").exists()


def test_hostile_responses_all_at_once(pool):
    responses = [text for response, _ in HOSTILE.values() for text in (response, "0.5")]
    result = score(pool, *responses)
    np.testing.assert_array_equal(result.scores, [0, 0.5] * len(HOSTILE))
    for name in COUNTERS:
        assert getattr(result, name) == sum(counter == name for _, counter in HOSTILE.values())
    assert result.failures == len(HOSTILE)


def test_responses_that_hang_cost_themselves_only():
    with ScoringPool(SPEC, ScoringLimits(workers=3, timeout_s=3.0)) as pool:
        # One each: whatever was sent behind them goes to the processes that replace theirs.
        result = score(pool, *HANGING, *["0.25", "0.5"] * 10)
    np.testing.assert_array_equal(result.scores, [0, 0, 0, *[0.25, 0.5] * 10])
    assert (result.timed_out, result.failures) == (3, 3)
    assert "took more than 3 s (scoring.timeout_s) (response 0, " in str(result.first_error)


def test_output_goes_nowhere(pool, capfd):
    code = "py:import os, sys\nprint('x' * 10**7)\nsys.stderr.write('y')\nos.write(1, b'z')"
    assert score(pool, code).scores.tolist() == [0.5]
    assert capfd.readouterr() == ("", "")


def test_what_a_response_leaves_behind_does_not_fail_the_next_one():
    # The alarm ends the process while it scores the second response: that one is scored elsewhere.
    alarm = "py:import signal; signal.setitimer(signal.ITIMER_REAL, 0.1)"
    wait = "py:import time; time.sleep(0.5)"
    with ScoringPool(SPEC, ScoringLimits(workers=1, timeout_s=5)) as pool:
        result = score(pool, alarm, wait, "0.25")
    np.testing.assert_array_equal(result.scores, [0.5, 0.5, 0.25])
    assert result.failures == 0


def test_an_entry_changed_by_a_scorer_is_whole_for_the_next_response(pool):
    spoil = "py:score = len(prompt.entry['list']) / 10; prompt.entry['list'].clear()"
    asked = prompt(list=[1, 2, 3])
    assert pool.score([spoil] * 20, [asked] * 20).scores.tolist() == [0.3] * 20
    assert asked.entry == {"list": [1, 2, 3]}


def test_order_and_renewal_of_many_responses():
    rng = np.random.default_rng(0)
    values = rng.random(3000).round(6)
    with ScoringPool(SPEC, ScoringLimits(workers=3, responses_per_worker=100)) as pool:
        result = score(pool, *map(str, values))
        np.testing.assert_array_equal(result.scores, values)
        assert result.failures == 0
        ids = score(pool, *[PID] * 1000).scores
        assert len(set(ids)) >= 10  # each of them scored at most 100
        assert max((ids == one).sum() for one in set(ids)) <= 100


def test_texts_arrive_as_they_are(pool):
    texts = ["", "\ud800", "a\0b", "😀é漢", "x" * 1_000_000]
    checks = [
        f"py:# {text}\nimport ctypes\nscore = {len(text)} / 2**20" if "\0" not in text else "1"
        for text in texts[1:]
    ]
    result = pool.score(checks, [PROMPT] * len(checks))
    # A lone surrogate is no source text for Python: the scorer says so, and nothing else breaks.
    assert (result.raised, result.failures) == (1, 1) and "surrogate" in str(result.first_error)
    np.testing.assert_array_equal(result.scores, [0, 1, 3 / 2**20, 1_000_000 / 2**20])
    asked = [prompt(text=text) for text in texts]
    length = "py:score = len(prompt.entry['text']) / 10**7"
    assert pool.score([length] * 5, asked).scores.tolist() == [len(t) / 10**7 for t in texts]


def test_any_thread_may_score_and_signals_stay_as_they_were(pool):
    # A scorer's time limit by signal.alarm works in the main thread only.
    before = signal.getsignal(signal.SIGALRM)
    batches = [["0.25", HANGING[-1]], *([str(i / 10)] * 20 for i in range(8))]
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda batch: score(pool, *batch), batches))
    for batch, result in zip(batches[1:], results[1:], strict=True):
        assert result.scores.tolist() == [float(text) for text in batch]
    assert results[0].scores.tolist() == [0.25, 0.0] and results[0].timed_out == 1
    assert signal.getsignal(signal.SIGALRM) is before and signal.alarm(0) == 0


def test_processes_outlive_the_thread_that_started_them():
    with ScoringPool(SPEC, LIMITS) as pool:
        thread = threading.Thread(target=lambda: score(pool, *["0.5"] * 40))
        thread.start()
        thread.join()
        before = set(descendants(os.getpid()))
        assert score(pool, *["0.5"] * 40).failures == 0
        assert set(descendants(os.getpid())) == before


def test_processes_that_were_killed_are_replaced():
    others = set(descendants(os.getpid()))
    with ScoringPool(SPEC, LIMITS) as pool:
        assert score(pool, *["0.5"] * 100).failures == 0
        mine = [pid for pid in descendants(os.getpid()) if pid not in others]
        server, *workers = mine
        for victims in (workers, [server], mine):
            for pid in victims:
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)
            result = score(pool, *["0.5"] * 100)
            assert result.failures == 0 and result.scores.tolist() == [0.5] * 100
    eventually(lambda: set(descendants(os.getpid())) <= others)


def test_a_server_that_is_killed_while_it_scores_is_replaced():
    others = set(descendants(os.getpid()))
    with ScoringPool(SPEC, LIMITS) as pool, ThreadPoolExecutor(1) as thread:
        pool.start()
        (server,) = [pid for pid in descendants(os.getpid()) if pid not in others]
        wait = "py:import time; time.sleep(0.4)"
        result = thread.submit(score, pool, wait, wait, wait, "0.25")
        eventually(lambda: len(descendants(server)) == 2)
        os.kill(server, signal.SIGKILL)
        assert result.result().scores.tolist() == [0.5, 0.5, 0.5, 0.25]


def test_closing_ends_everything_also_while_another_thread_scores():
    others = set(descendants(os.getpid()))
    pool = ScoringPool(SPEC, ScoringLimits(workers=2, timeout_s=60))
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(score, pool, *[SLEEP] * 8)
        eventually(lambda: len(set(descendants(os.getpid())) - others) == 3)
        pool.close()
        with pytest.raises(ScoringFailed, match="closed"):
            result.result(timeout=20)
    eventually(lambda: set(descendants(os.getpid())) <= others)
    with pytest.raises(ScoringFailed, match="closed"):
        score(pool, "1")
    pool.close()


@pytest.mark.parametrize("load_s", [0.0, 600.0])
def test_nothing_is_left_of_a_trainer_that_was_killed(load_s):
    code = (
        "import threading, time\n"
        "from megatron.rl.rewards.registry import TaskSpec\n"
        "from megatron.rl.rewards.scoring_limits import ScoringLimits\n"
        "from megatron.rl.rewards.scoring_pool import ScoringPool\n"
        "from tests.unit.scripted_task import prompt\n"
        "limits = ScoringLimits(workers=2, timeout_s=600, start_timeout_s=600)\n"
        f"pool = ScoringPool(TaskSpec({SPEC.name!r}, {{'load_s': {load_s}}}), limits)\n"
        "pool.score(['py:while True: pass'] * 2, [prompt()] * 2)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    trainer = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        eventually(lambda: len(descendants(trainer.pid)) == (1 if load_s else 3))
        below = descendants(trainer.pid)
    finally:
        trainer.kill()
        trainer.wait()
    eventually(lambda: not any(alive(pid) for pid in below))


@pytest.mark.parametrize(
    ("spec", "limits", "message"),
    [
        (TaskSpec("reasoning_gym/no_such"), LIMITS, "no data set 'no_such'"),
        (TaskSpec(SPEC.name, {"load": "1 / 0"}), LIMITS, "cannot be made: ZeroDivisionError"),
        (TaskSpec(SPEC.name, {"load": "import os; print('bye', flush=True); os._exit(4)"}), LIMITS,
         "ended while loading the task: bye"),
        (TaskSpec(SPEC.name, {"load_s": 60.0}), ScoringLimits(start_timeout_s=0.5),
         "scoring.start_timeout_s"),
    ],
)  # fmt: skip
def test_a_task_that_cannot_be_loaded_is_an_error_for_the_user(spec, limits, message):
    others = set(descendants(os.getpid()))
    with ScoringPool(spec, limits) as pool, pytest.raises(UserError, match=message):
        pool.score(["1"], [PROMPT])
    eventually(lambda: set(descendants(os.getpid())) <= others)


def test_wrong_calls_are_refused_and_harm_nothing(pool):
    with pytest.raises(ValueError, match="one prompt for each response"):
        pool.score(["1", "0"], [PROMPT])
    with pytest.raises(TypeError, match=r"prompt 7 cannot be sent .* plain values"):
        pool.score(["1"] * 5, [PROMPT] * 4 + [prompt(7, function=lambda: 0)])
    assert score(pool, "0.5").scores.tolist() == [0.5]
    assert score(pool).scores.shape == (0,)


def test_default_limits_follow_the_cores(monkeypatch):
    for cores, workers in ((1, 2), (2, 2), (16, 4), (224, 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, n=cores: set(range(n)))
        assert ScoringLimits().worker_count() == workers
    assert ScoringLimits(workers=3).worker_count() == 3


@given(st.floats(0, 1), st.none() | st.text(st.characters()), st.text(), st.integers(0, 2**64 - 1))
def test_wire_answers_arrive_in_pieces(value, answer, problem, ticket):
    sent = pack_result(ticket, Score(value, Outcome.SCORED, answer, problem))
    buffer = bytearray()
    for byte in sent[:-1]:
        buffer.append(byte)
        assert take_result(buffer, ticket) is None
    buffer += sent[-1:] + b"next"
    found = take_result(buffer, ticket)
    assert found is not None and (found.value, found.answer) == (value, answer)
    assert problem.startswith(found.problem.rstrip("\ufffd")) and buffer == b"next"


def test_wire_limits_what_an_answer_can_be():
    longest = "x" * MAX_ANSWER_BYTES
    for answer, found in ((longest, longest), (longest + "x", None)):
        result = take_result(bytearray(pack_result(1, Score(1.0, answer=answer))), 1)
        assert result is not None and result.answer == found
    good = (7, 0, 0.5, -1, 0)
    assert take_result(bytearray(struct.pack("<QBdiH", *good)), 7) == Score(0.5)
    for place, value in (
        (0, 8), (1, 9), (1, int(Outcome.DIED)), (1, 1), (2, float("nan")), (2, 1.5), (2, -0.1),
        (3, -2), (3, MAX_ANSWER_BYTES + 1), (4, 65535),
    ):  # fmt: skip
        fields = list(good)
        fields[place] = value
        with pytest.raises(WireViolation):
            take_result(bytearray(struct.pack("<QBdiH", *fields)), 7)


@given(st.binary(max_size=200), st.integers(0, 3))
def test_wire_no_bytes_are_more_than_a_score(data, ticket):
    buffer = bytearray(struct.pack("<Q", ticket) + data)
    try:
        found = take_result(buffer, ticket)
    except WireViolation:
        return
    assert found is None or (0.0 <= found.value <= 1.0 and len(buffer) < len(data) + 8)


@given(st.text(st.characters()), st.binary())
def test_wire_requests_arrive_whole(text, entry):
    reader, writer = os.pipe()
    with open(reader, "rb") as stream:
        with open(writer, "wb") as out:
            pickled = pickle.dumps(prompt(entry=entry))
            out.write(pack_request(3, encode_text(text), pickled) + b"cut")
        request = read_request(stream)
        assert request is not None and request.response == text
        assert pickle.loads(request.prompt).entry["entry"] == entry
        assert read_request(stream) is None
