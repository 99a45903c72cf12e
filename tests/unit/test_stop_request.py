# SPDX-License-Identifier: Apache-2.0
"""A request to stop: noted everywhere, felt at once only where a rank lets it."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from megatron.rl.stop_request import STOP_SIGNALS, Preempted, StopRequest


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    request = StopRequest()
    request.listen()
    yield request
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_a_signal_is_noted_and_interrupts_nothing(stop: StopRequest, signum: int) -> None:
    assert not stop.requested
    os.kill(os.getpid(), signum)
    time.sleep(0.01)
    assert stop.requested


def test_it_interrupts_what_may_be(stop: StopRequest) -> None:
    started = time.monotonic()
    with pytest.raises(Preempted), stop.interrupting():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    assert time.monotonic() - started < 10
    with pytest.raises(Preempted), stop.interrupting():
        pytest.fail("an earlier request is felt before anything begins")
    os.kill(os.getpid(), signal.SIGTERM)  # outside again: only noted


def test_no_error_handler_takes_it_for_an_error() -> None:
    assert not issubclass(Preempted, Exception)
