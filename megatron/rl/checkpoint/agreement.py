# SPDX-License-Identifier: Apache-2.0
"""One rank's failure becomes every rank's, so that none waits for another that gave up."""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from megatron.rl.errors import UserError


class RankFailed(Exception):
    """Something failed on at least one rank; raised on all of them."""


def on_all_ranks[Result](work: Callable[[], Result]) -> Result:
    """Do some work without collectives on every rank; return this rank's result. Collective.

    Raises:
        UserError: a rank raised one, or a :exc:`RankFailed` for anything else; the message is
            that of the lowest rank which failed, and names it.
    """
    result: Result | None = None
    own: Exception | None = None
    try:
        result = work()
    except Exception as error:
        own = error
    if (failure := first_failure(own)) is not None:
        kind, message = failure
        raise (UserError if kind == "user" else RankFailed)(message) from own
    return result  # type: ignore[return-value]


def first_failure(own: Exception | None) -> tuple[str, str] | None:
    """Tell the others of this rank's failure; return the lowest rank's, with its kind.

    Collective.
    """
    told: list[tuple[str, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, None if own is None else _described(own))
    return next((failure for failure in told if failure is not None), None)


def _described(error: Exception) -> tuple[str, str]:
    if isinstance(error, UserError):
        return "user", str(error)
    # torch hides a full disk behind an error about the file's position.
    behind = next((cause for cause in _chain(error) if isinstance(cause, OSError)), None)
    reason = f"{type(error).__name__}: {error}" if behind is None else str(behind)
    return "rank", f"rank {dist.get_rank()}: {reason}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and those that it was raised while handling."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def all_ranks(condition: bool) -> bool:
    """Return whether the condition holds on every rank. Collective."""
    told: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(told, condition)
    return all(told)


def any_rank(condition: bool) -> bool:
    """Return whether the condition holds on some rank. Collective, and as cheap as that can be."""
    flag = torch.tensor(int(condition))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def from_rank_0[Result](work: Callable[[], Result]) -> Result:
    """Do some work on rank 0 and give its result, or its failure, to all. Collective."""
    here = [on_all_ranks(lambda: work() if dist.get_rank() == 0 else None)]
    dist.broadcast_object_list(here, src=0)
    return here[0]  # type: ignore[return-value]
