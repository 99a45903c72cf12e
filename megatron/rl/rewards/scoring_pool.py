# SPDX-License-Identifier: Apache-2.0
"""Scores responses in processes that can be ended at any time, several at once."""

import pickle
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Self

from megatron.rl.rewards.registry import TaskSpec
from megatron.rl.rewards.sandbox import SandboxReport
from megatron.rl.rewards.score import Outcome, Score
from megatron.rl.rewards.scoring import ScoreBatch, batch_scores
from megatron.rl.rewards.scoring_client import ScoringServer, ScoringServerLost
from megatron.rl.rewards.scoring_limits import ScoringLimits
from megatron.rl.rewards.scoring_wire import MAX_RESPONSE_BYTES, encode_text
from megatron.rl.rewards.scoring_worker import OUT_OF_MEMORY_STATUS
from megatron.rl.rewards.task import Prompt
from megatron.rl.rewards.worker_link import ENDED, WorkerLink

# A server that does not survive so many starts in one batch will not survive the next either.
_MAX_SERVER_STARTS = 3


class ScoringFailed(RuntimeError):
    """Nothing can be scored: the pool is closed, or its processes do not stay alive."""


class ScoringPool:
    """Scores responses to prompts of one task, each within limits of time and memory.

    A response is scored in a process that may do nothing but compute, see
    :mod:`~megatron.rl.rewards.sandbox`. One that exceeds its limits is ended together with its
    process, gets the score 0, and is counted; the responses that were waiting behind it go to
    another process. A process that dies may have been brought down by an earlier response than the
    one it was scoring, so that one gets a second chance in a fresh process.

    Processes start with the first response. Any thread may call; batches take turns.

    Args:
        spec: the task, which the processes make for themselves.
        limits: what a response may cost.
    """

    def __init__(self, spec: TaskSpec, limits: ScoringLimits | None = None) -> None:
        self._spec = spec
        self._limits = limits or ScoringLimits()
        self._lock = threading.Lock()
        self._closed = False
        self._server: ScoringServer | None = None
        self._workers: list[WorkerLink | None] = [None] * self._limits.worker_count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start(self) -> SandboxReport:
        """Load the task in the process that the scoring ones come from; say what restricts them.

        Raises:
            UserError: the task cannot be made there.
        """
        with self._lock:
            return self._started().sandbox

    def score(self, responses: Sequence[str], prompts: Sequence[Prompt]) -> ScoreBatch:
        """Score ``responses[b]`` as an answer to ``prompts[b]``.

        Takes at most about ``timeout_s`` for each response, divided by the number of workers.

        Raises:
            ValueError: the two sequences differ in length.
            TypeError: a prompt cannot be sent to another process.
            ScoringFailed: the pool was closed, or processes that load the task do not stay alive.
        """
        if len(responses) != len(prompts):
            raise ValueError(
                f"expected one prompt for each response, got {len(prompts)} prompts and "
                f"{len(responses)} responses; repeat a prompt for each response of its group"
            )
        with self._lock:
            batch = _Batch(responses, prompts)
            starts = 0
            while batch.unscored:
                try:
                    self._score(batch)
                except ScoringServerLost as lost:
                    self._forget_server(batch)
                    starts += 1
                    if self._closed or starts == _MAX_SERVER_STARTS:
                        problem = "the scoring pool is closed" if self._closed else str(lost)
                        raise ScoringFailed(f"scoring {self._spec.name}: {problem}") from None
                except BaseException:
                    # Its processes are busy with a batch that nobody waits for.
                    self._forget_server(batch)
                    raise
            return batch_scores(self._spec.name, responses, batch.finished())

    def close(self) -> None:
        """End all processes; a batch that is being scored in another thread fails."""
        self._closed = True
        server = self._server
        if server is not None:
            server.close()
        with self._lock:
            self._forget_server(None)

    def _started(self) -> ScoringServer:
        if self._closed:
            raise ScoringFailed("the scoring pool is closed")
        if self._server is None:
            self._server = ScoringServer(self._spec, self._limits)
        return self._server

    def _forget_server(self, batch: "_Batch | None") -> None:
        for slot, worker in enumerate(self._workers):
            if worker is not None:
                if batch is not None:
                    batch.give_back(worker.waiting)
                worker.close()
                self._workers[slot] = None
        if self._server is not None:
            self._server.close()
            self._server = None

    def _score(self, batch: "_Batch") -> None:
        while batch.unscored:
            self._hand_out(batch)
            if not batch.unscored:  # what was left could not be sent
                return
            self._wait()
            now = time.monotonic()
            for slot, worker in enumerate(self._workers):
                if worker is None:
                    continue
                worker.flush()
                batch.take(worker)
                if worker.broken is not None:
                    self._bury(slot, worker, batch)
                elif worker.load and now >= worker.deadline(self._limits.timeout_s):
                    self._time_out(slot, worker, batch)

    def _hand_out(self, batch: "_Batch") -> None:
        """Give waiting responses to the processes with the fewest, as far as there is room."""
        most = self._limits.responses_per_worker
        for slot, worker in enumerate(self._workers):
            if worker is not None and worker.load == 0 and worker.served >= most:
                self._end(slot, worker)
        while batch.pending:
            slot = min(range(len(self._workers)), key=self._load)
            worker = self._workers[slot]
            if worker is None:
                worker = self._workers[slot] = self._started().fork()
            if not worker.has_room(most):
                break
            batch.send(batch.pending.popleft(), worker)
        for worker in self._workers:
            if worker is not None:
                worker.flush()

    def _load(self, slot: int) -> float:
        worker = self._workers[slot]
        # One that runs is preferred to one that would have to be started.
        if worker is None:
            return 0.5
        return worker.load if worker.has_room(self._limits.responses_per_worker) else float("inf")

    def _wait(self) -> None:
        """Wait until a process has something to say, or room, or has run out of time."""
        poll = select.poll()
        deadlines = []
        for worker in self._workers:
            if worker is None:
                continue
            poll.register(worker.results, select.POLLIN)
            if worker.unsent:
                poll.register(worker.requests, select.POLLOUT)
            if worker.load:
                deadlines.append(worker.deadline(self._limits.timeout_s))
        poll.poll(max(0.0, min(deadlines) - time.monotonic()) * 1000 + 1)

    def _time_out(self, slot: int, worker: WorkerLink, batch: "_Batch") -> None:
        first, *behind = worker.waiting
        self._end(slot, worker)
        problem = f"took more than {self._limits.timeout_s:g} s (scoring.timeout_s)"
        batch.fail(first, Outcome.TIMED_OUT, problem)
        batch.give_back(behind)

    def _bury(self, slot: int, worker: WorkerLink, batch: "_Batch") -> None:
        status, waiting = self._end(slot, worker), worker.waiting
        if waiting:
            first = waiting.pop(0)
            if worker.served:
                fresh = self._workers[slot] = self._started().fork()
                batch.send(first, fresh)
            else:
                reason = self._reason(status) if worker.broken == ENDED else worker.broken
                batch.fail(first, Outcome.DIED, f"lost its process, which {reason}")
        batch.give_back(waiting)

    def _end(self, slot: int, worker: WorkerLink) -> int:
        self._workers[slot] = None
        try:
            return self._started().end(worker)
        except ScoringServerLost:
            self._workers[slot] = worker  # its responses are given back with the others'
            raise

    def _reason(self, status: int) -> str:
        if status == OUT_OF_MEMORY_STATUS:
            return f"needed more than {self._limits.memory_mib} MiB (scoring.memory_mib)"
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        return f"ended with exit code {status}"


