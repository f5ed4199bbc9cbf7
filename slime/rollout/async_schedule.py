"""When a fully asynchronous rollout may begin a group, and which groups a batch must wait for.

Every group has a last rollout: the last one that may train its oldest token under ``--max-staleness``.  Batches take
the oldest groups first.  Two rules then keep all groups in time, whatever their requests take:

* no group begins when those under way fill every batch up to its last rollout;
* a batch waits until it has as many of the groups with last rollout j or earlier as the batches after it, up to j,
  cannot take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from slime.rollout.staleness import StalenessBound


def num_groups_allowed(
    bound: StalenessBound, *, next_rollout_id: int, num_rollout: int | None, batch_size: int
) -> float:
    """Groups that may be under way when the engines draw with the present weights; infinite without a bound.

    Args:
        next_rollout_id: the rollout that takes the next batch.
        num_rollout: of the whole run, where that is known: nothing is drawn that no rollout would train.
        batch_size: groups of a rollout.
    """
    last = float("inf") if num_rollout is None else max(num_rollout - 1, next_rollout_id)
    version = bound.clock.current
    if bound.limit is not None and version is not None:
        within = bound.clock.last_rollout_within(version, bound.limit)
        last = last if within is None else min(last, within)
    return max(last - next_rollout_id + 1, 0) * batch_size


def num_groups_due(
    bound: StalenessBound, *, rollout_id: int, in_flight: Iterable[int], ready: Iterable[int], batch_size: int
) -> int:
    """Groups in flight that the batch of ``rollout_id`` must wait for.

    Args:
        in_flight: the oldest weight version of each group that is under way; 0 where it is not known.
        ready: the same of the finished ones.
        batch_size: groups of a rollout.
    """
    if bound.limit is None or bound.clock.current is None:
        return 0
    flying, finished = (
        Counter(bound.clock.last_rollout_within(version, bound.limit) for version in versions if version > 0)
        for versions in (in_flight, ready)
    )
    due = num_flying = num_finished = 0
    for last in sorted(key for key in flying.keys() | finished.keys() if key is not None):
        num_flying += flying[last]
        num_finished += finished[last]
        num_later = max(last - rollout_id, 0) * batch_size
        wanted = min(num_flying + num_finished - num_later, batch_size)
        due = max(due, wanted - num_finished)
    return due
