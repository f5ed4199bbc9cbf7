"""Finished groups of a generation that never stops: the filter's verdict on each, and the order of training.

What ``collector.py`` is to a rollout that begins and ends, for ``async_producer.py``.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field

from slime.rollout import ledger
from slime.rollout.filter_hub.base_types import (
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.groups import Group
from slime.rollout.replaceable import entry_points
from slime.rollout.staleness import StalenessBound, oldest_version


@dataclass(order=True)
class _Ready:
    """The order is that of training."""

    born: int
    """Oldest weight version of its trained tokens; 0 where versions are not known."""
    number: int
    group: Group = field(compare=False)


class ReadyGroups:
    """Groups that wait for a rollout, the oldest first.

    Invariant: every group that was added is waiting, or was dropped (counted, and noted in the ledger), or was taken.
    """

    def __init__(self, args: Namespace, bound: StalenessBound) -> None:
        self._args, self._bound = args, bound
        path = getattr(args, "dynamic_sampling_filter_path", None)
        self._filter = entry_points().load_function(path) if path else None
        self._waiting: list[_Ready] = []
        self._num_kept = 0
        self._num_dropped = 0
        self._drops = MetricGatherer()
        self._seen: list[Group] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def groups(self) -> list[Group]:
        """Those that wait."""
        return [ready.group for ready in self._waiting]

    @property
    def births(self) -> list[int]:
        """The oldest weight version of each; 0 where versions are not known."""
        return [ready.born for ready in self._waiting]

    def add(self, group: Group, *, born: int, num_outstanding: int) -> None:
        """Ask the filter about a finished group, and keep or drop it.

        Args:
            born: the oldest version that its tokens may have, where they do not tell themselves.
            num_outstanding: groups on their way to a rollout, this one included; a filter may depend on it.
        """
        ledger.finished(group)
        self._seen.append(group)
        verdict = call_dynamic_filter(self._filter, self._args, group)
        if should_drop_dynamic_filter_output(
            verdict, remaining_batch_size=num_outstanding, target_data_size=self._args.rollout_batch_size
        ):
            ledger.filtered(group, verdict.reason)
            self._drops.on_dynamic_filter_drop(verdict.reason)
            self._num_dropped += 1
            return
        oldest = oldest_version(group)
        self._num_kept += 1
        self._waiting.append(_Ready(born if oldest is None else oldest, self._num_kept, group))

    def take(self, num_groups: int) -> list[Group]:
        """The ``num_groups`` oldest."""
        self._waiting.sort()
        batch = [ready.group for ready in self._waiting[:num_groups]]
        del self._waiting[:num_groups]
        return batch

    def take_too_old(self, rollout_id: int) -> list[Group]:
        """Meet groups that are too old for ``rollout_id``, as ``--stale-group-policy`` says; gives those that are
        prompts again."""
        if self._bound.limit is None:
            return []
        old = [ready for ready in self._waiting if self._bound.is_too_old(ready.group, rollout_id)]
        renewed = [ready for ready in old if not self._bound.settle(ready.group, rollout_id)]
        for ready in renewed:
            self._waiting.remove(ready)
        return [ready.group for ready in renewed]

    def take_seen(self) -> list[Group]:
        """Every group that was added since the last call, dropped ones included."""
        seen, self._seen = self._seen, []
        return seen

    def take_metrics(self) -> dict[str, float]:
        """Drops since the last call, also by reason, and how many groups wait now."""
        drops, self._drops = self._drops, MetricGatherer()
        num_dropped, self._num_dropped = self._num_dropped, 0
        return {
            "rollout/groups/dropped": num_dropped,
            "rollout/groups/ready": len(self._waiting),
            **drops.collect(),
        }
