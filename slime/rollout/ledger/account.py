"""The balance of a ledger: each group that was issued is in exactly one place.

issued = trained + handed over, not trained yet + filtered + discarded + waiting in the buffer + in flight
"""

from __future__ import annotations

from collections import Counter

from slime.rollout.ledger.story import RolloutStory, Story

ISSUED = "issued"
FLIGHT = "in flight"
WAITING = "waiting in the buffer"
TRAINED = "trained"
HANDED = "handed over, not yet trained"
FILTERED = "dropped by the filter"
DISCARDED = "discarded"


class Account:
    """Where each group of the line of events that counts has come to.

    Invariant: ``place`` has every group that was issued in it, once.
    """

    def __init__(self, story: Story) -> None:
        self.place: dict[int, str] = {}
        self._story = story
        self._problems: list[str] = []
        latest = max(story.rollouts, default=-1)
        for rollout_id, rollout in sorted(story.rollouts.items()):
            self._add(rollout, is_latest=rollout_id == latest)

    def _add(self, rollout: RolloutStory, *, is_latest: bool) -> None:
        where = f"rollout {rollout.rollout_id}"
        for call in rollout.calls:
            for name in call.names:
                if name is None:
                    continue
                self._move(name, FLIGHT if call.wanted is not None else WAITING, where)
        for name in rollout.filtered:
            self._move(name, FILTERED, where)
        for name in rollout.discarded:
            self._move(name, DISCARDED, where)
        if rollout.batch is None:
            return
        for handed in rollout.handed:
            if handed.name is not None:
                self._move(handed.name, TRAINED if rollout.is_trained else HANDED, where)
        if not is_latest and not rollout.batch.head.get("keeps_open"):
            issued_here = {name for call in rollout.calls for name in call.names if name is not None}
            self._problems += [
                f"group {name} was issued in {where}, which ended without saying where it went"
                for name in sorted(issued_here)
                if self.place[name] == FLIGHT
            ]

    def _move(self, name: int, place: str, where: str) -> None:
        before = self.place.get(name)
        if before in (TRAINED, HANDED, FILTERED, DISCARDED):
            self._problems.append(f"group {name} is {place} in {where} after it was {before}")
        self.place[name] = place

    def totals(self) -> dict[str, int]:
        """Counts of groups by place, of rollouts and of processes."""
        counts = Counter(self.place.values())
        rollouts = self._story.rollouts.values()
        return {
            "groups issued": len(self.place),
            **{f"groups {place}": counts[place] for place in (TRAINED, HANDED, FILTERED, WAITING, FLIGHT, DISCARDED)},
            "rollouts complete": sum(rollout.batch is not None for rollout in rollouts),
            "rollouts taken from here": sum(rollout.times_replayed for rollout in rollouts),
            "processes": self._story.life,
            "checkpoints published": len(self._story.published),
        }

    def problems(self) -> list[str]:
        """One sentence for each group that is lost, or was trained twice."""
        return list(self._problems)
