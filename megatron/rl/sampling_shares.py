# SPDX-License-Identifier: Apache-2.0
"""Each engine does its share of some sampling, until all are done or the run is to stop."""

from collections.abc import Callable

from megatron.rl.exchange import Exchange
from megatron.rl.rollout.errors import WeightsLost
from megatron.rl.stop_request import Preempted, StopRequest

# How far a rank's share is; the largest over the ranks decides what they do.
_DONE, _TO_DO, _STOPPED = range(3)


def share_of_sampling[Result](
    work: Callable[[], Result] | None,
    exchange: Exchange,
    stop: StopRequest,
    *,
    send_weights: Callable[[], object],
    note: Callable[[str], None],
) -> Result | None:
    """Do this rank's share; returns what ``work`` returned. Collective.

    An engine that was restarted without its weights (where the transport keeps no copy of them)
    makes all ranks send them again; then the engines that failed repeat their share.

    Args:
        work: of this rank's engine; None on ranks without one.
        stop: may interrupt the work.
        send_weights: to the engines, by all ranks.
        note: is told of weights that were lost.

    Raises:
        Preempted: on every rank, when one was asked to stop.
    """
    result: Result | None = None
    state = _DONE if work is None else _TO_DO
    while True:
        if state == _TO_DO and work is not None:
            try:
                with stop.interrupting():
                    result = work()
                state = _DONE
            except WeightsLost as error:
                note(str(error))
            except Preempted:
                state = _STOPPED
        most = exchange.largest(state)
        if most == _STOPPED:
            raise Preempted
        if most == _DONE:
            return result
        send_weights()
