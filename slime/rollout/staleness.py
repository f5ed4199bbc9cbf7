"""Staleness of samples in weight versions, and the policy for samples that are too old.

    staleness of a sample = version that the trainer holds when it trains the sample
                          - oldest version that drew one of its trained tokens

Engines report their version with every answer (``Sample.weight_versions``).  The trainer's version follows from the
training loop, which pushes weights after every ``--update-weights-interval`` rollouts; ``VersionClock`` counts it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

from slime.rollout.base_types import Entry, Group, first_index, is_finished, leaf_samples
from slime.rollout.config import RolloutConfig
from slime.rollout.engine_client import engine_versions
from slime.rollout.rm_hub.policy import UNGRADED_STATUS
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


def version_number(version: Any) -> int | None:
    """Return a weight version as a number; None if it is not one (an engine starts with ``"default"``)."""
    try:
        return int(version)
    except (TypeError, ValueError):
        return None


def oldest_version(value: Entry | Iterable[Any]) -> int | None:
    """Return the oldest version that drew a trained token of these samples; None if there is none.

    Ignores removed samples, samples without response tokens, and calls whose tokens were masked later.
    """
    numbers = [
        number
        for sample in leaf_samples(value)
        if sample.response_length > 0 and not sample.remove_sample
        for version in sample.weight_versions[sample.num_untrained_calls :]
        if (number := version_number(version)) is not None
    ]
    return min(numbers, default=None)


def back_to_prompt(entry: Entry) -> Sample:
    """Reset an entry whose response is too old to its prompt, so that it can be generated again.

    If the execution fanned out, its first part is used; a custom generate function must be able to start from it.
    """
    sample = next(leaf_samples(entry))
    fresh = Sample()
    num_prompt = len(sample.tokens) - sample.response_length
    drawn = {
        "tokens": list(sample.tokens[:num_prompt]),
        "response": fresh.response,
        "response_length": 0,
        "status": fresh.status,
        "metadata": {key: value for key, value in sample.metadata.items() if key not in _OF_THE_RESPONSE},
        "non_generation_time": 0.0,
        "spec_info": fresh.spec_info,
        "prefix_cache_info": fresh.prefix_cache_info,
        "weight_versions": [],
        "remove_sample": False,
        "num_untrained_calls": 0,
    }
    for name in ("reward", "loss_mask", "teacher_log_probs", *_REPLAY):
        drawn[name] = None
    sample.__dict__.update(drawn)
    return sample


_OF_THE_RESPONSE = ("start_rollout_id", "reward_error", UNGRADED_STATUS)
_REPLAY = ("rollout_log_probs", "rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_routed_experts")


class VersionClock:
    """Tracks the weight version of the engines, and the version the trainer will hold at each rollout.

    Invariant: ``trained_at(k + n) - trained_at(k)`` is the number of pushes in between.  Versions are None until an
    engine has reported a number, and always None without a trainer.
    """

    def __init__(self, config: RolloutConfig, first_rollout_id: int | None = None) -> None:
        """Create a clock for a process whose first rollout is ``first_rollout_id``, if known."""
        self._config = config
        self._interval = config.update_weights_interval
        self._is_still = config.debug_rollout_only
        self._first_rollout_id = first_rollout_id
        self._offset: int | None = None
        self.current: int | None = None
        """Newest version known to be in the engines."""

    async def refresh(self, rollout_id: int | None = None) -> None:
        """Query the engines' versions and observe the smallest; engines that do not answer are ignored.

        Args:
            rollout_id: The rollout that begins now; None between rollouts.
        """
        if self._is_still:
            return
        versions = await engine_versions(self._config)
        known = [number for version in versions if (number := version_number(version)) is not None]
        self.observe(min(known, default=None), rollout_id)

    def observe(self, version: int | None, rollout_id: int | None = None) -> None:
        """Record that engines hold ``version``, at the beginning of rollout ``rollout_id`` if given."""
        if self._is_still:
            return
        if version is not None:
            self.current = version if self.current is None else max(self.current, version)
        if rollout_id is None or self.current is None:
            return
        if self._offset is None:
            first = rollout_id if self._first_rollout_id is None else min(self._first_rollout_id, rollout_id)
            # A loop that generates ahead has not yet trained and pushed the previous rollout.
            pushed = 0 if rollout_id == first else (rollout_id - 1) // self._interval - first // self._interval
            self._offset = self.current - pushed - first // self._interval
        self._offset = max(self._offset, self.current - rollout_id // self._interval)
        # Both training loops push the weights trained on rollout k-2 before they begin rollout k.
        self.current = max(self.current, self._offset + (rollout_id - 1) // self._interval)

    def trained_at(self, rollout_id: int) -> int | None:
        """Return the version that the trainer holds when it trains ``rollout_id``."""
        return None if self._offset is None else self._offset + rollout_id // self._interval

    def last_rollout_within(self, version: int, max_staleness: int) -> int | None:
        """Return the last rollout that may train tokens drawn by ``version``; None if versions are unknown."""
        if self._offset is None:
            return None
        return (version + max_staleness - self._offset + 1) * self._interval - 1


class StalenessBound:
    """Applies ``--max-staleness`` and ``--stale-group-policy``, and counts what they did.

    Without ``--max-staleness`` everything is allowed, and staleness is only measured.
    """

    def __init__(self, config: RolloutConfig, first_rollout_id: int | None = None) -> None:
        self.limit = config.max_staleness
        self.policy = config.stale_group_policy
        self.clock = VersionClock(config, first_rollout_id)
        self.counts: Counter[str] = Counter()
        self._warned = False

    def staleness(self, value: Any, rollout_id: int) -> int | None:
        """Return the staleness of samples if rollout ``rollout_id`` trains them, in versions; None if unknown."""
        trained = self.clock.trained_at(rollout_id)
        oldest = None if trained is None else oldest_version(value)
        return None if trained is None or oldest is None else trained - oldest

    def is_too_old(self, value: Any, rollout_id: int) -> bool:
        """Return True if the samples are too old for rollout ``rollout_id`` to train."""
        if self.limit is None:
            return False
        if self.clock.trained_at(rollout_id) is None and not self._warned:
            self._warned = True
            logger.warning("--max-staleness %d has no effect yet: no engine reports a weight version.", self.limit)
        age = self.staleness(value, rollout_id)
        return age is not None and age > self.limit

    def apply_policy(self, group: Group, rollout_id: int) -> bool:
        """Apply the policy to a group that is too old for ``rollout_id``.

        Returns:
            True if the group can be trained, with its old samples masked; False if all its entries were reset to
            prompts.
        """
        logger.warning(
            "The group of sample %d is %s weight versions old for rollout %d; --max-staleness is %s: %s.",
            first_index(group),
            self.staleness(group, rollout_id),
            rollout_id,
            self.limit,
            "its old samples are masked" if self.policy == "mask" else "it is generated again",
        )
        if self.policy == "mask":
            for sample in leaf_samples(group):
                if self.is_too_old(sample, rollout_id):
                    sample.remove_sample = True
                    self.counts["samples_masked"] += 1
            self.counts["groups_masked"] += 1
            return True
        self.counts["tokens_discarded"] += sum(sample.response_length for sample in leaf_samples(group))
        self.counts["groups_regenerated"] += 1
        group[:] = [back_to_prompt(entry) for entry in group]
        return False

    def screen(self, group: Group, rollout_id: int) -> None:
        """Apply the policy to a group from the data source if it is already too old.

        The policy ``mask`` skips unfinished groups, because more tokens are still to be drawn.
        """
        if (self.policy != "mask" or is_finished(group)) and self.is_too_old(group, rollout_id):
            self.apply_policy(group, rollout_id)

    def metrics(self, groups: Iterable[Any], rollout_id: int) -> dict[str, float]:
        """Return the ``rollout/staleness/*`` metrics of groups to be trained, and the counts since the last call."""
        ages = [age for group in groups if (age := self.staleness(group, rollout_id)) is not None]
        record: dict[str, float] = {}
        if ages:
            record = {"rollout/staleness/mean": sum(ages) / len(ages), "rollout/staleness/max": float(max(ages))}
        if self.limit is not None:
            names = ("groups_regenerated", "tokens_discarded", "groups_masked", "samples_masked")
            record |= {f"rollout/staleness/{name}": self.counts[name] for name in names}
        self.counts.clear()
        return record


def num_groups_allowed(
    bound: StalenessBound, *, next_rollout_id: int, num_rollout: int | None, batch_size: int
) -> float:
    """Return how many groups may be outstanding (in flight or kept) while engines use their current weights.

    Every group has a last rollout: the last one that may train its oldest token.  No new group may start if the
    outstanding groups already fill every batch up to its last rollout.

    Args:
        next_rollout_id: The rollout that takes the next batch.
        num_rollout: Number of rollouts in the run, if known: no group is generated that no rollout would train.
        batch_size: Groups per rollout.

    Returns:
        The number of groups; infinite if neither the bound nor ``num_rollout`` limits it.
    """
    last = float("inf") if num_rollout is None else max(num_rollout - 1, next_rollout_id)
    version = bound.clock.current
    if bound.limit is not None and version is not None:
        within = bound.clock.last_rollout_within(version, bound.limit)
        last = last if within is None else min(last, within)
    return max(last - next_rollout_id + 1, 0) * batch_size


def num_groups_due(
    bound: StalenessBound, *, rollout_id: int, in_flight: Iterable[int], kept: Iterable[int], batch_size: int
) -> int:
    """Return how many groups in flight the batch of ``rollout_id`` must wait for.

    Batches take the oldest groups first.  For every j, this batch must take those groups with last rollout <= j that
    the later batches up to j have no room for.

    Args:
        in_flight: Oldest weight version of each group in flight; 0 if unknown.
        kept: Oldest weight version of each kept group; 0 if unknown.
        batch_size: Groups per rollout.
    """
    if bound.limit is None or bound.clock.current is None:
        return 0
    flying, finished = (
        Counter(bound.clock.last_rollout_within(version, bound.limit) for version in versions if version > 0)
        for versions in (in_flight, kept)
    )
    due = num_flying = num_finished = 0
    for last in sorted(key for key in flying.keys() | finished.keys() if key is not None):
        num_flying += flying[last]
        num_finished += finished[last]
        num_later = max(last - rollout_id, 0) * batch_size
        wanted = min(num_flying + num_finished - num_later, batch_size)
        due = max(due, wanted - num_finished)
    return due