class _Batch:
    """Responses that are being scored: what has no process yet, and the scores so far."""

    def __init__(self, responses: Sequence[str], prompts: Sequence[Prompt]) -> None:
        self._responses, self._prompts = responses, prompts
        self._scores: list[Score | None] = [None] * len(responses)
        self._pickled: dict[int, bytes] = {}
        self.pending = deque(range(len(responses)))
        self.unscored = len(responses)

    def finished(self) -> list[Score]:
        """Return the scores, once all are there."""
        return [score for score in self._scores if score is not None]

    def send(self, place: int, worker: WorkerLink) -> None:
        """Send a response; one that is too long is not sent, and counts as invalid."""
        response = encode_text(self._responses[place])
        if len(response) > MAX_RESPONSE_BYTES:
            problem = f"was given {len(response)} bytes, expected at most {MAX_RESPONSE_BYTES}"
            self.fail(place, Outcome.INVALID, problem)
            return
        worker.send(place, response, self._pickle(self._prompts[place]))

    def take(self, worker: WorkerLink) -> None:
        """Take the scores that have arrived."""
        for result in worker.receive():
            self._set(result.place, result.score)

    def fail(self, place: int, outcome: Outcome, problem: str) -> None:
        """Give the response the score 0."""
        self._set(place, Score(0.0, outcome, problem=problem))

    def give_back(self, places: Sequence[int]) -> None:
        """Put responses, whose process is gone, in front of the others."""
        self.pending.extendleft(reversed(places))

    def _set(self, place: int, score: Score) -> None:
        assert self._scores[place] is None, f"a second score for response {place}"
        self._scores[place] = score
        self.unscored -= 1

    def _pickle(self, prompt: Prompt) -> bytes:
        # A group shares its prompt; the batch keeps it alive, and its id with it.
        data = self._pickled.get(id(prompt))
        if data is None:
            try:
                data = pickle.dumps(prompt, pickle.HIGHEST_PROTOCOL)
            except Exception as error:
                raise TypeError(
                    f"the entry of prompt {prompt.index} cannot be sent to a scoring process; its "
                    f"task should keep plain values in it ({error})"
                ) from error
            self._pickled[id(prompt)] = data
        return data
