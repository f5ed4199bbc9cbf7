"""How old a sample is when it is trained, in weight versions; and what happens to one that is older than allowed.

    staleness of a sample = version that the trainer holds when it trains the sample
                          - oldest version that drew a trained token of it

The engines report the version with every answer (``Sample.weight_versions``).  The trainer's version follows from the
order of the training loops: a push after each ``--update-weights-interval`` rollouts.  ``VersionClock`` counts them.
"""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable
from typing import Any

from slime.rollout.abort import worker_urls
from slime.rollout.control_client import control_get
from slime.rollout.groups import Entry, Group, first_index, is_finished, leaf_samples
from slime.rollout.sample_hooks import first_rollout_id
from slime.utils.errors import ProcessError
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


def version_number(version: Any) -> int | None:
    """A weight version as a number; None for one that no trainer of ours gave (an engine's ``"default"``)."""
    try:
        return int(version)
    except (TypeError, ValueError):
        return None


def oldest_version(value: Entry | Iterable[Any]) -> int | None:
    """The oldest version that drew a trained token of these samples; None when nothing of them is drawn yet.

    Removed samples do not count, nor calls that drew nothing or whose tokens were masked later.
    """
    numbers = [
        number
        for sample in leaf_samples(value)
        if sample.response_length > 0 and not sample.remove_sample
        for version in sample.weight_versions[sample.__dict__.get("num_untrained_calls", 0) :]
        if (number := version_number(version)) is not None
    ]
    return min(numbers, default=None)


def back_to_prompt(entry: Entry) -> Sample:
    """The sample as it was before anything was drawn, for an entry whose response is too old to be trained.

    Of an execution that fanned out, the first part is taken; a custom generate function must be able to begin with it.
    """
    sample = next(leaf_samples(entry))
    fresh = Sample()
    num_prompt = len(sample.tokens) - sample.response_length
    drawn = {
        "tokens": list(sample.tokens[:num_prompt]),
        "response": fresh.response,
        "response_length": 0,
        "status": fresh.status,
        "metadata": {key: value for key, value in sample.metadata.items() if key != "start_rollout_id"},
        "non_generation_time": 0.0,
        "spec_info": fresh.spec_info,
        "prefix_cache_info": fresh.prefix_cache_info,
        "weight_versions": [],
        "remove_sample": False,
    }
    for name in ("reward", "loss_mask", "teacher_log_probs", *_REPLAY):
        drawn[name] = None
    sample.__dict__.update(drawn)
    sample.__dict__.pop("num_untrained_calls", None)
    return sample


_REPLAY = ("rollout_log_probs", "rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_routed_experts")


class VersionClock:
    """Which weight version is in the engines, and which one the trainer will hold at each rollout.

    Invariant: ``trained_at(k + n) - trained_at(k)`` is the number of pushes in between.  Versions are unknown (None)
    until an engine has named a number; without a trainer they stay so.
    """

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self._interval = max(getattr(args, "update_weights_interval", None) or 1, 1)
        self._is_still = bool(getattr(args, "debug_rollout_only", False))
        self._offset: int | None = None
        self.current: int | None = None
        """The newest version known to be in the engines."""

    async def look(self, rollout_id: int | None = None) -> None:
        """Ask the engines for their version; one that does not answer is left out.

        Args:
            rollout_id: the rollout that begins now; None between rollouts.
        """
        if self._is_still:
            return

        async def ask(url: str) -> int | None:
            try:
                return version_number((await control_get(f"{url}/model_info")).get("weight_version"))
            except (ProcessError, AttributeError) as error:
                logger.debug("Engine %s does not tell its weight version: %s", url, error)
                return None

        try:
            urls = await worker_urls(self._args)
        except ProcessError as error:
            logger.debug("The engines' weight version is not known: %s", error)
            urls = []
        known = [number for number in await asyncio.gather(*map(ask, urls)) if number is not None]
        self.observe(min(known, default=None), rollout_id)

    def observe(self, version: int | None, rollout_id: int | None = None) -> None:
        """Engines held ``version``, at the beginning of rollout ``rollout_id`` if that is given."""
        if self._is_still:
            return
        if version is not None:
            self.current = version if self.current is None else max(self.current, version)
        if rollout_id is None or self.current is None:
            return
        if self._offset is None:
            first = first_rollout_id()
            first = rollout_id if first is None else min(first, rollout_id)
            # A loop that generates ahead has not pushed what the rollout before this one will train.
            pushed = 0 if rollout_id == first else (rollout_id - 1) // self._interval - first // self._interval
            self._offset = self.current - pushed - first // self._interval
        self._offset = max(self._offset, self.current - rollout_id // self._interval)
        # Both loops push what rollout k-2 trained before they begin rollout k.
        self.current = max(self.current, self._offset + (rollout_id - 1) // self._interval)

    def trained_at(self, rollout_id: int) -> int | None:
        """The version that the trainer holds when it trains ``rollout_id``."""
        return None if self._offset is None else self._offset + rollout_id // self._interval

    def last_rollout_within(self, version: int, max_staleness: int) -> int | None:
        """The last rollout that may train tokens of ``version``."""
        if self._offset is None:
            return None
        return (version + max_staleness - self._offset + 1) * self._interval - 1


class StalenessBound:
    """``--max-staleness`` and ``--stale-group-policy``, with counts of what they did.

    Without the flag everything is allowed, and only the ages are measured.
    """

    def __init__(self, args: Namespace) -> None:
        self.limit: int | None = getattr(args, "max_staleness", None)
        self.policy: str = getattr(args, "stale_group_policy", None) or "regenerate"
        self.clock = VersionClock(args)
        self.counts: Counter[str] = Counter()
        self._warned = False

    def staleness(self, value: Any, rollout_id: int) -> int | None:
        """Versions between the oldest trained token and the training of ``rollout_id``; None when not known."""
        trained, oldest = self.clock.trained_at(rollout_id), oldest_version(value)
        return None if trained is None or oldest is None else trained - oldest

    def is_too_old(self, value: Any, rollout_id: int) -> bool:
        """Whether rollout ``rollout_id`` must not train this as it is."""
        if self.limit is None:
            return False
        if self.clock.trained_at(rollout_id) is None and not self._warned:
            self._warned = True
            logger.warning("--max-staleness %d has no effect yet: no engine tells a weight version.", self.limit)
        age = self.staleness(value, rollout_id)
        return age is not None and age > self.limit

    def settle(self, group: Group, rollout_id: int) -> bool:
        """Apply the policy to a group that is too old for ``rollout_id``.

        Returns:
            Whether the group can be trained, its old samples masked.  If not, all its entries are prompts again.
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

    def mask_old(self, group: Group, rollout_id: int) -> None:
        """With the policy ``mask``, take samples of a finished group that are too old out of the loss."""
        if self.policy == "mask" and self.is_too_old(group, rollout_id):
            self.settle(group, rollout_id)

    def screen(self, groups: Iterable[Group], rollout_id: int) -> None:
        """Settle those of ``groups``, fresh from the data source, that are too old already.

        Unfinished ones are left alone by the policy ``mask``: more of them is still to be drawn.
        """
        for group in groups:
            if (self.policy != "mask" or is_finished(group)) and self.is_too_old(group, rollout_id):
                self.settle(group, rollout_id)

    def metrics(self, groups: Iterable[Any], rollout_id: int) -> dict[str, float]:
        """``rollout/staleness/*`` of the groups that are handed to training, and the counts since the last call."""
        ages = [age for group in groups if (age := self.staleness(group, rollout_id)) is not None]
        record: dict[str, float] = {}
        if ages:
            record = {"rollout/staleness/mean": sum(ages) / len(ages), "rollout/staleness/max": float(max(ages))}
        if self.limit is not None:
            names = ("groups_regenerated", "tokens_discarded", "groups_masked", "samples_masked")
            record |= {f"rollout/staleness/{name}": self.counts[name] for name in names}
        self.counts.clear()
        return record


_BOUNDS: list[tuple[Namespace, StalenessBound]] = []


def bound_of(args: Namespace) -> StalenessBound:
    """The bound of this process's run, which counts the versions from the first rollout on."""
    if not _BOUNDS or _BOUNDS[0][0] is not args:
        _BOUNDS[:] = [(args, StalenessBound(args))]
    return _BOUNDS[0][1]
